"""A cancel reaches a task in every state, and survives the death of a replica."""

import asyncio
from pathlib import Path

import pytest

from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind

from .mesh import Mesh, Process

LEVELS = ("top", "middle", "bottom")


@pytest.mark.parametrize("killed", [False, True])
async def test_a_cancel_reaches_a_task_three_levels_deep(mesh: Mesh, killed: bool) -> None:
    config = mesh.backends.config(*LEVELS)
    peer, client = await mesh.peer(), await mesh.client()
    crash = ("--at", "cancel:after", "--agent", "top") if killed else ()
    replica = await mesh.replica(config, *crash, started=3)
    reply = await client.send("top", {"below": 3})
    (call,) = await peer.next_requests()
    await replica.wait("ack:after", 3)
    assert await mesh.row_counts() == {"tasks": 3, "calls": 3, "open": 3}
    await client.cancel("top", await _task_id_of(replica, "top"))
    if killed:
        assert await replica.wait_ended() < 0
        replica = await mesh.replica(config, started=3)
    outcome = (await reply).outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
    cancel = await peer.cancels.get()
    assert cancel.message.correlation_id == call.sub_task_id
    await replica.wait("cancel_notice:after", 3 if not killed else 2)
    await _until_no_calls(mesh)
    assert await mesh.row_counts() == {"tasks": 3, "calls": 0, "open": 0}


async def _task_id_of(replica: Process, agent: str) -> TaskId:
    events = await replica.wait("checkpoint:after", agent=agent)
    return TaskId(events[0]["task_ids"][0])


async def _until_no_calls(mesh: Mesh) -> None:
    """Poll, because recording a message as sent happens in the background and emits no event."""
    while (await mesh.row_counts())["calls"]:
        await asyncio.sleep(0.02)


async def test_a_cancel_stops_running_code(mesh: Mesh, tmp_path: Path) -> None:
    client = await mesh.client()
    replica = await mesh.replica(mesh.backends.config("sleeper"))
    reply = await client.send("sleeper", str(tmp_path / "trace"))
    (segment,) = await replica.wait("segment:before")
    await client.cancel("sleeper", TaskId(segment["task_ids"][0]))
    outcome = (await reply).outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
    assert "code cancelled" in (tmp_path / "trace").read_text()


async def test_a_cancel_that_overtakes_its_request_still_cancels_the_task(
    mesh: Mesh, tmp_path: Path
) -> None:
    client = await mesh.client()
    replica = await mesh.replica(mesh.backends.config("root"))
    task_id = TaskId(new_id())
    await client.cancel("root", task_id)
    await replica.wait("cancel:after")
    reply = await client.send(
        "root", {"numbers": [1], "trace": str(tmp_path / "trace")}, task_id=task_id
    )
    outcome = (await reply).outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
    assert not (tmp_path / "trace").exists()
    assert replica.matching_events("segment:before") == []
