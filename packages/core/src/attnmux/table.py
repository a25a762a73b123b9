"""Plain text tables: no colour, no frame, so that they can be pasted into a report."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100
"""Columns of a page. A word longer than its place (a path, a command) stays whole."""

Row = tuple[Sequence[str], Sequence[str]]
"""Short cells, and the paragraphs of the last column."""


def wrapped(text: str, width: int = WIDTH, indent: str = "") -> list[str]:
    """Lines of ``text``; words, and so commands and names, stay whole. ``indent`` is for line two
    and later."""
    return textwrap.wrap(
        text,
        width,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def table_lines(head: Sequence[str], rows: Sequence[Row], width: int = WIDTH) -> list[str]:
    """A table whose last column is wrapped.

    Args:
        head: titles of all columns.
        rows: short cells for all columns but the last, and paragraphs for the last one.
        width: columns of the page; the last column gets at least 40.
    """
    cells = [head[:-1], *(row[0] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head) - 1)]
    left = sum(widths) + 2 * len(widths)
    lines = [_joined(head[:-1], widths) + head[-1]]
    for short, paragraphs in rows:
        last = [
            line
            for paragraph in paragraphs
            for line in wrapped(paragraph, max(width - left, 40), "  ")
        ] or [""]
        lines.append((_joined(short, widths) + last[0]).rstrip())
        lines += [" " * left + line for line in last[1:]]
    return lines


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(cell.ljust(width + 2) for cell, width in zip(cells, widths, strict=True))
