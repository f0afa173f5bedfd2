"""A cache copies each operation's last checkpoint: losing the copy costs only time."""

from __future__ import annotations

from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.errors import CheckpointError
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.ports.task_store import CacheUnavailable
from meshpoint.subtasks.resuming import resume_operation

from .agents import Steps, sequential_agent
from .mesh import Mesh

UNAVAILABLE = CacheUnavailable("no answer within 0.5 s")


class FakeCache:
    """A cache that outlives replicas. Every method raises `error` if it is set."""

    def __init__(self) -> None:
        self.copies: dict[tuple[str, str], AgentCheckpoint] = {}
        self.error: Exception | None = None
        self.closed = 0

    def _maybe_fail(self) -> None:
        if self.error is not None:
            raise self.error

    async def put(self, checkpoint: AgentCheckpoint) -> None:
        self._maybe_fail()
        self.copies[checkpoint.operation_id, checkpoint.agent] = checkpoint

    async def get(self, operation_id: TaskId, agent: AgentName) -> AgentCheckpoint | None:
        self._maybe_fail()
        return self.copies.get((operation_id, agent))

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        self._maybe_fail()
        self.copies.pop((operation_id, agent), None)

    async def close(self) -> None:
        self.closed += 1


def restore_sources(mesh: Mesh) -> list[tuple[Any, Any]]:
    """For each restored checkpoint: its source, and why the cached copy was not used."""
    sources = mesh.events.matching(Step.CHECKPOINT_RESTORED)
    return [(event.detail["source"], event.detail.get("fallback")) for event in sources]


async def test_each_checkpoint_is_cached_until_the_task_ends(mesh: Mesh, client: FakePeer) -> None:
    steps, copies = Steps(), FakeCache()
    gate = steps.gate("b")
    replica = await mesh.replica(sequential_agent(steps, "a", "b"), cache=copies)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    assert [copy.seq for copy in copies.copies.values()] == [1]
    gate.opened.set()
    assert await client.reply(task_id) == Ok(3)
    await mesh.idle()
    assert copies.copies == {}
    await replica.drain()
    assert copies.closed == 1


@pytest.mark.parametrize("cached", ["copy", "lost", "stale", "garbage", "unavailable"])
async def test_a_rescuer_uses_the_cached_copy_only_if_it_is_the_latest(
    mesh: Mesh, client: FakePeer, cached: str
) -> None:
    steps, copies = Steps(), FakeCache()
    gate = steps.gate("c")
    first = await mesh.replica(sequential_agent(steps, "a", "b", "c"), cache=copies)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    match cached:
        case "lost":
            copies.copies.clear()
        case "stale":
            copies.copies = {
                key: copy.model_copy(update={"seq": 1}) for key, copy in copies.copies.items()
            }
        case "garbage":
            copies.error = CheckpointError("no copy of a checkpoint")
        case "unavailable":
            copies.error = UNAVAILABLE
    second = await mesh.replica(sequential_agent(steps, "a", "b", "c"), cache=copies)
    reads = len([name for name in second.store.calls if name == "latest"])
    await mesh.advance(17)
    assert await client.reply(task_id) == Ok(4)
    miss_reason = {"copy": None, "lost": "miss"}.get(cached, cached)
    assert restore_sources(mesh) == [("redis" if cached == "copy" else "sql", miss_reason)]
    assert second.store.calls.count("latest") == reads + (cached != "copy")
    assert steps.started.names == ["a", "b", "c", "c"]


async def test_a_failed_copy_is_reported_and_stops_nothing(mesh: Mesh, client: FakePeer) -> None:
    steps, copies = Steps(), FakeCache()
    copies.error = UNAVAILABLE
    await mesh.replica(sequential_agent(steps, "a", "b"), cache=copies)
    task_id = await client.ask("agent", 1)
    assert await client.reply(task_id) == Ok(3)
    await mesh.idle()
    events = mesh.events.matching(Step.CHECKPOINT_COPY, task_id=task_id)
    assert [event.detail["what"] for event in events] == [
        "not_copied",
        "not_copied",
        "not_forgotten",
    ]
    assert {event.detail["why"] for event in events} == {str(UNAVAILABLE)}


async def test_a_failures_checkpoint_is_cached_and_used_by_the_resume(
    mesh: Mesh, client: FakePeer
) -> None:
    steps, copies = Steps(), FakeCache()
    await mesh.replica(sequential_agent(steps, "a", "fail"), cache=copies)
    task_id = await client.ask("agent", 1)
    assert isinstance(await client.reply(task_id), Failed)
    await mesh.idle()
    (copy,) = copies.copies.values()
    assert (copy.seq, copy.failure_reason) == (2, "ValueError: it failed; password=***")
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    assert restore_sources(mesh) == [("redis", None)]
    assert steps.started.names == ["a"]


async def test_a_cancel_not_seen_by_code_makes_the_copy_stale(
    mesh: Mesh, client: FakePeer
) -> None:
    """The database itself wrote the last checkpoint."""
    steps, copies = Steps(), FakeCache()
    gate = steps.gate("b")
    first = await mesh.replica(sequential_agent(steps, "a", "b"), cache=copies, max_attempts=1)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    await mesh.replica(sequential_agent(steps, "a", "b"), cache=copies, max_attempts=1)
    await mesh.advance(17)
    assert isinstance(await client.reply(task_id), Failed)
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    assert restore_sources(mesh) == [("sql", "stale")]
    assert steps.started.names == ["a", "b", "b"]


async def test_checkpoints_of_in_process_tasks_are_not_cached(
    mesh: Mesh, client: FakePeer
) -> None:
    copies = FakeCache()
    await mesh.replica(sequential_agent(Steps(), "a", "fail"), durable=False, cache=copies)
    await client.reply(await client.ask("agent", 1))
    await mesh.idle()
    assert copies.copies == {}
