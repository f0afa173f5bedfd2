"""Retries of peer calls by replicas that are killed while they wait."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from meshpoint.cli import sources
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import CallState, CallSummary
from meshpoint.model.transitions import TaskSuspended
from meshpoint.operations import Operations
from meshpoint.wiring import open_store

from .mesh import Mesh, output_of

ATTEMPT_SECONDS = 20.0
"""Timeout of each attempt. Only the third one is not answered, so its timeout passes."""
MESHPOINT = [sys.executable, "-m", "meshpoint.cli"]


async def tasks(*arguments: str, config: Path) -> str:
    """The output of `meshpoint tasks`."""
    code, out, err = await output_of(*MESHPOINT, "tasks", *arguments, "-c", str(config))
    assert code == 0, err.decode()
    return out.decode()


async def show(task_id: str, config: Path) -> list[dict[str, Any]]:
    """The calls of a task, as `meshpoint tasks show --json` prints them."""
    calls: list[dict[str, Any]] = json.loads(
        await tasks("show", task_id, "--json", config=config)
    )["calls"]
    return calls


async def suspend(task_id: TaskId, config: Path) -> Sequence[CallSummary]:
    """Suspend a task, without a process that takes time to start, and return its calls."""

    async def suspend_in(operations: Operations) -> bool:
        (result,) = await operations.suspend([task_id])
        return isinstance(result, TaskSuspended)

    assert await sources.query_operation(config, None, None, suspend_in)
    async with aclosing(sources.open_each(config, None, None, open_store)) as stores:
        async for store in stores:
            if (found := await store.task(task_id)) is not None:
                return found[1]
    raise AssertionError(f"there is no task {task_id}")


async def test_a_replica_is_killed_in_each_wait_of_a_retried_call(mesh: Mesh) -> None:
    """The peer fails twice, times out once, and then answers."""
    config = mesh.backends.config("root")
    peer, client = await mesh.peer(), await mesh.client()
    await mesh.declare("root")
    task_id = TaskId(new_id())
    work: JsonValue = {"numbers": [1], "timeout": ATTEMPT_SECONDS, "attempts": 4, "wait": 1}
    reply = await client.send("root", work, task_id=task_id)
    ids: list[TaskId] = []
    for _ in range(3):
        replica = await mesh.replica(config, "--at", "call_retried:info")
        (request,) = await peer.next_requests()
        ids.append(request.sub_task_id)
        if len(ids) < 3:
            await request.respond(Failed(FailureKind.ERROR, f"failure {len(ids)}"))
            await request.delivery.ack()
        assert await replica.wait_ended() == -9
        assert replica.matching_events("call_retried:info")[0]["detail"]["sub_task_id"] == ids[-1]
    waiting = await suspend(task_id, config)
    assert [each.sub_task_id for each in waiting[:3]] == ids
    assert (waiting[3].state, waiting[3].sends) == (CallState.PENDING, 0)
    assert waiting[3].due_at is not None
    replica = await mesh.replica(config)
    (request,) = await peer.next_requests()
    await request.answer(10)
    ids.append(request.sub_task_id)
    assert len(set(ids)) == 4
    cancelled = await peer.cancels.get()
    assert cancelled.message.correlation_id == ids[2]  # the attempt that timed out
    await replica.wait("claim:after")
    assert [_summary(each) for each in await show(task_id, config)] == [
        (ids[0], 1, "error", "failure 1", True),
        (ids[1], 2, "error", "failure 2", True),
        (ids[2], 3, "timeout", "the peer did not answer in time", True),
        (ids[3], 4, "ok", None, False),
    ]
    shown = await tasks("show", task_id, config=config)
    assert all(each in shown for each in (*ids, "1 of 4", "4 of 4", "error: failure 2"))
    await tasks("resume", task_id, config=config)
    assert (await reply).outcome == Ok([10])
    assert client.duplicates == 0
    counts = await mesh.row_counts()
    assert (counts["open"], counts["calls"]) == (0, 0)


def _summary(call: dict[str, Any]) -> tuple[object, ...]:
    names = ("sub_task_id", "attempt", "outcome", "message", "is_superseded")
    return tuple(call[name] for name in names)
