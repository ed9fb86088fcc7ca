"""Ledgers and figures on the terminal: rich tables that mean the same without colour. Data, so all of it on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvledger.cli.output import emit_json
from kvledger.plan.explain import Figure
from kvledger.plan.ledger import Cell, Ledger, Table

if TYPE_CHECKING:
    from rich.console import Console

ASSUMED = "~ rests on an assumption; --explain names it"
PLAIN_WIDTH = 200  # where stdout is no terminal, lines are not folded to 80 columns


def console() -> Console:
    """stdout: coloured on a terminal, plain and wide in a pipe."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(file=sys.stdout, highlight=False, width=wide, soft_wrap=False)


def show_ledger(ledger: Ledger, explain: bool = False) -> None:
    """Title, figures, tables and notes; with `explain` the account of every figure instead of the figures alone."""
    out = console()
    out.print(f"[bold]{_safe(ledger.title)}[/bold]")
    if explain:
        show_accounts(ledger.all_figures(), out)
    else:
        out.print(figures_grid(ledger.figures))
    for table in ledger.tables if not explain else ():
        out.print()
        out.print(rich_table(table))
    for note in ledger.notes:
        out.print(f"· {_safe(note)}")
    if not explain and any(f.is_assumed for f in ledger.all_figures()):
        out.print(ASSUMED)


def tell_ledger(ledger: Ledger, as_json: bool, explain: bool = False) -> None:
    """As one JSON document, or as `show_ledger` does."""
    if as_json:
        emit_json(ledger.to_json())
    else:
        show_ledger(ledger, explain)


def show_accounts(figures: Iterable[Figure], out: Console) -> None:
    """Formula, inputs, substitution, result and source of each figure, once."""
    seen = set()
    for figure in figures:
        if figure.name not in seen and figure.formula:
            seen.add(figure.name)
            out.print()
            out.print(figure.explain(), markup=False)


def figures_grid(figures: Sequence[Figure]) -> Any:
    """Label and value of each figure, one a line."""
    from rich.table import Table as RichTable

    grid = RichTable.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    for figure in figures:
        grid.add_row(_safe(figure.title), _safe(figure.text))
    return grid


def rich_table(table: Table) -> Any:
    """A rich table: words to the left, figures to the right."""
    from rich import box
    from rich.table import Table as RichTable

    made = RichTable(title=_safe(table.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(table.columns):
        right = any(isinstance(row[index], Figure) for row in table.rows if index < len(row))
        made.add_column(_safe(column), justify="right" if right else "left")
    for row in table.rows:
        made.add_row(*(_safe(text(cell)) for cell in row))
    return made


def text(cell: Cell) -> str:
    """What a cell shows."""
    return cell if isinstance(cell, str) else cell.text


def _safe(words: str) -> str:
    from rich.markup import escape

    return escape(words)
