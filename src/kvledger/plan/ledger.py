"""What a ledger is: a question, figures that explain themselves, tables of figures. Containers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvledger.plan.explain import Figure

Cell = Figure | str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under `columns`; a cell is a figure or a word."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def to_json(self) -> dict[str, object]:
        """Rows as objects, figures with their accounts."""
        rows = [[c if isinstance(c, str) else c.to_json() for c in row] for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows}


@dataclass(frozen=True, slots=True)
class Ledger:
    """One of the six accounts. `ledger["name"]` is the figure of that name, wherever it stands."""

    name: str
    title: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()

    def all_figures(self) -> Iterator[Figure]:
        """Every figure, those of tables included."""
        yield from self.figures
        for table in self.tables:
            for row in table.rows:
                yield from (cell for cell in row if isinstance(cell, Figure))

    def __getitem__(self, name: str) -> Figure:
        for figure in self.all_figures():
            if figure.name == name:
                return figure
        raise KeyError(
            f"ledger {self.name} has no figure {name!r}; it has {sorted(f.name for f in self.all_figures())}"
        )

    def to_json(self) -> dict[str, object]:
        """The whole account as a JSON object."""
        return {
            "ledger": self.name,
            "title": self.title,
            "figures": [f.to_json() for f in self.figures],
            "tables": [t.to_json() for t in self.tables],
            "notes": list(self.notes),
        }
