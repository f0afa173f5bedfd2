"""Another session of the database holds a task's row: its letters wait, the others are handled."""

from __future__ import annotations

from typing import Any

from meshpoint.errors import RowLocked
from meshpoint.model.checkpoint import Locked
from meshpoint.model.events import Phase, Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import asker
from .mesh import Mesh, Running
from .puppet import Puppet


def hold(running: Running, held: set[str], *, when_ending: set[str] | None = None) -> None:
    """Let the database of this replica answer as if another session held these tasks."""
    store = running.store._inner

    class Held:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def claim(self, claims: Any, replica: Any, slots: int) -> Any:
            free = [claim for claim in claims if claim.task_id not in held]
            answers = iter(await store.claim(free, replica, slots))
            return [
                Locked(claim.task_id, claim.sub_task_id) if claim.task_id in held else next(answers)
                for claim in claims
            ]

        async def cancel(self, cancels: Any) -> Any:
            free = [cancel for cancel in cancels if cancel.task_id not in held]
            answers = iter(await store.cancel(free))
            return [Locked(cancel.task_id) if cancel.task_id in held else next(answers) for cancel in cancels]

        async def end(self, ends: Any) -> Any:
            if any(end.run.task_id in (when_ending or ()) for end in ends):
                raise RowLocked("another session holds a row")
            return await store.end(ends)

    running.store._inner = Held()


async def test_a_response_waits_for_its_own_task_only(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked, other = await boss.ask("asker", 1), await boss.ask("asker", 2)
    requests = [await peer.request_number(1), await peer.request_number(2)]
    held = {locked}
    hold(replica, held)
    for request in requests:
        await peer.respond(request, "answer")
    assert isinstance(await boss.reply(other), Ok)
    await mesh.advance(30)
    assert boss.replies(locked) == []
    assert mesh.events.of(Step.ROW_LOCKED, Phase.NOTED, locked)
    assert mesh.events.of(Step.STORE_AWAY) == []
    held.clear()
    await mesh.advance(2)
    assert isinstance(await boss.reply(locked), Ok)
    assert mesh.unacked("asker") == 0


async def test_more_responses_than_the_prefetch_may_wait(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"), response_prefetch=2)
    tasks = [await boss.ask("asker", number) for number in range(5)]
    requests = [await peer.request_number(number) for number in range(1, 6)]
    held = set(tasks[:4])
    hold(replica, held)
    for request in requests:
        await peer.respond(request, "answer")
    await mesh.advance(5)
    assert isinstance(await boss.reply(tasks[4]), Ok)
    held.clear()
    await mesh.advance(5)
    for task in tasks:
        assert isinstance(await boss.reply(task), Ok)
    assert mesh.unacked("asker") == 0


async def test_a_cancel_waits_for_its_own_task_only(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked, other = await boss.ask("asker", 1), await boss.ask("asker", 2)
    await peer.request_number(2)
    await mesh.settle()
    held = {locked}
    hold(replica, held)
    for task in (locked, other):
        await boss.cancel("asker", task)
    assert (await boss.reply(other)).kind is FailureKind.CANCELLED  # type: ignore[union-attr]
    await mesh.advance(10)
    assert boss.replies(locked) == []
    held.clear()
    await mesh.advance(2)
    outcome = await boss.reply(locked)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
    assert mesh.unacked("asker") == 0


async def test_an_end_is_repeated_and_is_no_outage(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked = await boss.ask("asker", 1)
    request = await peer.request_number(1)
    await mesh.settle()
    held = {locked}
    hold(replica, set(), when_ending=held)
    await peer.respond(request, "answer")
    await mesh.settle()
    await mesh.advance(5)
    assert mesh.events.of(Step.ROW_LOCKED, Phase.NOTED)
    assert boss.replies(locked) == []
    held.clear()
    await mesh.advance(5)
    assert isinstance(await boss.reply(locked), Ok)
    assert mesh.events.of(Step.STORE_AWAY) == []
