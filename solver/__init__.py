"""Search over plans: numbers and names only, without torch."""

if __name__ != "autopar.solver":
    raise ImportError(f"{__name__!r} is a folder of autopar: import autopar.solver instead")
