"""The direction of imports, read from the sources: solver knows no torch, passes and runtime know no solver, models
know nothing of ours, and the four folders exist under their full names only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("models", "passes", "runtime", "solver")
FORBIDDEN = {
    "models": ("autopar", "torch.distributed"),
    "passes": ("autopar.solver", "ortools"),
    "runtime": ("autopar.solver", "ortools"),
    "solver": ("torch", "autopar.passes", "autopar.runtime", "autopar.models", "autopar.capture"),
}
OWN_MODELS = "autopar.models"


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """(absolute module, line) of every import in a file, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            assert node.module
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_keep_their_direction(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, line in imported(path)
        for forbidden in FORBIDDEN[folder]
        if inside(name, forbidden) and not (folder == "models" and inside(name, OWN_MODELS))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", FOLDERS)
def test_nobody_imports_a_folder_by_its_bare_name(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for top in (*FOLDERS, "autopar", "tests")
        for path in sorted((ROOT / top).rglob("*.py"))
        for name, line in imported(path)
        if inside(name, folder)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", FOLDERS)
def test_bare_import_is_refused(folder: str) -> None:
    run = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        f"ImportError: {folder!r} is a folder of autopar: import autopar.{folder} instead"
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folder_is_linked_into_the_package(folder: str) -> None:
    link = ROOT / "autopar" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


def test_import_of_the_package_is_light() -> None:
    code = "import sys, autopar; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_module_compile_does_not_hide_the_function() -> None:
    code = "import autopar, autopar.compile; from autopar.compile import compile; assert autopar.compile is compile"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_public_name_resolves() -> None:
    import autopar

    for name in autopar.__all__:
        assert getattr(autopar, name) is not None
        assert name in dir(autopar)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = autopar.nothing
