"""Each kind of failure, as its requester, `tasks show`, and the log show it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from command_result import run_main
from meshpoint import (
    Failed,
    FailureKind,
    Mesh,
    Peer,
    SendOptions,
    TaskExecutionContext,
    agent,
)
from meshpoint.local import local_mesh
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import TaskId, new_id
from meshpoint.wiring import logging_to, make_observer
from recorded_events import RecordedEvents

log = logging.getLogger("my_agents")
silent_peer = Peer("silent", int, int, timeout=timedelta(seconds=0.3))
missing_peer = Peer("missing", int, int)
Provoke = Callable[[Mesh, TaskId, RecordedEvents, float], Awaitable[None]]
"""Requests a task that fails. The last argument stretches its timeout."""


@agent("broken")
async def broken(ctx: TaskExecutionContext, number: int) -> int:
    raise ValueError("no such city; password=hunter2")


@agent("silent")
async def silent(ctx: TaskExecutionContext, number: int) -> int:
    log.warning("asked for %s", number)
    await asyncio.Event().wait()
    return number


@agent("asks_silent")
async def asks_silent(ctx: TaskExecutionContext, number: int) -> int:
    return await silent_peer(number)


@agent("asks_missing")
async def asks_missing(ctx: TaskExecutionContext, number: int) -> int:
    return await missing_peer(number)


def ask(name: str, input_: Any = 1, timeout: float | None = None) -> Provoke:
    async def provoke(
        client: Mesh, task_id: TaskId, recorded: RecordedEvents, stretch: float
    ) -> None:
        options: SendOptions = {"task_id": task_id}
        if timeout is not None:
            options["timeout"] = timedelta(seconds=timeout * stretch)
        await client.send(name, input_, **options)

    return provoke


async def ask_and_cancel(
    client: Mesh, task_id: TaskId, recorded: RecordedEvents, stretch: float
) -> None:
    task = await client.send("silent", 1, task_id=task_id)
    await recorded.wait(Step.SEGMENT, Phase.BEFORE, task_id=task_id)
    await task.cancel()


CASES = [
    (ask("broken"), "error", "ValueError: no such city; password=***", "raise ValueError("),
    (ask("silent", timeout=0.3), "timeout", "the task's deadline has passed", "Event().wait()"),
    (ask("asks_silent"), "timeout", "peer 'silent': timeout: ", "await silent_peer("),
    (ask_and_cancel, "cancelled", "cancelled on request", "Event().wait()"),
    (
        ask("asks_missing"),
        "undeliverable",
        "peer 'missing': undeliverable: no replica of agent 'missing' has declared its queue",
        "await missing_peer(",
    ),
    (ask("broken", "one"), "invalid", "", "InvalidInput"),
]


class BothObservers:
    """Records events, and logs them as a replica does."""

    def __init__(self) -> None:
        self.recorded, self._logged = RecordedEvents(), make_observer()

    def emit(self, event: Event) -> None:
        self.recorded.emit(event)
        self._logged.emit(event)


def provoke_failure(
    provoke: Provoke, database: str, **options: Any
) -> tuple[TaskId, Failed, list[dict[str, Any]]]:
    """Run a task that fails. Returns its id, its outcome, and the log.

    On a busy machine, its deadline may pass before its code begins: then it gets more time.
    """
    for stretch in (1.0, 10.0, 100.0):
        task_id, failed, lines = _provoke_once(provoke, database, stretch, **options)
        has_begun = any(line["logger"] == log.name for line in lines)
        if failed.kind != FailureKind.TIMEOUT or has_begun:
            break
    return task_id, failed, lines


def _provoke_once(
    provoke: Provoke, database: str, stretch: float, **options: Any
) -> tuple[TaskId, Failed, list[dict[str, Any]]]:
    task_id, output = TaskId(new_id()), io.StringIO()

    async def run() -> Failed:
        observer = BothObservers()
        async with local_mesh(
            broken,
            silent,
            asks_silent,
            asks_missing,
            db_url=database,
            namespace="test",
            observer=observer,
            sweep_interval_seconds=0.1,
            settle_time_seconds=0,
            deadline_margin_seconds=0,
            undeliverable_after_seconds=0.1,
            **options,
        ) as client:
            reply = asyncio.get_running_loop().create_future()
            observer.recorded.hooks.append(
                lambda event: (
                    reply.set_result(None)
                    if event.step is Step.TASK_FAILED
                    and task_id in event.task_ids
                    and not reply.done()
                    else None
                )
            )
            await provoke(client, task_id, observer.recorded, stretch)
            await reply
        (event,) = observer.recorded.matching(Step.TASK_FAILED, task_id=task_id)
        return Failed(FailureKind(str(event.detail["kind"])), str(event.detail["reason"]))

    with logging_to(output, "info", as_json=True):
        failed = asyncio.run(run())
    return task_id, failed, [json.loads(line) for line in output.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("provoke", "kind", "reason", "code"),
    CASES,
    ids=["error", "timeout", "timeout of a peer", "cancelled", "undeliverable", "invalid"],
)
def test_each_kind_of_failure_is_shown_and_logged_with_its_reason(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    provoke: Provoke,
    kind: str,
    reason: str,
    code: str,
) -> None:
    database = f"sqlite:///{tmp_path}/tasks.db"
    task_id, failed, lines = provoke_failure(provoke, database, ack_policy="on_receipt")
    assert failed.kind == kind
    assert failed.message.startswith(reason)
    command = ["tasks", "show", task_id, "--db", database, "--namespace", "test"]
    shown = " ".join(run_main(command, capsys).out.split())
    assert f"failure {kind}: {failed.message}" in shown
    as_json = run_main([*command, "--json"], capsys).json
    assert as_json["failure"] == {"kind": kind, "message": failed.message}
    (line,) = [
        each for each in lines if each.get("step") == "task_failed" and task_id in each["task_ids"]
    ]
    assert line["level"] == ("info" if kind == "cancelled" else "warning")
    assert (line["detail"]["kind"], line["detail"]["reason"]) == (kind, failed.message)
    assert line["detail"]["traceback"].startswith("Traceback")
    assert code in line["detail"]["traceback"]
    assert "hunter2" not in json.dumps([lines, as_json, shown])


def test_every_kind_is_provoked() -> None:
    assert {kind for _, kind, _, _ in CASES} == {kind.value for kind in FailureKind}


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_log_line_of_agent_code_names_its_task(tmp_path: Path, is_stored: bool) -> None:
    options = {"stateless_checkpointing": is_stored}
    task_id, _, lines = provoke_failure(
        ask("silent", 7, timeout=0.3), f"sqlite:///{tmp_path}/tasks.db", **options
    )
    (line,) = [each for each in lines if each["logger"] == "my_agents"]
    assert (line["task_id"], line["agent"], line["generation"], line["message"]) == (
        task_id,
        "silent",
        0,
        "asked for 7",
    )
