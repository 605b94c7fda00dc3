"""What probing found, kept on disk, so that the next process need not probe the same call again.

A call is known by its op's schema, the version of the library that the op is of, torch's, and everything that was run:
sizes, dtypes, arguments. Ops that no installed release brings are not kept, since their code may change under one
name. Files are written whole or not at all; one that cannot be read is as none. ``AUTOPAR_PROBE_CACHE`` names another
folder than ``~/.cache/autopar/probes`` (``$XDG_CACHE_HOME``); empty, it switches the cache off.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from autopar.errors import AutoparError
from autopar.passes.probe_call import SmallCall
from autopar.passes.probe_split import Found
from autopar.schema import read, write

VERSION = 1  # of what is probed and how: a new one for other samples, limits or words
FOLDER = "AUTOPAR_PROBE_CACHE"


def recall(call: SmallCall) -> Found | None:
    """What was found before of an equal call."""
    path = _path(call)
    try:
        return read(Found, json.loads(path.read_text(encoding="utf-8")), where=str(path)) if path else None
    except (OSError, ValueError, AutoparError):
        return None


def remember(call: SmallCall, found: Found) -> None:
    """Keep what was found, where there is a place for it."""
    path = _path(call)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False, encoding="utf-8") as file:
            json.dump(write(found), file)
        os.replace(file.name, path)
    except OSError:  # a full or read-only disk: probing goes on without
        return


def _path(call: SmallCall) -> Path | None:
    """The file of a call; None where it is not kept."""
    given, release = os.environ.get(FOLDER), _release(call.target.namespace)
    if given == "" or release is None:
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar" / "probes"
    said = (VERSION, torch.__version__, release, str(call.target._schema), call.shapes, list(map(str, call.dtypes)))
    text = json.dumps([*said, [repr(a) for a in call.flat], str(call.spec), call.below])
    return (Path(given) if given else home) / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


@cache
def _release(namespace: str) -> str | None:
    """Which release an op's code is of; None where that is not known: no package of that name, or one that is worked
    on where it lies."""
    if namespace in ("aten", "prims"):
        return torch.__version__
    try:
        found = metadata.distribution(namespace)
    except (metadata.PackageNotFoundError, ValueError):
        return None
    lies = json.loads(found.read_text("direct_url.json") or "{}")
    return None if lies.get("dir_info") else found.version
