"""Tasks that ended in process: only their ids stay, and a duplicate request changes nothing."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.client import Client
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.checkpoint import Begun, CancelBeforeRequest, Ended, KeepReply, Reply, TaskState
from meshpoint.model.ids import RunId, TaskId
from meshpoint.model.outcomes import Ok
from meshpoint.testing.conformance.build import (
    AGENT,
    a_begin,
    a_cancel,
    a_requester,
    a_run,
    an_end,
    failed,
    operating,
    saved,
)

from .agents import Scripted
from .faults import FaultyBroker
from .mesh import Mesh, Running, Timings
from .puppet import Puppet

LARGE = "x" * 100_000


def tables(running: Running) -> Any:
    return running.memory._inner._tables


async def large(ctx: Any, request: Any) -> Paused:
    return Paused([Call("call", "peer", request)], b"state" * 1000)


async def answers(ctx: Any, state: bytes, outcomes: Any) -> Done[Any]:
    return Done([LARGE])


async def test_their_replies_are_not_kept(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    running = await mesh.replica(Scripted("agent", large, answers), durable=False, ended_kept=1000)
    for number in range(20):
        task_id = await boss.ask("agent", number)
        await peer.respond(await peer.request_number(number + 1), 1)
        assert await boss.reply(task_id) == Ok([LARGE])
    await mesh.settle()
    kept = tables(running)
    assert kept.tasks == kept.sending == kept.live == {}
    assert len(kept.recently_ended) == 20
    assert mesh.unacked("agent") == 0


async def test_a_duplicate_does_not_run_again(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(Scripted("agent", large, answers), durable=False, ended_kept=1000)
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(task_id) == Ok([LARGE])
    await mesh.settle()
    await boss.ask("agent", 1, task_id)
    await mesh.settle()
    assert len(peer.requests) == 1
    assert boss.replies(task_id) == [Ok([LARGE])], "a confirmed reply must not be sent again"
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_requester_that_was_resumed_gets_its_answer_anew(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(Scripted("agent", large, answers), durable=False, ended_kept=1000)
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 1)
    await boss.reply(task_id)
    await mesh.settle()
    await boss.ask("agent", 1, task_id, resume="00000001")
    await peer.respond(await peer.request_number(2), 1)
    await mesh.settle()
    assert boss.replies(task_id) == [Ok([LARGE])] * 2


async def test_the_ids_are_bounded_too() -> None:
    store = InProcessStore(FakeClock(), timings=Timings(), max_ended=10)
    for _ in range(3000):
        (begun,) = await store.begin([a_begin(a_run())])
        assert isinstance(begun, Begun)
        (ended,) = await store.end([an_end(begun.run)])
        assert isinstance(ended, Ended)
        await store.mark_sent([ended.reply])
    kept = store._tables  # type: ignore[attr-defined]
    assert len(kept.recently_ended) == 10
    assert kept.tasks == {}
    assert len(kept.tombstones) < 2000


async def test_cancels_of_unknown_tasks_are_bounded_in_number_and_age() -> None:
    clock = FakeClock()
    store = InProcessStore(clock, timings=Timings(), max_ended=10)
    for number in range(3000):
        (found,) = await store.cancel([a_cancel(TaskId(str(number)), sender=f"sender {number}")])
        assert found == CancelBeforeRequest()
    kept = store._tables  # type: ignore[attr-defined]
    assert list(kept.tasks) == list(kept.early_cancels) == [str(number) for number in range(2990, 3000)], (
        "the last ones"
    )
    assert kept.recently_ended == kept.sending == kept.live == {}
    assert len(kept.tombstones) < 2000
    clock.advance(timedelta(days=2))
    assert await store.purge(AGENT, 100) == 10
    assert kept.tasks == kept.early_cancels == {}


async def test_an_early_cancel_that_became_a_reply_is_no_longer_counted() -> None:
    store = InProcessStore(FakeClock(), timings=Timings(), max_ended=1)
    await store.cancel([a_cancel(TaskId("a"))])
    reply = Reply(AGENT, TaskId("a"), TaskState.COMPLETED, b"done", a_requester())
    assert await store.keep_replies([KeepReply(RunId("run"), reply, None)]) == [True]
    for task_id in ("b", "c"):
        await store.cancel([a_cancel(TaskId(task_id))])
    assert set(store._tables.tasks) == {"a", "c"}  # type: ignore[attr-defined]
    assert [each.task_id for each in store._tables.sending.values()] == ["a"]  # type: ignore[attr-defined]


async def test_failed_operations_are_bounded() -> None:
    store = InProcessStore(FakeClock(), timings=Timings(), max_ended=1000)
    for _ in range(300):
        run = await failed(store)
        (reply,) = [row.to_reply(store.present) for row in store._tables.sending.values()]  # type: ignore[attr-defined]
        await store.mark_sent([reply])
    kept = store._tables  # type: ignore[attr-defined]
    assert len(kept.tasks) == len(kept.resumable) == 100
    assert await store.operation(run.task_id) is not None, "the newest must be resumable"
    assert len(kept.recently_ended) == 200, "requests of the others must be recognised"


async def test_archived_checkpoints_are_bounded() -> None:
    store = InProcessStore(FakeClock(), timings=Archiving(), max_ended=1000)
    for _ in range(300):
        run = await operating(store)
        await saved(store, run)
        await store.end([an_end(run)])
    assert len(store._tables.archive) == 100  # type: ignore[attr-defined]
    assert await store.history(run.task_id), "the newest history must be kept"


@dataclass
class Archiving(Timings):
    checkpoint_archive: bool = True


async def test_a_client_keeps_open_requests_only(mesh: Mesh, peer: Puppet) -> None:
    async with Client(FaultyBroker(mesh.exchange)) as client:
        tracemalloc.start()
        try:
            for number in range(100):
                reply = await client.send("peer", number)
                await peer.respond(await peer.request_number(number + 1), [number, LARGE])
                assert (await reply).outcome == Ok([number, LARGE])
                del reply
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        await mesh.settle()
        assert held < 50 * len(LARGE), "the client still holds replies"
        assert client._pending == client._agents == client._request_fingerprints == {}


async def test_a_client_counts_further_replies(mesh: Mesh, peer: Puppet) -> None:
    async with Client(FaultyBroker(mesh.exchange)) as client:
        reply = await client.send("peer", 1)
        asked = await peer.request_number()
        for value in ({"a": 1}, {"a": 1}, {"a": 2}, {"a": 1}):
            await peer.respond(asked, value)
        await mesh.settle()
        assert (await reply).outcome == Ok({"a": 1})
        assert (client.duplicates, client.conflicts) == (2, 1)


async def test_a_client_forgets_whom_nobody_waits_for(mesh: Mesh, peer: Puppet) -> None:
    async with Client(FaultyBroker(mesh.exchange)) as client:
        reply = await client.send("peer", 1)
        asked = await peer.request_number()
        reply.cancel()
        await mesh.settle()
        assert client._pending == {}
        await peer.respond(asked, 1)
        await mesh.settle()
        assert (client.duplicates, client.conflicts) == (0, 0)
