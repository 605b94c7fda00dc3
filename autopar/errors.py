"""The exceptions users see."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.plan import Plan


class AutoparError(Exception):
    """A mistake in what autopar was given: one line that says who, what, why and the way out.

    Example:
        >>> raise AutoparError("fc1.weight: is a DTensor (autopar shards parameters itself). Pass the plain model.")
        Traceback (most recent call last):
        autopar.errors.AutoparError: fc1.weight: is a DTensor (autopar shards parameters itself). Pass the plain model.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class NothingFits(AutoparError):
    """No plan fits the devices. ``plan``: the one that comes closest, with what it would need; None where the memory
    of the parameters alone decides.

    Example:
        >>> raise NothingFits("no plan fits: needs 91.2 GiB of 76.0 (saved activations 60.1). Nearest: nodes=2.", None)
        Traceback (most recent call last):
        autopar.errors.NothingFits: no plan fits: needs 91.2 GiB of 76.0 (saved activations 60.1). Nearest: nodes=2.
    """

    def __init__(self, message: str, plan: Plan | None) -> None:
        super().__init__(message)
        self.plan = plan


class NeedsWholeBatch(AutoparError):
    """An op cannot run in microbatches, since it needs all rows at once.

    Example:
        >>> print(NeedsWholeBatch("cross_entropy (train.py:9)"))
        cross_entropy (train.py:9) needs the whole batch at once, so it cannot run in microbatches. Set microbatches=1.
    """

    def __init__(self, what: str, way_out: str = "") -> None:
        super().__init__(
            f"{what} needs the whole batch at once, so it cannot run in microbatches. Set microbatches=1{way_out}."
        )
        self.what = what
