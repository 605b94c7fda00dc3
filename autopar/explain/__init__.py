"""What a plan means, made from a `Plan` alone: a page is data (sections of rows), printed by rich or as JSON.

Each section is one file. `SECTIONS` is the page.

>>> from autopar.plan import ModelId, Plan
>>> [section.title for section in explain(Plan(ModelId("sha256:0"))).sections]
['Plan', 'Not vouched for']
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.explain.alternatives import nearest, next_best
from autopar.explain.collectives import collectives
from autopar.explain.divided import divided
from autopar.explain.doubts import doubts
from autopar.explain.formulas import formulas
from autopar.explain.layouts import layouts
from autopar.explain.memory import memory
from autopar.explain.page import Page, Section, render
from autopar.explain.parameters import parameters
from autopar.explain.proof import proof
from autopar.explain.recompute import recompute
from autopar.explain.shadow_prices import shadow_prices
from autopar.explain.stages import order, stages
from autopar.explain.step_time import step_time
from autopar.explain.verdict import verdict
from autopar.explain.whole import whole
from autopar.plan import Plan
from autopar.schema import write

SECTIONS = (
    verdict,
    nearest,
    parameters,
    layouts,
    recompute,
    stages,
    order,
    step_time,
    memory,
    collectives,
    divided,
    whole,
    next_best,
    shadow_prices,
    proof,
    doubts,
    formulas,
)


def explain(plan: Plan, more: Iterable[Section] = ()) -> Page:
    """The page of a plan; ``more``: sections to put after the first one, or in the place of those of the same title.
    Empty sections are left out."""
    given = {section.title: section for section in more if section.rows}
    first, *rest = (given.pop(s.title, s) for s in (section(plan) for section in SECTIONS))
    head = {
        "mesh": dict(plan.mesh),
        "microbatches": plan.microbatches,
        "predicted": write(plan.predicted),
        "proof": write(plan.proof),
    }
    return Page(plan.one_line(), tuple(s for s in (first, *given.values(), *rest) if s.rows), plan.fits, head)


__all__ = ["SECTIONS", "Page", "Section", "explain", "render"]
