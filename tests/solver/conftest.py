"""Makes ``random_problems`` and ``searches`` importable from the tests beside them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for name in ("random_problems", "searches"):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
