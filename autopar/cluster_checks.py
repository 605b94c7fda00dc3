"""What a cluster file must obey beyond its schema; errors name the JSON path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autopar.hardware import DTYPES, Chip, Power, Tier, ascending
from autopar.schema import fail, nearest, write
from autopar.solver.cost import KINDS

if TYPE_CHECKING:
    from autopar.cluster import Cluster

NEEDED = KINDS[:-1]  # of every tier: all but send
EFFICIENCIES = ("matmul", "memory", "unaligned", "beside", "scores", *(f"matmul_{d}" for d in DTYPES))


def check(cluster: Cluster, where: str) -> None:
    """Raises AutoparError for the first figure that is not legal."""
    for name in ("nodes", "ranks_per_node"):
        if getattr(cluster, name) < 1:
            raise fail(where, f"$.{name}", f"{getattr(cluster, name)} is not legal. Legal: 1 or more.")
    _figures(write(cluster), where, "$")
    _chip(cluster.chip, where)
    _tiers(cluster.tiers, where)
    for i, protocol in enumerate(cluster.protocols):
        for name in ("base", "inner", "outer", "fraction"):
            if not getattr(protocol, name) > 0:
                raise fail(where, f"$.protocols[{i}].{name}", "is not legal. Legal: more than 0.")


def _chip(chip: Chip, where: str) -> None:
    _keys(chip.flops, DTYPES, ("fp32",), where, "$.chip.flops")
    _keys(chip.efficiency, EFFICIENCIES, EFFICIENCIES[:2], where, "$.chip.efficiency")
    for name, figure in chip.efficiency.items():
        _fraction(figure.value, where, f"$.chip.efficiency.{name}.value")
    if chip.reserved is not None:
        if chip.reserved.context.value >= chip.memory.value:
            legal = f"less than {chip.memory.value:g}, the memory"
            value = chip.reserved.context.value
            raise fail(where, "$.chip.reserved.context.value", f"{value:g} leaves nothing. Legal: {legal}.")
        _fraction(chip.reserved.fragmentation.value, where, "$.chip.reserved.fragmentation.value")
    if chip.power is not None:
        _power(chip.power, where)
    _keys(chip.matmul, DTYPES, (), where, "$.chip.matmul")
    for dtype, table in chip.matmul.items():
        sizes = [table.batch, table.m, table.n, table.k]
        path = f"$.chip.matmul.{dtype}"
        for name, axis in zip(("batch", "m", "n", "k"), sizes):
            _ascending([(float(x), 1.0) for x in axis], where, f"{path}.{name}")
        count = len(table.batch) * len(table.m) * len(table.n) * len(table.k)
        if len(table.points) != count:
            raise fail(where, f"{path}.points", f"has {len(table.points)} items. Legal: {count}, one for each shape.")
        if not min(table.points) > 0:
            raise fail(where, f"{path}.points", f"{min(table.points)} is not legal. Legal: more than 0.")


def _power(power: Power, where: str) -> None:
    if not power.sustained:
        raise fail(where, "$.chip.power.sustained", "is empty. Legal: a fraction for one cap in W or more.")
    if power.idle.value >= power.cap.value:
        raise fail(where, "$.chip.power.idle.value", f"is not legal. Legal: less than {power.cap.value:g}, the cap.")
    for watts, figure in power.sustained.items():
        path = f"$.chip.power.sustained.{watts}"
        if not watts.isdigit() or int(watts) <= power.idle.value:
            raise fail(where, path, f"is no power cap. Legal: W, more than {power.idle.value:g}.")
        _fraction(figure.value, where, f"{path}.value")


def _fraction(value: float, where: str, path: str) -> None:
    if value > 1:
        raise fail(where, path, f"{value:g} is not a fraction. Legal: above 0, at most 1.")


def _tiers(tiers: tuple[Tier, ...], where: str) -> None:
    if not tiers or tiers[-1].spans is not None:
        raise fail(where, "$.tiers", "must end in a tier that reaches every rank (spans: null).")
    inner = 1
    for i, tier in enumerate(tiers):
        _keys(tier.collectives, KINDS, NEEDED, where, f"$.tiers[{i}].collectives")
        for kind, link in tier.collectives.items():
            for ranks in link.curves:
                if not ranks.isdigit() or int(ranks) < 2:
                    path = f"$.tiers[{i}].collectives.{kind}.curves"
                    raise fail(where, path, f"{ranks!r} is not a number of ranks. Legal: 2 or more.")
        if tier.overlap is not None:
            _fraction(tier.overlap.value, where, f"$.tiers[{i}].overlap.value")
        if tier.oversubscription is not None and tier.oversubscription.value < 1:
            value = tier.oversubscription.value
            raise fail(where, f"$.tiers[{i}].oversubscription.value", f"{value:g} is not legal. Legal: 1 or more.")
        if i < len(tiers) - 1:
            if tier.spans is None:
                raise fail(where, f"$.tiers[{i}].spans", "null is for the last tier. Legal: a number of ranks.")
            if tier.spans < 2 * inner or tier.spans % inner:
                legal = "2 or more" if inner == 1 else f"a multiple of {inner}, the tier inside it, and more"
                raise fail(where, f"$.tiers[{i}].spans", f"{tier.spans} is not legal. Legal: {legal}.")
            inner = tier.spans


def _keys(found: Mapping[str, object], legal: tuple[str, ...], needed: tuple[str, ...], where: str, path: str) -> None:
    for key in found:
        if key not in legal:
            raise fail(where, path, f"unknown key {key!r}{nearest(key, legal) or '.'} Legal: {', '.join(legal)}.")
    for key in needed:
        if key not in found:
            raise fail(where, path, f"the key {key!r} is missing. Legal: {', '.join(legal)}.")


def _ascending(points: object, where: str, path: str) -> None:
    assert isinstance(points, list)
    if not points:
        raise fail(where, path, "is empty.")
    if not ascending(tuple((float(x), float(y)) for x, y in points)):
        raise fail(where, path, "is not legal. Legal: ascending, and more than 0.")


def _figures(value: object, where: str, path: str) -> None:
    """Every figure is positive, and every figure and table has a source."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            _figures(item, where, f"{path}[{i}]")
    elif isinstance(value, dict):
        if "source" in value and not value["source"].strip():
            raise fail(where, f"{path}.source", "is empty. Say where the figure comes from.")
        if "value" in value and not value["value"] > 0:
            raise fail(where, f"{path}.value", f"{value['value']} is not legal. Legal: more than 0.")
        points = value.get("points")
        if isinstance(points, list) and (not points or isinstance(points[0], list)):
            _ascending(points, where, f"{path}.points")
        elif points is None and "source" not in value:
            for key, item in value.items():
                _figures(item, where, f"{path}.{key}")
