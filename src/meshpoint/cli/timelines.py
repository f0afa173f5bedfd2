"""The timelines of tasks, for people, for scripts and as spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, timedelta
from typing import TYPE_CHECKING

from meshpoint.cli.output import print_either, print_json, print_table
from meshpoint.model.error_text import quantity
from meshpoint.model.timeline import Change, TimelineEntry, durations
from meshpoint.model.waits import display_name, is_wait
from meshpoint.wiring import check_tracing, export_timeline

if TYPE_CHECKING:
    from meshpoint.model.ids import TaskId
    from meshpoint.ports.task_store import CheckpointStore

__all__ = ["check_tracing", "export", "print_timeline", "read"]

_PAGE = 1000
_COLUMNS = ("at (UTC)", "after", "change", "pauses", "attempt", "replica", "details")


async def read(store: CheckpointStore, task_id: TaskId) -> list[TimelineEntry]:
    """Read all entries of a task, oldest first."""
    entries: list[TimelineEntry] = []
    while page := await store.timeline(
        task_id, after=entries[-1].id if entries else 0, limit=_PAGE
    ):
        entries += page
    return entries


def print_timeline(task_id: str, entries: Sequence[TimelineEntry], *, as_json: bool) -> None:
    """Print entries with the time from each to the next."""
    times = durations(entries)
    if as_json:
        shown = [_to_json(each, after) for each, after in zip(entries, times, strict=True)]
        print_json({"task_id": task_id, "agent": entries[0].agent, "entries": shown})
        return
    rows = [_to_row(each, after) for each, after in zip(entries, times, strict=True)]
    print_table(_COLUMNS, rows, right={"after", "pauses", "attempt"})


def export(task_id: str, entries: Sequence[TimelineEntry], *, as_json: bool) -> None:
    """Export a timeline as spans, and print the id of their trace."""
    trace_id = export_timeline(entries)
    result = {"task_id": task_id, "trace_id": trace_id}
    print_either(result, f"exported {task_id} as trace {trace_id}", as_json=as_json)


def _to_json(entry: TimelineEntry, after: timedelta) -> dict[str, object]:
    values = {
        name: value for name, value in asdict(entry).items() if name not in {"task_id", "agent"}
    }
    return {**values, "seconds_after": after.total_seconds()}


def _to_row(entry: TimelineEntry, after: timedelta) -> tuple[str, ...]:
    at = entry.at.astimezone(UTC).replace(tzinfo=None)
    return (
        at.isoformat(" ", "milliseconds"),
        format_duration(after),
        entry.change.replace("_", " "),
        str(entry.generation),
        str(entry.attempt) if entry.attempt else "-",
        entry.replica or "-",
        describe(entry) or "-",
    )


def format_duration(duration: timedelta) -> str:
    """Return a duration for people, such as "12 ms", "3.4 s" or "2:00:05"."""
    seconds = duration.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def describe(entry: TimelineEntry) -> str:
    """Return the facts of an entry: the peer or number of its calls, and the join's counters."""
    if entry.change is Change.PAUSED:
        return f"for {quantity(entry.total or 0, 'call')}"
    facts = []
    if entry.peer is not None:
        facts.append(display_name(entry.peer) if is_wait(entry.peer) else entry.peer)
    elif entry.calls:
        facts.append(quantity(entry.calls, "call"))
    if entry.total is not None:
        facts.append(f"{entry.completed} of {entry.total}")
    if entry.change is Change.SIGNALLED:
        facts.append(f"signal {entry.ref}")
    elif entry.ref is not None and entry.peer is not None and not is_wait(entry.peer):
        facts.append(f"task {entry.ref}")
    return ", ".join(facts)
