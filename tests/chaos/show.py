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
from .run import Running


async def follow(running: Running, console: Console) -> None:
    """Show progress until cancelled: continuously on a terminal, otherwise twice a minute."""
    if not console.is_terminal:
        while True:
            console.print(_line(running), soft_wrap=True)
            await asyncio.sleep(30)
    with Live(_line(running), console=console, refresh_per_second=4) as live:
        while True:
            live.update(_line(running))
            await asyncio.sleep(0.25)


def _line(running: Running) -> Text:
    wish, ledger, strikes = running.wish, running.ledger, running.strikes
    passed = time.time() - running.began
    sent, answered = len(ledger.entries), ledger.answered
    serving = sum(post.fit for post in running.crew.posts)
    going_on = sorted({name.rpartition(" ")[0] for name in strikes.going_on})
    parts = [
        f"seed {wish.seed}",
        f"{passed:.0f}/{wish.seconds:.0f} s",
        f"asked {sent}",
        f"answered {answered} ({answered / max(passed, 1):.1f}/s)",
        f"open {sent - answered}",
        f"kills {strikes.counts['kill']}",
        f"faults {len(strikes.log)}",
        f"serving {serving}/{wish.replicas}",
        ", ".join(going_on) if running.phase == "faults" else running.phase,
    ]
    return Text(" · ".join(part for part in parts if part), style="yellow" if going_on else "")


def table(report: Report) -> Table:
    """The verdict and the figures."""
    shown = Table(title=f"chaos, seed {report.seed}, {report.seconds / 60:g} min", min_width=60)
    shown.add_column("what")
    shown.add_column("count", justify="right")
    _section(shown, {"requests": report.requests, "answers": report.answers})
    for name in ("lost", "duplicated", "stuck", "wrong"):
        count = getattr(report, name)
        shown.add_row(name, str(count), style="bold red" if count else "bold green")
    shown.add_section()
    _section(shown, {"repeated answers, dropped": report.repeated})
    _section(
        shown,
        {
            "effects": report.effects,
            "effects repeated (allowed: at least once)": report.effects_repeated,
            "effects missing (wrong)": report.effects_missing,
            "calls doubled (duplicated)": report.calls_doubled,
            "drains that took too long": report.late_drains,
        },
    )
    for title, part in (("fault", report.faults), ("replica", report.exits), ("", report.events)):
        _section(shown, {f"{title}: {name}" if title else name: count for name, count in sorted(part.items())})
    _section(shown, {f"seconds, {name}" if " p" in name or "max" in name else name: value
                     for name, value in report.latency.items()})  # fmt: skip
    _section(shown, {"seconds from the end to the last answer": report.answered_last_after})
    for place, found in report.leftovers.items():
        _section(shown, {f"left in {place}: {name}": count for name, count in found.items()})
    return shown


def _section(shown: Table, rows: dict[str, float | None]) -> None:
    for name, value in rows.items():
        shown.add_row(name, "-" if value is None else f"{value:,}")
    shown.add_section()


def verdict(report: Report) -> Iterable[str]:
    """Lines below the table."""
    yield f"seed {report.seed}: " + ("nothing lost, duplicated, stuck or wrong" if report.good else "FAILED")
    for path in report.bad:
        yield f"story: {path}"
