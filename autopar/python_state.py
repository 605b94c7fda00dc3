"""What modules keep in Python while forward runs: their mode, counters, caches of tensors, lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

OWN = frozenset(vars(nn.Module())) - {"training"}  # what nn.Module itself keeps
HOOKS = frozenset(k for k, v in vars(nn.Module()).items() if "hooks" in k and isinstance(v, dict))
CONTAINERS = (dict, list, set, deque)
PLAIN = (bool, int, float, complex, str, bytes, tuple)


@contextmanager
def in_modes(modes: Mapping[nn.Module, bool], after: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Every module in its mode, in training or not, and ``after`` it in that one."""
    try:
        for module, mode in modes.items():
            module.training = mode
        yield
    finally:
        for module, mode in after.items():
            module.training = mode


@contextmanager
def python_state_kept(model: nn.Module) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Put the attributes of all modules, what their containers hold, their hooks and the set of their buffers back at
    the end.

    Yields a function that names what has changed so far, by FQN and attribute.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> with python_state_kept(model) as changed:
        ...     model.calls = 1
        ...     changed()
        ('calls',)
        >>> hasattr(model, "calls")
        False
    """
    held = [(name, m, _attributes(m), dict(m._buffers)) for name, m in model.named_modules()]
    inside = [(v, _contents(v)) for _, _, attributes, _ in held for v in attributes.values() if type(v) in CONTAINERS]
    hooks = [(v, dict(v)) for _, m, _, _ in held for k, v in vars(m).items() if k in HOOKS]

    def changed() -> tuple[str, ...]:
        found = []
        contents = {id(v): c for v, c in inside}
        for name, module, before, buffers in held:
            now = _attributes(module)
            keys = [k for k in {**before, **now} if not (k in before and k in now and _same(before[k], now[k]))]
            keys += [k for k, v in before.items() if id(v) in contents and not _same(contents[id(v)], _contents(v))]
            keys += [k for k in module._buffers if k not in buffers]
            found += [f"{name}.{k}".lstrip(".") for k in dict.fromkeys(keys)]
        return tuple(sorted(found))

    try:
        yield changed
    finally:
        for value, contents in (*inside, *hooks):
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(contents)
        for _, module, before, buffers in held:
            for key in _attributes(module).keys() - before.keys():
                del module.__dict__[key]
            module.__dict__.update(before)
            for key in module._buffers.keys() - buffers.keys():
                del module._buffers[key]
                module._non_persistent_buffers_set.discard(key)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if k not in OWN}


def _contents(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a is b or (a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a))
    if isinstance(a, list) and isinstance(b, list):
        return a is b or (len(a) == len(b) and all(map(_same, a, b)))
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)
