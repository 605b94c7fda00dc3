"""The ``autopar`` command: one file a command, and `command.main` that runs them."""

from __future__ import annotations

from autopar.cli.command import main

__all__ = ["main"]
