"""How long a search goes on, and what it says meanwhile.

>>> effort = Effort(gap=0.01)
>>> effort.begun().is_over
False
>>> Effort(time_limit=0.0).begun().is_over
True
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from autopar.errors import AutoparError

GAP = 0.005
"""Relative: a plan so near to the bound is good enough."""


@dataclass(frozen=True)
class Progress:
    """Of a search: ``seconds`` of a step of the best plan so far (infinite before one fits), ``bound``: what none goes
    below; ``waiting``: candidates not yet decided of ``candidates``."""

    seconds: float
    bound: float
    waiting: int
    candidates: int

    @property
    def gap(self) -> float | None:
        """1 - bound / seconds; None before a plan is known."""
        return max(0.0, 1 - self.bound / self.seconds) if 0 < self.seconds < inf else None


Watch = Callable[[Progress], bool | None]
"""Called as a search goes on. False ends it, with the best plan so far as soon as there is one."""


@dataclass
class Effort:
    """``gap``: relative, where the search stops; ``time_limit``: seconds after which it only goes on until a plan is
    known. Raises AutoparError for numbers that are none of these."""

    gap: float = GAP
    time_limit: float | None = None
    watch: Watch | None = None
    _end: float = field(default=inf, repr=False)
    _stopped: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.gap < 1:
            raise AutoparError(f"gap: {self.gap} is no share of the step time. Legal: 0 to 1, as 0.01 for 1 %.")
        if self.time_limit is not None and not 0 <= self.time_limit < inf:
            raise AutoparError(f"time limit: {self.time_limit} is no number of seconds. Legal: 0 or more.")

    def begun(self) -> Effort:
        """The same, from now on."""
        end = inf if self.time_limit is None else time.monotonic() + self.time_limit
        return replace(self, _end=end, _stopped=False)

    def tell(self, progress: Progress) -> None:
        """Tells who watches, and hears whether to go on."""
        if self.watch is not None and self.watch(progress) is False:
            self._stopped = True

    @property
    def is_over(self) -> bool:
        """Whether a plan that is known is to be returned as it is."""
        return self._stopped or time.monotonic() >= self._end


__all__ = ["GAP", "Effort", "Progress", "Watch"]
