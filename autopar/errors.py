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
