"""What is shipped: the wheel and the sdist hold the linked folders as real files, once."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("models", "passes", "runtime", "solver")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return out


def sources() -> set[str]:
    """Every Python file of the package, by the path under which it is imported."""
    package = ROOT / "autopar"
    own = [*package.glob("*.py"), *(p for p in package.glob("*/*.py") if not p.parent.is_symlink())]
    return {str(p.relative_to(ROOT)) for p in own} | {
        f"autopar/{p.relative_to(ROOT)}" for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")
    }


def test_the_wheel_holds_every_module_once(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        modules = {n for n in names if n.endswith(".py")}
        assert "autopar/py.typed" in names
        assert wheel.read("autopar/models/gpt2.py") == (ROOT / "models/gpt2.py").read_bytes()
    assert modules == sources()


def test_the_wheel_holds_the_cluster_files(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        shipped = {n for n in wheel.namelist() if n.endswith(".json")}
    assert shipped == {str(p.relative_to(ROOT)) for p in (ROOT / "autopar").glob("**/*.json")}


def test_the_sdist_builds_the_same_package(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        members = {m.name.partition("/")[2]: m for m in sdist.getmembers()}
    assert sources() <= set(members)
    assert all(m.isfile() for m in members.values())
    assert not [n for n in members if n.startswith(tuple(f"{f}/" for f in FOLDERS))]
    assert {"Makefile", "constraints.txt", "LICENSE", "README.md", "pyproject.toml"} <= set(members)
