"""Frozen dataclasses to and from plain JSON, with errors that name the JSON path and the legal values.

The annotations of a dataclass are its schema: ``int``, ``float``, ``str``, ``bool``, ``None``, ``Literal``,
``tuple[X, ...]``, ``tuple[X, Y]``, ``Mapping[str, X]``, unions and other dataclasses. A field without a default is
required; a key that is no field is refused.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Link:
...     bandwidth: float  # bytes/s
...     kind: Literal["nvlink", "network"] = "nvlink"
>>> read(Link, {"bandwidth": 4}, where="link.json")
Link(bandwidth=4.0, kind='nvlink')
>>> read(Link, {"bandwidth": 4, "kind": "pci"}, where="link.json")
Traceback (most recent call last):
autopar.errors.AutoparError: link.json: at $.kind: "pci" is not legal. Legal: "nvlink", "network".
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from autopar.errors import AutoparError

T = TypeVar("T")


def read(kind: type[T], data: object, *, where: str) -> T:
    """``data`` (parsed JSON) as a ``kind``; ``where`` names the file in errors. Raises AutoparError with the JSON
    path."""
    found = _read(kind, data, where, "$")
    assert isinstance(found, kind)
    return found


def write(value: object) -> Any:
    """A dataclass (nested) as plain JSON values, fields in order; tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: write(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): write(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [write(v) for v in value]
    assert value is None or isinstance(value, (bool, int, float, str)), f"{value!r} is not JSON"
    return value


def read_file(path: str | Path, *, who: str) -> object:
    """The JSON in a file; AutoparError in one line where it cannot be read or is no JSON."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise AutoparError(f"{who}: no such file: {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise AutoparError(f"{who}: cannot read {path} ({getattr(error, 'strerror', None) or error}).") from None
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except ValueError as error:
        raise AutoparError(f"{who}: {path} is not JSON ({error}).") from None
    except RecursionError:
        raise AutoparError(f"{who}: {path} is nested too deeply to be read.") from None


def fail(where: str, path: str, what: str) -> AutoparError:
    """The error of a value at a JSON path."""
    return AutoparError(f"{where}: at {path}: {what}")


def nearest(word: str, legal: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` where a legal word is close to ``word``, else nothing."""
    close = difflib.get_close_matches(word, list(legal), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key!r} stands twice in one object")
        out[key] = value
    return out


def _read(kind: Any, data: object, where: str, path: str) -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        return _read_union(get_args(kind), data, where, path)
    if origin is Literal:
        if not any(data == legal and type(data) is type(legal) for legal in get_args(kind)):
            raise fail(where, path, f"{_show(data)} is not legal. Legal: {', '.join(map(_show, get_args(kind)))}.")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise fail(where, path, f"{_show(data)} is not a list.")
        kinds = get_args(kind)
        if kinds[-1] is not Ellipsis and len(data) != len(kinds):
            raise fail(where, path, f"has {len(data)} items. Legal: {len(kinds)}.")
        each = kinds[:1] * len(data) if kinds[-1] is Ellipsis else kinds
        return tuple(_read(k, item, where, f"{path}[{i}]") for i, (k, item) in enumerate(zip(each, data, strict=True)))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise fail(where, path, f"{_show(data)} is not an object.")
        return {key: _read(get_args(kind)[1], item, where, _step(path, key)) for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, where, path)
    return _read_scalar(kind, data, where, path)


def _read_union(kinds: tuple[Any, ...], data: object, where: str, path: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    rest = [k for k in kinds if k is not type(None)]
    fitting = [k for k in rest if _fits(k, data)]
    return _read(fitting[0] if fitting else rest[0], data, where, path)


def _fits(kind: Any, data: object) -> bool:
    if dataclasses.is_dataclass(kind) or get_origin(kind) in (dict, Mapping):
        return isinstance(data, dict)
    if get_origin(kind) is tuple:
        return isinstance(data, list)
    if kind is float:
        return isinstance(data, (int, float)) and not isinstance(data, bool)
    return isinstance(kind, type) and type(data) is kind


def _read_scalar(kind: Any, data: object, where: str, path: str) -> Any:
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if type(data) is not kind or (isinstance(data, float) and not math.isfinite(data)):
        raise fail(where, path, f"{_show(data)} is not {words.get(kind, kind)}.")
    return data


def _read_dataclass(kind: Any, data: object, where: str, path: str) -> Any:
    if not isinstance(data, dict):
        raise fail(where, path, f"{_show(data)} is not an object.")
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    for key in data:
        if key not in fields:
            raise fail(where, path, f"unknown key {key!r}{nearest(key, fields)} Legal: {', '.join(fields)}.")
    hints = _hints(kind)
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _read(hints[name], data[name], where, _step(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise fail(where, path, f"the key {name!r} is missing. Keys: {', '.join(fields)}.")
    return kind(**values)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _step(path: str, key: str) -> str:
    return f"{path}.{key}" if key.isidentifier() else f"{path}[{json.dumps(key)}]"


def _show(value: object) -> str:
    text = (
        json.dumps(value)
        if not isinstance(value, (dict, list))
        else f"a JSON {'object' if isinstance(value, dict) else 'list'}"
    )
    return text if len(text) <= 60 else text[:57] + "..."
