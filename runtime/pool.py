"""A pool of rank processes on this machine, for ``autopar verify`` and for tests.

The ranks are forked from a server process that has imported torch, so that eight of them stand in about a second, and
they are kept for many runs. Each has a gloo default group of all ranks, one thread and no GPU.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from autopar.errors import AutoparError

T = TypeVar("T")

GRACE = 1.0  # seconds that the other ranks get to answer once one has failed
GROUP_SHARE = 0.8  # of the timeout: a collective gives up earlier than the pool, so that ranks that only waited say so
_DEAD = object()  # in place of an answer, which may be None
START = 60.0  # seconds that ranks get at least to start, torch's import in the server process included


@dataclass(frozen=True)
class _Failure:
    """What a rank answers when its function raised."""

    error: bytes | None  # the pickled exception, where it can be pickled
    text: str  # last line of the traceback
    trace: str
    secondary: bool  # a collective failed: some other rank may be the cause


class RankPool:
    """``world_size`` processes that run one function at a time, all ranks together.

    ``timeout`` (seconds) bounds each `run`; ``preload``: modules to import once for all ranks, where this is the first
    pool of the process. An exception on a rank is raised here, with a note that names the rank. A rank that dies or
    hangs ends all ranks and raises one `AutoparError` that names it; the next `run` starts new ones.

        >>> with RankPool(2) as pool:                                   # doctest: +SKIP
        ...     pool.run(math.pow, 2.0)      # rank 0: pow(0, 2.0), rank 1: pow(1, 2.0)
        [0.0, 1.0]
    """

    def __init__(self, world_size: int, timeout: float = 60.0, preload: Sequence[str] = ()) -> None:
        if world_size < 1 or timeout <= 0:
            raise AutoparError(f"pool: {world_size} ranks and a timeout of {timeout} s (both must be positive).")
        self.world_size, self.timeout, self.preload = world_size, timeout, preload
        self._ranks: list[tuple[Any, Connection]] = []
        self._store: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """``fn(rank, *args)`` on every rank; the results by rank. ``fn``, ``args`` and results must pickle."""
        if not self._ranks:
            self._start()
        module = sys.modules.get(getattr(fn, "__module__", None) or "")
        home = getattr(module, "__name__", ""), getattr(module, "__file__", None)
        payload = pickle.dumps((*home, pickle.dumps((fn, args))))
        for _, connection in self._ranks:
            with contextlib.suppress(OSError):  # a dead rank is named below
                connection.send_bytes(payload)
        try:
            return self._collect(getattr(fn, "__qualname__", repr(fn)), self.timeout)
        except KeyboardInterrupt:
            self._kill()  # else the next run would read the answers to this one
            raise

    def close(self) -> None:
        """End the ranks. May be called twice."""
        for _, connection in self._ranks:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        end = time.monotonic() + 2 * GRACE
        for process, _ in self._ranks:
            process.join(max(0.0, end - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        from torch._C._distributed_c10d import TCPStore

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "autopar.runtime.ops", *self.preload])
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-pool-")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.world_size, self._store.port, self.timeout * GROUP_SHARE, self._dump(rank))
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self._collect("start", max(START, self.timeout))

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """The answers of all ranks; else end the ranks (unless all failed alike) and raise for the one to blame."""
        answers: dict[int, Any] = {}
        dead: list[int] = []
        end = time.monotonic() + timeout
        failed = False
        while len(answers) + len(dead) < self.world_size and time.monotonic() < end:
            open_ = [r for r in range(self.world_size) if r not in answers and r not in dead]
            handles = {self._ranks[r][1]: r for r in open_} | {self._ranks[r][0].sentinel: r for r in open_}
            for rank in sorted({handles[h] for h in wait(list(handles), max(0.0, end - time.monotonic()))}):
                answer = self._receive(rank)
                if answer is _DEAD:
                    dead.append(rank)
                else:
                    answers[rank] = answer
                if not failed and (answer is _DEAD or isinstance(answer, _Failure)):
                    failed, end = True, min(end, time.monotonic() + GRACE)
        failures = {r: a for r, a in answers.items() if isinstance(a, _Failure)}
        if not failures and len(answers) == self.world_size:
            return [answers[r] for r in range(self.world_size)]
        alike = len(failures) == self.world_size and len({f.text for f in failures.values()}) == 1
        try:
            raise self._blame(what, timeout, answers, failures, dead)
        finally:
            if not alike or next(iter(failures.values())).secondary:
                self._kill()

    def _receive(self, rank: int) -> Any:
        """The rank's answer, or `_DEAD` when it has died."""
        process, connection = self._ranks[rank]
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            process.join(GRACE)
            return _DEAD

    def _blame(
        self, what: str, timeout: float, answers: dict[int, Any], failures: dict[int, _Failure], dead: list[int]
    ) -> BaseException:
        if dead:
            code = self._ranks[dead[0]][0].exitcode
            how = f"was ended by {signal.Signals(-code).name}" if (code or 0) < 0 else f"ended with exit code {code}"
            return AutoparError(f"pool: rank {dead[0]} {how} during {what} (all ranks were stopped). Run it again.")
        primary = next((r for r, f in failures.items() if not f.secondary), None)
        silent = [r for r in range(self.world_size) if r not in answers]
        if primary is None and silent:
            return self._hung(what, timeout, silent)
        return _raised(next(iter(failures)) if primary is None else primary, failures)

    def _hung(self, what: str, timeout: float, silent: list[int]) -> AutoparError:
        """Ask the silent ranks where they are; those that only wait for others are not to blame."""
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.2)
        where = {r: _innermost(Path(self._dump(r))) for r in silent}
        stuck = [r for r in silent if not _is_waiting(where.get(r, ""))] or silent
        names = ("rank " if len(stuck) == 1 else "ranks ") + ", ".join(map(str, stuck))
        at = f", now at {where[stuck[0]]}" if where.get(stuck[0]) else ""
        return AutoparError(
            f"pool: {names} did not answer {what} within {timeout:g} s (hung or too slow{at}; all ranks were stopped). "
            "Give the pool a longer timeout if the work is long."
        )

    def _dump(self, rank: int) -> str:
        assert self._folder is not None
        return str(Path(self._folder.name) / f"rank{rank}.txt")

    def _kill(self) -> None:
        for process, connection in self._ranks:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
            connection.close()
        self._ranks, self._store = [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _raised(rank: int, failures: dict[int, _Failure]) -> BaseException:
    failure = failures[rank]
    error: BaseException = RuntimeError(f"rank {rank}: {failure.text}")
    if failure.error is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(failure.error)
    error.add_note(f"raised on rank {rank} of the pool:\n{failure.trace}")
    return error


def _innermost(dump: Path) -> str:
    text = dump.read_text(errors="replace") if dump.exists() else ""
    found = re.search(r'File "([^"]+)", line (\d+)', text)
    return f"{found[1]}:{found[2]}" if found else ""


def _is_waiting(where: str) -> bool:
    return bool(re.search(r"torch/(_ops|distributed/|autograd/graph)|runtime/(collectives|ops)\.py", where))


# In the rank's process


def _serve(connection: Connection, rank: int, world_size: int, port: int, timeout: float, dump: str) -> None:
    """Join the group, then answer requests until the parent says stop or is gone."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    faulthandler.register(signal.SIGUSR1, file=open(dump, "w"), all_threads=False)  # noqa: SIM115  open while it lives
    torch.set_num_threads(1)
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=max(START, timeout)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    try:
        _reply(connection, "ready")
        while request := connection.recv_bytes():
            _reply(connection, _answer(rank, request))
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone: leaving the group in order would wait for the others
    dist.destroy_process_group()


def _reply(connection: Connection, answer: object) -> None:
    try:
        data = pickle.dumps(answer)
    except Exception as error:
        data = pickle.dumps(_failure(TypeError(f"the result cannot be pickled: {error}")))
    connection.send_bytes(data)


def _answer(rank: int, request: bytes) -> object:
    try:
        name, file, payload = pickle.loads(request)
        _provide(name, file)
        fn, args = pickle.loads(payload)
        return fn(rank, *args)
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> _Failure:
    import torch.distributed as dist

    text = traceback.format_exception_only(error)[-1].strip()
    secondary = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and bool(re.search(r"gloo|Connection (closed|reset)|[Tt]imed out", text))
    )
    trace = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return _Failure(pickled, text, trace, secondary)


def _provide(name: str, file: str | None) -> None:
    """Make the function's module importable under its name in the parent, from its file where no path leads there."""
    if not name or file is None or name in sys.modules:
        return
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return
    packages: Sequence[str] = name.split(".")[:-1]
    for i in range(len(packages)):
        stub = types.ModuleType(".".join(packages[: i + 1]))
        stub.__path__ = []
        sys.modules.setdefault(stub.__name__, stub)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} is not a Python file"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
