"""Reference models in plain PyTorch, by their published names and shapes; they know nothing of autopar.

Every module has a factory ``make(**options) -> (model, args, kwargs)``, usable as ``autopar.models.gpt2:make``.
"""

if __name__ != "autopar.models":
    raise ImportError(f"{__name__!r} is a folder of autopar: import autopar.models instead")
