"""The timelines of tasks, for people, for scripts and as spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, timedelta
from typing import TYPE_CHECKING

from meshpoint.cli.output import print_either, print_json, print_table
from meshpoint.model.timeline import TimelineEntry, describe, durations, format_duration
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
