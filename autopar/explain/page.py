"""A page as data: titled tables, printed by rich or written as JSON."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopar.schema import write

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[str, ...]
SCREEN = 40  # rows of one table that are printed; JSON has all
GAP = 3  # characters between columns
SHORT = 24  # characters; columns of such cells stay on one line, however narrow the page


@dataclass(frozen=True)
class Section:
    """A titled table; without ``columns`` its rows are name and value."""

    title: str
    rows: tuple[Row, ...]
    columns: Row = ()
    note: str = ""


@dataclass(frozen=True)
class Page:
    """``fits``: whether the plan fits the devices; None where that is not predicted. ``head``: what JSON has on top."""

    plan: str
    sections: tuple[Section, ...]
    fits: bool | None = None
    head: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """``fits``, ``mesh``, ``microbatches``, ``predicted`` and ``proof`` on top, then the sections."""
        return {"plan": self.plan, "fits": self.fits, **self.head, "sections": write(self.sections)}

    def text(self, width: int = 160) -> str:
        """The page as plain text, at most ``width`` characters a line."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=width)
        with console.capture() as capture:
            render(self, console)
        return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()


def render(page: Page, console: Console) -> None:
    """Print the page; of a table at most `SCREEN` rows."""
    from rich.table import Table
    from rich.text import Text

    for section in page.sections:
        console.print(Text(section.title, style="bold"))
        table = Table(show_header=bool(section.columns), box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        widths = _widths(section)
        columns = [i for i, width in enumerate(widths) if width]
        room = console.width - sum(widths[i] + GAP for i in columns[1:])
        for i in columns:
            title = section.columns[i] if section.columns else ""
            table.add_column(title, overflow="fold", no_wrap=widths[i] <= SHORT)
        for row in section.rows[:SCREEN]:
            cells = [Text(row[i]) for i in columns if i < len(row)]
            table.add_row(Text(broken(row[0], room)), *cells[1:])
        console.print(table)
        if (left := len(section.rows) - SCREEN) > 0:
            console.print(Text(f"and {left} more row{'s' * (left > 1)} (--json has all)", style="dim"))
        if section.note:
            console.print(Text(section.note, style="dim"))
        console.print()


def _widths(section: Section) -> list[int]:
    """Characters of the widest cell of each column, or of its title; 0 where all cells are empty: it is not printed."""
    count = max(map(len, section.rows))
    widths = [max(len(row[i]) if i < len(row) else 0 for row in section.rows) for i in range(count)]
    titles = map(len, section.columns or [""] * count)
    return [width and max(width, title) for width, title in zip(widths, titles, strict=False)]


def broken(name: str, room: int) -> str:
    """A dotted name that is wider than ``room`` on several lines, broken before dots; other text as it is.

    >>> broken("model.layers.{0-31}.self_attn.q_proj.weight", 32).splitlines()
    ['model.layers.{0-31}.self_attn', '  .q_proj.weight']
    """
    if len(name) <= room or room < SHORT or " " in name.strip():
        return name
    dot = name.rfind(".", 1, room)
    return name if dot < 1 else f"{name[:dot]}\n{broken('  ' + name[dot:], room)}" if dot > 2 else name
