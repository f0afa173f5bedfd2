"""Display of a run: one live line, then a table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .report import Report
from .run import RunState


async def show_progress(state: RunState, console: Console) -> None:
    """Show progress until cancelled: continuously on a terminal, otherwise twice a minute."""
    if not console.is_terminal:
        while True:
            console.print(_status_line(state), soft_wrap=True)
            await asyncio.sleep(30)
    with Live(_status_line(state), console=console, refresh_per_second=4) as live:
        while True:
            live.update(_status_line(state))
            await asyncio.sleep(0.25)


def _status_line(state: RunState) -> Text:
    config, ledger, injector = state.config, state.ledger, state.injector
    elapsed = time.time() - state.started_at
    sent, answered = len(ledger.records), ledger.answered_count
    serving = sum(slot.is_serving for slot in state.pool.slots)
    active_faults = sorted({name.rpartition(" ")[0] for name in injector.active})
    parts = [
        f"seed {config.seed}",
        f"{elapsed:.0f}/{config.seconds:.0f} s",
        f"asked {sent}",
        f"answered {answered} ({answered / max(elapsed, 1):.1f}/s)",
        f"open {sent - answered}",
        f"kills {injector.counts['kill']}",
        f"faults {len(injector.applied)}",
        f"serving {serving}/{config.replicas}",
        ", ".join(active_faults) if state.phase == "faults" else state.phase,
    ]
    return Text(
        " · ".join(part for part in parts if part), style="yellow" if active_faults else ""
    )


def make_table(report: Report) -> Table:
    """The verdict and the figures."""
    result = Table(title=f"chaos, seed {report.seed}, {report.seconds / 60:g} min", min_width=60)
    result.add_column("what")
    result.add_column("count", justify="right")
    _add_section(result, {"requests": report.requests, "answers": report.answers})
    for name in ("lost", "duplicated", "stuck", "wrong"):
        count = getattr(report, name)
        result.add_row(name, str(count), style="bold red" if count else "bold green")
    result.add_section()
    _add_section(result, {"repeated answers, dropped": report.repeated})
    _add_section(
        result,
        {
            "effects": report.effects,
            "effects repeated (allowed: at least once)": report.effects_repeated,
            "effects missing (wrong)": report.effects_missing,
            "calls doubled (duplicated)": report.calls_doubled,
            "drains that took too long": report.late_drains,
        },
    )
    for title, counts in (
        ("fault", report.faults),
        ("replica", report.exits),
        ("", report.events),
    ):
        _add_section(
            result,
            {
                f"{title}: {name}" if title else name: count
                for name, count in sorted(counts.items())
            },
        )
    _add_section(result, {f"seconds, {name}" if " p" in name or "max" in name else name: value
                     for name, value in report.latency.items()})  # fmt: skip
    _add_section(result, {"seconds from the end to the last answer": report.answered_last_after})
    for place, counts_by_name in report.leftovers.items():
        _add_section(
            result, {f"left in {place}: {name}": count for name, count in counts_by_name.items()}
        )
    return result


def _add_section(table_: Table, rows: dict[str, float | None]) -> None:
    for name, value in rows.items():
        table_.add_row(name, "-" if value is None else f"{value:,}")
    table_.add_section()


def verdict_lines(report: Report) -> Iterable[str]:
    """Lines below the table."""
    yield f"seed {report.seed}: " + (
        "nothing lost, duplicated, stuck or wrong" if report.good else "FAILED"
    )
    for path in report.bad:
        yield f"story: {path}"
