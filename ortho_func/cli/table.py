"""Tables: as plain text, as Markdown, and by rich where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Table", "markdown", "plain", "show"]


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and rows of text: a name, and numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def plain(table: Table) -> str:
    """The table as aligned text.

    Examples:
        >>> print(plain(Table("Sizes", ("shape", "count"), [("4x8", "12")])))
        Sizes
        shape  count
        4x8       12
    """
    lines = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]
    return "\n".join([table.title, *text])


def markdown(table: Table) -> str:
    """The table as Markdown, without its title.

    Examples:
        >>> print(markdown(Table("Sizes", ("shape", "count"), [("4x8", "12")])))
        | shape | count |
        | --- | ---: |
        | 4x8 | 12 |
    """
    rule = ["---"] + ["---:"] * (len(table.head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (table.head, rule, *table.rows))


def show(table: Table) -> None:
    """Print the table: by rich on a terminal if it is installed, else as plain text."""
    if not (sys.stdout.isatty() and importlib.util.find_spec("rich")):
        print(plain(table))
        return
    rich = importlib.import_module("rich.console"), importlib.import_module("rich.table")
    drawn = rich[1].Table(title=table.title, title_justify="left")
    for number, name in enumerate(table.head):
        drawn.add_column(name, justify="right" if number else "left")
    for row in table.rows:
        drawn.add_row(*row)
    rich[0].Console().print(drawn)
