"""`tasks show --timeline` and `tasks export-spans`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from command_result import Command
from meshpoint import wiring
from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.telemetry import timeline_spans
from meshpoint.cli import timelines
from meshpoint.model.timeline import TimelineOptions
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    HERE,
    SECOND,
    answered,
    paused,
    resumed,
    sub,
)


def write_task(folder: Path, timeline: TimelineOptions | None) -> tuple[str, str]:
    """Pause and resume a task. Returns its id, and the id of its first call."""

    async def run() -> tuple[str, str]:
        clock = FakeClock()
        url = f"sqlite:///{folder}/tasks.db"
        store = SqlStore(url, namespace="test", clock=clock, timeline=timeline)
        await store.open()
        pause = await paused(store, "a", "b", "c")
        clock.advance(SECOND / 4)
        await answered(store, pause, "a")
        clock.advance(90 * SECOND)
        await resumed(store, pause, "b", "c")
        await store.close()
        return pause.run.task_id, sub(pause, "a")

    return asyncio.run(run())


def test_a_timeline_is_shown(tmp_path: Path, run_command: Command) -> None:
    task_id, call_id = write_task(tmp_path, TimelineOptions(HERE.id))
    shown = run_command("show", task_id, "--timeline").out
    lines = [line.split() for line in shown.splitlines() if "2" in line]
    assert [line[2:] for line in lines] == [
        ["0", "ms", "paused", "1", "-", "A", "for", "3", "calls"],
        ["250", "ms", "answered", "1", "-", "A", "flights,", "1", "of", "3,", "task", call_id],
        ["0:01:30", "answered", "1", "-", "A", "2", "calls,", "3", "of", "3"],
        ["0", "ms", "acquired", "1", "1", "A", "-"],
    ]


def test_a_timeline_is_json_for_scripts(tmp_path: Path, run_command: Command) -> None:
    task_id, call_id = write_task(tmp_path, TimelineOptions(HERE.id))
    shown = run_command("show", task_id, "--timeline", "--json").json
    assert (shown["task_id"], shown["agent"]) == (task_id, "travel")
    entries: list[dict[str, Any]] = shown["entries"]
    assert [each["change"] for each in entries] == ["paused", "answered", "answered", "acquired"]
    assert [each["seconds_after"] for each in entries] == [0, 0.25, 90, 0]
    assert entries[1]["ref"] == call_id
    assert entries[3] == entries[3] | {"generation": 1, "fence": 2, "attempt": 1, "replica": "A"}


@pytest.mark.parametrize("command", [("show", "--timeline"), ("export-spans",)])
def test_a_task_without_a_timeline_is_not_found(
    tmp_path: Path,
    run_command: Command,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timelines, "check_tracing", lambda: None)
    task_id, _ = write_task(tmp_path, None)
    result = run_command(command[0], task_id, *command[1:])
    assert result.code == 10
    assert f"no timeline of task {task_id}; its agent needs history: true" in result.err


def test_spans_need_an_sdk(tmp_path: Path, run_command: Command) -> None:
    result = run_command("export-spans", "order-17")
    assert result.code == 2
    assert "opentelemetry-instrument meshpoint tasks export-spans" in result.err


def test_spans_are_exported(
    tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timelines, "check_tracing", lambda: None)
    monkeypatch.setattr(wiring, "check_tracing", lambda: None)
    monkeypatch.setattr(timeline_spans, "export", lambda entries: f"trace-{len(entries)}")
    task_id, _ = write_task(tmp_path, TimelineOptions(HERE.id))
    result = run_command("export-spans", task_id)
    assert (result.code, result.out) == (0, f"exported {task_id} as trace trace-4\n")


def test_long_timelines_are_read_completely(
    tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timelines, "_PAGE", 2)
    task_id, _ = write_task(tmp_path, TimelineOptions(HERE.id))
    assert len(run_command("show", task_id, "--timeline", "--json").json["entries"]) == 4
