"""Display of a fuzzer run: a progress bar, then a table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .report import Report
from .run import Running

_SHOWN = 40


async def follow(running: Running, console: Console) -> None:
    """Show progress until cancelled: continuously on a terminal, otherwise twice a minute."""
    total = running.wish.quiet + running.wish.seconds
    if not console.is_terminal:
        while True:
            console.print(f"{time.time() - running.began:.0f}/{total:.0f} s · {_text(running)}", soft_wrap=True)
            await asyncio.sleep(30)
    columns = (TextColumn("{task.fields[text]}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        shown = progress.add_task("fuzz", total=total, text="")
        while True:
            progress.update(shown, completed=min(total, time.time() - running.began), text=_text(running))
            await asyncio.sleep(0.25)


def _text(running: Running) -> str:
    ledger = running.ledger
    return (
        f"{running.wish.broker}, {running.phase} · sent {len(running.sent):,} · "
        f"honest {ledger.answered:,} of {len(ledger.entries):,}"
    )


def table(report: Report) -> Table:
    """The verdict and the figures."""
    shown = Table(title=f"fuzz on {report.broker}, seed {report.seed}, {report.seconds:g} s", min_width=70)
    shown.add_column("what")
    shown.add_column("count", justify="right")
    for name in ("messages", "per_minute", "recipes", "requests", "answers"):
        shown.add_row(name.replace("_", " "), f"{getattr(report, name):,}")
    shown.add_section()
    for name in ("lost", "wrong", "duplicated", "fell", "bad_drains", "reconnects"):
        count = getattr(report, name)
        shown.add_row(name.replace("_", " "), str(count), style="bold red" if count else "bold green")
    shown.add_row("connections that try suspicious messages", str(report.probes))
    shown.add_row("rows held by a second session", str(report.rows_held))
    shown.add_section()
    shown.add_row("honest p99, before and under fuzz", f"{report.p99_quiet:.3f} s, {report.p99_fuzz:.3f} s")
    for name, used in report.memory.items():
        shown.add_row(f"{name}, MB warm and after", ", ".join(f"{each:.1f}" for each in used))
    shown.add_section()
    for name, count in sorted(report.accounts.items()):
        shown.add_row(name, f"{count:,}")
    shown.add_row("unaccounted for", str(len(report.unaccounted)))
    shown.add_row(
        "branches, excluded, not reached", f"{report.branches}, {len(report.excluded)}, {len(report.unreached)}"
    )
    return shown


def verdict(report: Report) -> Iterable[str]:
    """Lines below the table."""
    for why, count in report.closings.items():
        yield f"the broker closed the fuzzer's connection {count} times: {why}"
    for title, lines in (
        ("honest", report.honest),
        ("connection", report.connections),
        ("not reached", report.unreached),
        ("a defect's branch", report.defects),
        ("unaccounted for", report.unaccounted),
    ):
        yield from (f"{title}: {line}" for line in lines[:_SHOWN])
        if len(lines) > _SHOWN:
            yield f"{title}: {len(lines) - _SHOWN} more"
    yield from (f"FAILED: {fault}" for fault in report.faults)
    if report.good:
        yield f"{report.broker}, seed {report.seed}: nothing honest was lost, wrong or starved"
