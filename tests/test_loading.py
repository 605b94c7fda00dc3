"""Models by name: files, modules, options and losses that load. (What does not load is in test_bad_input.)"""

import pickle
import subprocess
import sys

import pytest

from autopar.loading import ModelSpec, parse_option

FILE = """
import helper_of_the_model
import torch

def make(width=4, bias=True, name="x"):
    torch.manual_seed(0)
    return torch.nn.Linear(width, 2, bias=bias), [torch.ones(3, width)], {}

def loss(outputs, *inputs):
    return outputs.sum()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(FILE)
    (tmp_path / "helper_of_the_model.py").write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith(("autopar_model_", "helper_of_the_model"))]:
        del sys.modules[name]


def test_a_file_with_options_and_a_loss(folder):
    loaded = ModelSpec.parse("model.py:make", ["width=6", "bias=false"], "model.py:loss").load()
    assert loaded.model.in_features == 6 and loaded.model.bias is None
    assert isinstance(loaded.args, tuple) and loaded.args[0].shape == (3, 6) and loaded.kwargs == {}
    assert loaded.loss is not None and loaded.loss.__name__ == "loss"


def test_a_spec_works_in_another_folder_and_process(folder, monkeypatch):
    spec = ModelSpec.parse("model.py:make", ["width=6"])
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec.load().model.in_features == 6


def test_a_module_of_the_working_directory(folder):
    code = "from autopar.loading import ModelSpec; print(ModelSpec.parse('model:make').load().model.in_features)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout == "4\n", done.stderr


def test_a_shipped_model():
    loaded = ModelSpec.parse("autopar.models.mlp:make", ["layers=3"]).load()
    assert loaded.model(*loaded.args).ndim == 0 and loaded.loss is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("-4", -4),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("gelu", "gelu"),
        ("", ""),
    ],
)
def test_options(text, value):
    found = parse_option(text)
    assert found == value and type(found) is type(value)
