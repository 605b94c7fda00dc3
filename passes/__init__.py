"""Graph to graph: what the compiler does between capture and a rank's program."""

if __name__ != "autopar.passes":
    raise ImportError(f"{__name__!r} is a folder of autopar: import autopar.passes instead")
