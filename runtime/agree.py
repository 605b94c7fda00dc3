"""How ranks agree on a text before they have groups: rank 0 decides once all have come, or all end with one line.

Through the store that started them, so that it needs no device and names a rank that does not come.
"""

from __future__ import annotations

import base64
import itertools
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from autopar.errors import AutoparError
from autopar.runtime.mesh import RankError

T = TypeVar("T")

GRACE = timedelta(seconds=5)  # that the others wait longer than rank 0, which then can say who is missing
SHORTEST, LONGEST = 0.001, 0.05  # seconds between two looks at the store
_meetings = itertools.count()


def agree(
    what: str,
    own: Callable[[], T],
    key: Callable[[T], str],
    decide: Callable[[T], str],
    timeout: timedelta,
    elsewhere: Callable[[], str] = str,
    meeting: str = "",
) -> tuple[T, str]:
    """What ``own`` makes here, and on every rank the text that ``decide`` makes of it on rank 0.

    ``key``: must be the same on every rank; ``elsewhere``: the line with which waiting ends, once another rank is found
    to do something else (empty: none is); ``meeting``: its name, where ranks that have come apart may meet again
    elsewhere (default: a number, as ranks compile in the same order). Collective over all processes; one process needs
    no group. Raises what ``own`` raises; elsewhere, and where ``decide`` raises, AutoparError with that line; where the
    keys differ or a rank does not come within ``timeout``, RankError naming it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        made = own()
        return made, decide(made)
    store = PrefixStore(f"autopar/agree/{meeting or next(_meetings)}", dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    try:
        made = own()
        store.set(str(rank), f"={key(made)}")
    except BaseException as error:
        store.set(str(rank), f"!{_line(error)}")
        if rank == 0:
            _post(store, f"!rank 0: {_line(error)}")
        raise
    if rank == 0:
        _post(store, _verdict(store, what, lambda: decide(made), timeout, elsewhere))
    packed = _read(store, "verdict", timeout + GRACE, f"{what}: rank 0 did not come", elsewhere)
    text = zlib.decompress(base64.b64decode(packed)).decode()
    if text[0] == "?":
        raise RankError(text[1:])
    if text[0] == "!":
        raise AutoparError(text[1:])
    return made, text[1:]


def _verdict(
    store: Store, what: str, decide: Callable[[], str], timeout: timedelta, elsewhere: Callable[[], str]
) -> str:
    first = ""
    for rank in range(dist.get_world_size()):
        try:
            said = _read(store, str(rank), timeout, f"{what}: rank {rank} did not come", elsewhere).decode()
        except AutoparError as error:
            return f"{'?' if isinstance(error, RankError) else '!'}{error}"
        first = first or said
        if said[0] == "!":
            return f"?{what}: rank {rank} failed: {said[1:]}"
        if said != first:
            return (
                f"!{what}: rank {rank} captured another program than rank 0 (a model, inputs or options that depend on "
                "the rank). Give every rank the same model and shapes."
            )
    try:
        return f"={decide()}"
    except AutoparError as error:
        return f"!{error}"
    except BaseException as error:
        _post(store, f"?{what}: rank 0 failed: {_line(error)}")
        raise


def _post(store: Store, text: str) -> None:
    store.set("verdict", base64.b64encode(zlib.compress(text.encode())).decode())


def _read(store: Store, key: str, timeout: timedelta, missing: str, elsewhere: Callable[[], str]) -> bytes:
    ends, pause = time.monotonic() + timeout.total_seconds(), SHORTEST
    try:
        while not store.check([key]):
            if time.monotonic() > ends:
                raise RuntimeError
            if line := elsewhere():
                raise AutoparError(line)
            time.sleep(pause := min(1.5 * pause, LONGEST))
        return bytes(store.get(key))
    except AutoparError:
        raise
    except RuntimeError as error:  # its time is over, or the store has gone with the rank that held it
        seconds = f"{timeout.total_seconds():g} s"
        raise RankError(
            f"{missing} within {seconds} (it failed, hangs or has left). Look at its own error first."
        ) from error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, AutoparError) else f"{type(error).__name__}: {text[:200]}"
