"""Running what may break the process: in a copy of it.

Probing gives an op pieces that do not fit together, to see that it says so. Ops of torch and ops written in Python do;
a kernel of anyone's in C++ may write past the end of a tensor instead. Such an op is probed in a forked copy of the
process, which has the same ops and may end as it likes.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

PATIENCE = 300.0  # seconds until a copy is taken to hang: far more than any takes, so that ranks do not differ
KERNELS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def checks_sizes(target: Any) -> bool:
    """Whether an op may be given operands that do not fit: those of torch's that anyone may call check them, and so do
    those that kernels in Python are made of."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    namespace, name = target._schema.name.split("::")
    name += f".{target._schema.overload_name}" if target._schema.overload_name else ""
    if namespace in ("aten", "prims"):
        return not name.startswith("_")
    python = any(f"{namespace}/{name}/{key}" in torch.library._impls for key in KERNELS)
    return namespace == "autopar" or python


def apart(ask: Callable[[], T]) -> T | None:
    """What ``ask`` returns in a copy of this process, pickled; None where the copy broke or hung."""
    if not hasattr(os, "fork"):
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    ends, begins = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads, which the copy does not have and does not need
        copy = os.fork()
    if copy == 0:
        _answer(ask, begins)
    os.close(begins)
    said = _read(ends, time.monotonic() + PATIENCE)
    os.close(ends)
    if said is None:
        os.kill(copy, signal.SIGKILL)
    _, status = os.waitpid(copy, 0)
    if not said or status != 0:
        return None
    found: T = pickle.loads(said)
    return found


def _answer(ask: Callable[[], Any], into: int) -> None:
    """In the copy: write what ``ask`` returns and end, without what a process does at its end."""
    code = 1
    try:
        faulthandler.disable()
        torch.set_num_threads(1)  # the other threads are not in the copy
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)  # what breaks says so at length
        with os.fdopen(into, "wb") as pipe:
            pickle.dump(ask(), pipe)
        code = 0
    finally:
        os._exit(code)


def _read(ends: int, until: float) -> bytes | None:
    """All that is written until the other end closes; None where that takes too long."""
    said = b""
    while True:
        ready, _, _ = select.select([ends], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        more = os.read(ends, 1 << 16)
        if not more:
            return said
        said += more
