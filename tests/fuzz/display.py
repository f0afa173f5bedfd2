"""Display of a fuzzer run: a progress bar, then a table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .report import Report
from .run import RunState

_MAX_SHOWN = 40


async def show_progress(state: RunState, console: Console) -> None:
    """Show progress until cancelled: continuously on a terminal, otherwise twice a minute."""
    total = state.config.quiet_seconds + state.config.seconds
    if not console.is_terminal:
        while True:
            console.print(
                f"{time.time() - state.started_at:.0f}/{total:.0f} s · {_status_text(state)}",
                soft_wrap=True,
            )
            await asyncio.sleep(30)
    columns = (TextColumn("{task.fields[text]}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        shown = progress.add_task("fuzz", total=total, text="")
        while True:
            progress.update(
                shown,
                completed=min(total, time.time() - state.started_at),
                text=_status_text(state),
            )
            await asyncio.sleep(0.25)


def _status_text(state: RunState) -> str:
    ledger = state.ledger
    return (
        f"{state.config.broker}, {state.phase} · sent {len(state.recipe_by_mark):,} · "
        f"honest {ledger.answered_count:,} of {len(ledger.records):,}"
    )


def make_table(report: Report) -> Table:
    """The verdict and the figures."""
    result = Table(
        title=f"fuzz on {report.broker}, seed {report.seed}, {report.seconds:g} s", min_width=70
    )
    result.add_column("what")
    result.add_column("count", justify="right")
    for name in ("messages", "per_minute", "recipes", "requests", "answers"):
        result.add_row(name.replace("_", " "), f"{getattr(report, name):,}")
    result.add_section()
    for name in ("lost", "wrong", "duplicated", "fell", "bad_drains", "reconnects"):
        count = getattr(report, name)
        result.add_row(
            name.replace("_", " "), str(count), style="bold red" if count else "bold green"
        )
    result.add_row("connections that try suspicious messages", str(report.probes))
    result.add_row("rows held by a second session", str(report.rows_held))
    result.add_section()
    result.add_row(
        "honest p99, before and under fuzz", f"{report.p99_quiet:.3f} s, {report.p99_fuzz:.3f} s"
    )
    for name, used in report.memory.items():
        result.add_row(f"{name}, MB warm and after", ", ".join(f"{each:.1f}" for each in used))
    result.add_section()
    for name, count in sorted(report.accounts.items()):
        result.add_row(name, f"{count:,}")
    result.add_row("unaccounted for", str(len(report.unaccounted)))
    result.add_row(
        "branches, excluded, not reached",
        f"{report.branches}, {len(report.excluded)}, {len(report.unreached)}",
    )
    return result


def verdict_lines(report: Report) -> Iterable[str]:
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
        yield from (f"{title}: {line}" for line in lines[:_MAX_SHOWN])
        if len(lines) > _MAX_SHOWN:
            yield f"{title}: {len(lines) - _MAX_SHOWN} more"
    yield from (f"FAILED: {fault}" for fault in report.faults)
    if report.good:
        yield f"{report.broker}, seed {report.seed}: nothing honest was lost, wrong or starved"
