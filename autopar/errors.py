"""The one exception users see."""


class AutoparError(Exception):
    """A mistake in what autopar was given: one line that says who, what, why and the way out.

    Example:
        >>> raise AutoparError("fc1.weight: is a DTensor (autopar shards parameters itself). Pass the plain model.")
        Traceback (most recent call last):
        autopar.errors.AutoparError: fc1.weight: is a DTensor (autopar shards parameters itself). Pass the plain model.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
