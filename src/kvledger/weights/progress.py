"""A progress bar on the terminal for downloads; nothing where there is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvledger.weights.store import Progress


@contextlib.contextmanager
def download_bar(title: str) -> Iterator[Progress]:
    """Gives the function that `store.resolve` and `store.pull` report to; the bar appears with the first bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    bar.disable = not bar.console.is_terminal
    task = bar.add_task(title, total=None, visible=False)

    def report(done_bytes: int, total_bytes: int | None) -> None:
        bar.update(task, completed=done_bytes, total=total_bytes, visible=True)

    with bar:
        yield report
