"""Models named on the command line: ``path/to/file.py:factory`` or ``package.module:factory``.

The factory takes the options of ``--set`` and returns ``(model, args, kwargs)``; ``model(*args, **kwargs)`` returns
a loss, or ``--loss module:function`` makes one of what it returns. Mistakes in any of it are one line that names the
file and line.

>>> spec = ModelSpec.parse("autopar.models.mlp:make", ["layers=3", "batch=4"])
>>> spec.options
{'layers': 3, 'batch': 4}
>>> loaded = spec.load()
>>> len(loaded.args), loaded.kwargs
(2, {})
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from autopar.errors import AutoparError
from autopar.schema import nearest

if TYPE_CHECKING:
    from torch import nn

Option = bool | int | float | str
FORM = "path/to/file.py:factory or package.module:factory"


class LoadedModel(NamedTuple):
    """What a factory returned, and the loss function given beside it (None: the model returns its loss)."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Any] | None


@dataclass(frozen=True)
class ModelSpec:
    """A model by name: plain strings and numbers, so that other processes can load it too.

    ``target`` and ``loss`` as typed; ``folder``: the directory that relative paths and modules are looked for in.
    """

    target: str
    options: Mapping[str, Option] = field(default_factory=dict)
    loss: str | None = None
    folder: str = "."

    @staticmethod
    def parse(target: str, settings: Iterable[str] = (), loss: str | None = None) -> ModelSpec:
        """From the words of the command line; ``settings`` are ``KEY=VALUE``. Loads nothing yet."""
        options: dict[str, Option] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals or not key.isidentifier():
                raise AutoparError(f"--set {setting!r}: is not KEY=VALUE. Example: --set layers=4.")
            if key in options:
                raise AutoparError(f"--set {setting}: {key!r} is set twice. Keep one of them.")
            options[key] = parse_option(value)
        for what, name in (("MODEL", target), ("--loss", loss)):
            if name is not None and not all(name.rpartition(":")[::2]):
                raise AutoparError(f"{what} {name!r}: names no function. Write {FORM}.")
        return ModelSpec(target, options, loss, os.getcwd())

    def load(self) -> LoadedModel:
        """Import the module, call the factory, check what it returned. Raises AutoparError."""
        import torch

        factory = _find(self.target, self.folder, "MODEL")
        _check_options(factory, self.options, self.target)
        loss = _find(self.loss, self.folder, "--loss") if self.loss else None
        try:
            made = factory(**self.options)
        except AutoparError:
            raise
        except (Exception, SystemExit) as error:
            file = getattr(sys.modules.get(factory.__module__), "__file__", None)
            raise AutoparError(f"{self.target}: the factory raised {_describe(error, file)}.") from error
        if not isinstance(made, (tuple, list)) or len(made) != 3:
            got = f"{len(made)} values" if isinstance(made, (tuple, list)) else f"a {type(made).__name__}"
            raise AutoparError(f"{self.target}: the factory returned {got}. Return three: (model, args, kwargs).")
        model, args, kwargs = made
        if not isinstance(model, torch.nn.Module):
            raise AutoparError(
                f"{self.target}: the factory's first value is a {type(model).__name__}, not an nn.Module."
            )
        if not isinstance(args, (tuple, list)):
            raise AutoparError(f"{self.target}: the factory's args are a {type(args).__name__}. Return a tuple: (x,).")
        if not isinstance(kwargs, dict) or not all(isinstance(k, str) for k in kwargs):
            raise AutoparError(
                f"{self.target}: the factory's kwargs are no dict of names. Return {{}} where there are none."
            )
        return LoadedModel(model, tuple(args), kwargs, loss)


def parse_option(text: str) -> Option:
    """``4`` int, ``0.5`` and ``1e-3`` float, ``true`` and ``false`` bool, anything else str."""
    if text in ("true", "false", "True", "False"):
        return text in ("true", "True")
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        return float(text)
    return text


def _find(target: str, folder: str, what: str) -> Callable[..., Any]:
    where, _, name = target.rpartition(":")
    module = _import_file(where, folder, target) if where.endswith(".py") else _import_module(where, folder, target)
    found = getattr(module, name, None)
    if callable(found):
        assert not isinstance(found, str)
        return found  # type: ignore[no-any-return]
    own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    legal = [n for n in own if not n.startswith("_")]
    if found is not None:
        raise AutoparError(
            f"{what} {target}: {name!r} is a {type(found).__name__}, not a function. Legal: {', '.join(legal)}."
        )
    listed = f"Functions there: {', '.join(legal)}." if legal else "It has no functions."
    raise AutoparError(f"{what} {target}: {where} has no {name!r}{nearest(name, legal) or '.'} {listed}")


def _import_file(path: str, folder: str, target: str) -> ModuleType:
    file = (Path(folder) / path).resolve()
    if not file.is_file():
        raise AutoparError(f"{target}: no such file: {path} (looked in {Path(folder).resolve()}). Write {FORM}.")
    name = f"autopar_model_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # the file's siblings, as when it is run
    sys.modules[name] = module  # before it runs: dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise AutoparError(f"{target}: importing it raised {_describe(error, str(file))}.") from error
    return module


def _import_module(name: str, folder: str, target: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise AutoparError(f"{target}: {name!r} is neither a file ending in .py nor a module. Write {FORM}.")
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise AutoparError(
                f"{target}: no module {error.name!r} (looked in {folder} and in what is installed)."
            ) from None
        raise AutoparError(f"{target}: importing it raised {_describe(error, None)}.") from error
    except (Exception, SystemExit) as error:
        raise AutoparError(f"{target}: importing it raised {_describe(error, None)}.") from error


def _check_options(factory: Callable[..., Any], options: Mapping[str, Option], target: str) -> None:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    for key in options:
        if key not in named and not takes_any:
            legal = f"Legal: {', '.join(named)}." if named else "It takes none."
            raise AutoparError(f"{target}: has no option {key!r}{nearest(key, named) or '.'} {legal}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name in named and name not in options:
            raise AutoparError(f"{target}: needs the option {name!r}. Pass --set {name}=VALUE.")


def _describe(error: BaseException, file: str | None) -> str:
    """``ValueError: text (model.py:12)``: the line in the user's own file where there is one."""
    text = " ".join(str(error).split())
    words = f"{type(error).__name__}{f': {text}' if text else ''}".rstrip(".")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename and f.filename != __file__
    ]
    own = [f for f in frames if file is not None and os.path.realpath(f.filename) == os.path.realpath(file)]
    last = (own or frames)[-1:]
    return f"{words} ({last[0].filename}:{last[0].lineno})" if last else words
