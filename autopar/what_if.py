"""Other conditions, each solved again: what one more of something is worth, and what less memory costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.capture import Capture
from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.explain.quantities import bytes_text
from autopar.explain.why_not import Other
from autopar.hardware import Figure, Tier
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.solver.effort import Effort

GIB = 2**30
NEXT, LOOKS = 10, 30
"""Next-best plans that are listed, and candidates among which they are looked for."""
SHARES = (0.8, 0.6, 0.45, 0.3, 0.2)
"""Of the chosen plan's peak: the memory limits of the Pareto front."""


@dataclass(frozen=True)
class Conditions:
    """What a plan was made for."""

    captured: Capture
    pins: Pins
    cluster: Cluster
    effort: Effort

    def other(self, name: str, *, pins: Pins | None = None, cluster: Cluster | None = None) -> Other:
        """The plan with other pins or on another cluster, or why there is none."""
        try:
            planned = plan_training(
                self.captured, pins or self.pins, cluster or self.cluster, {}, self.effort, nearest=False
            )
            return Other(name, planned.plan)
        except NothingFits as error:
            return Other(name, error.plan, str(error), fits=False)
        except AutoparError as error:
            return Other(name, None, str(error))


def shadow_prices(asked: Conditions) -> Iterator[Other]:
    """With one GiB more a rank, one node more, and each tier twice as fast."""
    cluster = asked.cluster
    yield asked.other("one more GiB a rank", cluster=cluster.with_memory(cluster.limit + GIB))
    if cluster.name != "local":
        yield asked.other("one more node", cluster=replace(cluster, nodes=cluster.nodes + 1))
    if cluster.nodes > 1:
        yield asked.other("twice the nodes", cluster=replace(cluster, nodes=2 * cluster.nodes))
    for i, tier in enumerate(cluster.tiers):
        if i == 0 or cluster.nodes > 1:
            tiers = (*cluster.tiers[:i], twice_as_fast(tier), *cluster.tiers[i + 1 :])
            yield asked.other(f"{tier.name} at twice the bandwidth", cluster=replace(cluster, tiers=tiers))


def twice_as_fast(tier: Tier) -> Tier:
    """The same links with twice the bandwidth, and the same latencies."""

    def doubled(figure: Figure) -> Figure:
        return Figure(2 * figure.value, f"twice: {figure.source}", False)

    links = {kind: replace(link, bandwidth=doubled(link.bandwidth)) for kind, link in tier.collectives.items()}
    return replace(tier, bandwidth=doubled(tier.bandwidth), collectives=links)


def pareto(asked: Conditions, plan: Plan) -> Iterator[Other]:
    """With ever less memory, until nothing fits: from the peak of the chosen plan down."""
    peak = (plan.predicted.peak_mem_gib or 0.0) * GIB
    for share in SHARES:
        found = asked.other(bytes_text(share * peak), cluster=asked.cluster.with_memory(int(share * peak)))
        yield found
        if found.answer != "fits":
            break


def next_best(asked: Conditions, plan: Plan) -> Plan:
    """The plan with its next-best ones, predicted."""
    again = plan_training(asked.captured, asked.pins, asked.cluster, {}, asked.effort, others=LOOKS)
    return replace(plan, alternatives=again.plan.alternatives[:NEXT])


__all__ = ["Conditions", "next_best", "pareto", "shadow_prices", "twice_as_fast"]
