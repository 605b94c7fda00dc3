"""What runs on a rank: collectives, our own ops, the executor."""

if __name__ != "autopar.runtime":
    raise ImportError(f"{__name__!r} is a folder of autopar: import autopar.runtime instead")
