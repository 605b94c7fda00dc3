"""What solving one candidate comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from autopar.solver.lagrangian import Multipliers
from autopar.solver.problem import Assignment


@dataclass(frozen=True)
class Answer:
    """``objective``: seconds a step of ``assignment``, by `stages`; ``bound``: seconds that nothing can beat.

    ``status``: "solved"; "cutoff": stopped without a plan, as ``bound`` has reached the cutoff; "infeasible": nothing
    was found that fits, which is proven where ``least_bound`` is above the limit (``bound`` is then infinite).
    ``least_bytes``: the peak of ``least_assignment``, the leanest found; no assignment's peak is below ``least_bound``.
    Both are only found where nothing fits. ``multipliers`` give ``multipliers_bound`` again (`lagrangian.lower_bound`);
    ``bound`` is larger where ``ilp`` closed what they left. ``exact``: elimination had to split no table.
    ``deterministic``: nothing was ended by the clock."""

    status: Literal["solved", "cutoff", "infeasible"]
    objective: float
    bound: float
    assignment: Assignment | None
    multipliers: tuple[Multipliers, ...]
    multipliers_bound: float
    least_bytes: float = inf
    least_bound: float = 0.0
    least_assignment: Assignment | None = None
    exact: bool = True
    deterministic: bool = True
    stats: Mapping[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float | None:
        """1 - bound / objective; None without an assignment."""
        if self.assignment is None:
            return None
        return 1 - self.bound / self.objective if self.objective > 0 else 0.0
