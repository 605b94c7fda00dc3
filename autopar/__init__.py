"""autopar: compile an unmodified PyTorch model for a cluster, with the numbers of one process.

>>> import autopar
>>> "compile" in dir(autopar)
True
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.checkpoint import load, save
    from autopar.cluster import Cluster
    from autopar.compile import Parallel, compile
    from autopar.errors import AutoparError
    from autopar.initialise import deferred_init
    from autopar.load_program import load_program
    from autopar.passes.rules.core import Rule, dims, factors
    from autopar.plan import Plan

__version__ = "0.1.0"
__all__ = [
    "AutoparError",
    "Cluster",
    "Parallel",
    "Plan",
    "Rule",
    "compile",
    "deferred_init",
    "dims",
    "factors",
    "load",
    "load_program",
    "save",
]

# Names come from their modules at first use: reading a plan or asking for help must not cost the import of torch.
_HOME = {
    "AutoparError": "autopar.errors",
    "Cluster": "autopar.cluster",
    "Parallel": "autopar.compile",
    "Plan": "autopar.plan",
    "Rule": "autopar.passes.rules.core",
    "compile": "autopar.compile",
    "deferred_init": "autopar.initialise",
    "dims": "autopar.passes.rules.core",
    "factors": "autopar.passes.rules.core",
    "load": "autopar.checkpoint",
    "load_program": "autopar.load_program",
    "save": "autopar.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing the module ``autopar.compile`` must not put it in the place of the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
