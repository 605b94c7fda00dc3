"""What is seen of a search while it runs: a bar with the best plan, its bound and gap; and Ctrl-C ends it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.explain.quantities import seconds_text
from autopar.solver.effort import Progress as Found
from autopar.solver.effort import Watch


@contextmanager
def watched() -> Iterator[Watch]:
    """What to call as a search goes on. On a terminal it draws a bar on stderr. Once a search has begun, the first
    Ctrl-C makes it return the best plan so far, as soon as it knows one, and says so; any other ends the program."""
    searching, stopped = threading.Event(), threading.Event()
    bar = Progress(
        TextColumn("searching"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} candidates  {task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task = bar.add_task(said(None), total=1)

    def watch(found: Found) -> bool:
        searching.set()
        bar.update(task, description=said(found), total=found.candidates, completed=found.candidates - found.waiting)
        return not stopped.is_set()

    with _interrupt(searching, stopped), bar:
        yield watch


def said(found: Found | None) -> str:
    """A line of what is known.

    >>> said(Found(7.2871, 7.28, 3, 40)), said(None)
    ('best 7.29 s, bound 7.28 s, gap 0.10 %', 'no plan yet')
    """
    if found is None or found.seconds == inf or found.gap is None:
        return "no plan yet"
    return f"best {seconds_text(found.seconds)}, bound {seconds_text(found.bound)}, gap {100 * found.gap:.2f} %"


@contextmanager
def _interrupt(searching: threading.Event, stopped: threading.Event) -> Iterator[None]:
    """The first Ctrl-C is only noted while there is a search to hear of it. (A process with a handler of its own keeps
    that.)"""
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not own or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(_number: int, _frame: FrameType | None) -> None:
        if not searching.is_set() or stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()
        print("autopar: ending with the best plan so far (Ctrl-C again: at once).", file=sys.stderr)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


__all__ = ["said", "watched"]
