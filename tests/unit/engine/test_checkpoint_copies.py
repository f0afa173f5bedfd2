"""A cache copies each operation's last checkpoint: losing the copy costs only time."""

from __future__ import annotations

from typing import Any

import pytest

from meshpoint.errors import CheckpointError
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.ports.checkpoint_cache import CacheUnavailable
from meshpoint.subtasks.resuming import resume_operation

from .agents import Steps, in_a_row
from .mesh import Mesh
from .puppet import Puppet

AWAY = CacheUnavailable("no answer within 0.5 s")


class Copies:
    """A cache that outlives replicas. Every method raises `error` if it is set."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], AgentCheckpoint] = {}
        self.error: Exception | None = None
        self.closed = 0

    def _maybe_fail(self) -> None:
        if self.error is not None:
            raise self.error

    async def put(self, checkpoint: AgentCheckpoint) -> None:
        self._maybe_fail()
        self.kept[checkpoint.operation_id, checkpoint.agent] = checkpoint

    async def get(self, operation_id: TaskId, agent: AgentName) -> AgentCheckpoint | None:
        self._maybe_fail()
        return self.kept.get((operation_id, agent))

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        self._maybe_fail()
        self.kept.pop((operation_id, agent), None)

    async def close(self) -> None:
        self.closed += 1


def restores(mesh: Mesh) -> list[tuple[Any, Any]]:
    """For each restored checkpoint: its source, and why the cached copy was not used."""
    found = mesh.events.of(Step.CHECKPOINT_RESTORED)
    return [(event.detail["source"], event.detail.get("fallback")) for event in found]


async def test_each_checkpoint_is_copied_and_the_copy_is_forgotten_in_the_end(mesh: Mesh, boss: Puppet) -> None:
    steps, copies = Steps(), Copies()
    gate = steps.gate("b")
    replica = await mesh.replica(in_a_row(steps, "a", "b"), cache=copies)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    assert [copy.seq for copy in copies.kept.values()] == [1]
    gate.opened.set()
    assert await boss.reply(task_id) == Ok(3)
    await mesh.settle()
    assert copies.kept == {}
    await replica.drain()
    assert copies.closed == 1


@pytest.mark.parametrize("what", ["copy", "lost", "stale", "garbage", "away"])
async def test_who_goes_on_reads_the_copy_if_it_is_the_last_one(mesh: Mesh, boss: Puppet, what: str) -> None:
    steps, copies = Steps(), Copies()
    gate = steps.gate("c")
    first = await mesh.replica(in_a_row(steps, "a", "b", "c"), cache=copies)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await first.crash()
    gate.opened.set()
    match what:
        case "lost":
            copies.kept.clear()
        case "stale":
            copies.kept = {key: copy.model_copy(update={"seq": 1}) for key, copy in copies.kept.items()}
        case "garbage":
            copies.error = CheckpointError("no copy of a checkpoint")
        case "away":
            copies.error = AWAY
    second = await mesh.replica(in_a_row(steps, "a", "b", "c"), cache=copies)
    reads = len([name for name in second.store.calls if name == "latest"])
    await mesh.advance(17)
    assert await boss.reply(task_id) == Ok(4)
    why = {"copy": None, "lost": "miss"}.get(what, what)
    assert restores(mesh) == [("redis" if what == "copy" else "sql", why)]
    assert second.store.calls.count("latest") == reads + (what != "copy")
    assert steps.ran.names == ["a", "b", "c", "c"]


async def test_a_copy_that_cannot_be_written_is_told_and_stops_nothing(mesh: Mesh, boss: Puppet) -> None:
    steps, copies = Steps(), Copies()
    copies.error = AWAY
    await mesh.replica(in_a_row(steps, "a", "b"), cache=copies)
    task_id = await boss.ask("agent", 1)
    assert await boss.reply(task_id) == Ok(3)
    await mesh.settle()
    told = mesh.events.of(Step.CHECKPOINT_COPY, task_id=task_id)
    assert [event.detail["what"] for event in told] == ["not_copied", "not_copied", "not_forgotten"]
    assert {event.detail["why"] for event in told} == {str(AWAY)}


async def test_the_checkpoint_of_a_failure_is_copied_and_serves_the_resume(mesh: Mesh, boss: Puppet) -> None:
    steps, copies = Steps(), Copies()
    await mesh.replica(in_a_row(steps, "a", "fail"), cache=copies)
    task_id = await boss.ask("agent", 1)
    assert isinstance(await boss.reply(task_id), Failed)
    await mesh.settle()
    (copy,) = copies.kept.values()
    assert (copy.seq, copy.failure_reason) == (2, "ValueError: it failed; password=***")
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    assert restores(mesh) == [("redis", None)]
    assert steps.ran.names == ["a"]


async def test_a_cancel_that_no_code_saw_makes_the_copy_stale(mesh: Mesh, boss: Puppet) -> None:
    """The database itself wrote the last checkpoint."""
    steps, copies = Steps(), Copies()
    gate = steps.gate("b")
    first = await mesh.replica(in_a_row(steps, "a", "b"), cache=copies, max_attempts=1)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await first.crash()
    gate.opened.set()
    await mesh.replica(in_a_row(steps, "a", "b"), cache=copies, max_attempts=1)
    await mesh.advance(17)
    assert isinstance(await boss.reply(task_id), Failed)
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    assert restores(mesh) == [("sql", "stale")]
    assert steps.ran.names == ["a", "b", "b"]


async def test_tasks_in_memory_are_not_copied(mesh: Mesh, boss: Puppet) -> None:
    copies = Copies()
    await mesh.replica(in_a_row(Steps(), "a", "fail"), durable=False, cache=copies)
    await boss.reply(await boss.ask("agent", 1))
    await mesh.settle()
    assert copies.kept == {}
