"""What runs on a rank: collectives, parameters as DTensors, and the program that executes a lowered step."""

if __name__ != "autopar.runtime":
    raise ImportError(f"{__name__!r} is a folder of autopar: import autopar.runtime instead")
