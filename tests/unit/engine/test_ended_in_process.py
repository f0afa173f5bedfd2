"""Tasks that ended in process: only their ids stay, and a duplicate request changes nothing."""

from __future__ import annotations

import tracemalloc
from datetime import timedelta
from typing import Any

from fake_peer import FakePeer
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.ids import RunId, TaskId
from meshpoint.model.options import StoreTimings
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import Reply, TaskState
from meshpoint.model.transitions import (
    BeginCommitted,
    CancelBeforeRequest,
    EndCommitted,
    StoreReply,
)
from meshpoint.testing.clock import FakeClock
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
from plain_client import PlainClient

from .agents import ScriptedAgent
from .faults import FaultyBroker
from .mesh import Mesh, RunningReplica

LARGE_TEXT = "x" * 100_000


def in_process_tables(replica: RunningReplica) -> Any:
    return replica.memory._inner._tables


async def return_large(ctx: Any, request: Any) -> Paused:
    return Paused([Call("call", "peer", request)], b"state" * 1000)


async def return_outcomes(ctx: Any, state: bytes, outcomes: Any) -> Done[Any]:
    return Done([LARGE_TEXT])


async def test_replies_of_ended_tasks_are_not_stored(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(
        ScriptedAgent("agent", return_large, return_outcomes), durable=False, ended_kept=1000
    )
    for number in range(20):
        task_id = await client.ask("agent", number)
        await peer.respond(await peer.wait_for_request(number + 1), 1)
        assert await client.reply(task_id) == Ok([LARGE_TEXT])
    await mesh.idle()
    stored = in_process_tables(replica)
    assert stored.tasks == stored.sending == stored.live == {}
    assert len(stored.recently_ended) == 20
    assert mesh.unacked("agent") == 0


async def test_a_duplicate_of_an_ended_task_does_not_run_again(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(
        ScriptedAgent("agent", return_large, return_outcomes), durable=False, ended_kept=1000
    )
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok([LARGE_TEXT])
    await mesh.idle()
    await client.ask("agent", 1, task_id)
    await mesh.idle()
    assert len(peer.requests) == 1
    assert client.replies(task_id) == [Ok([LARGE_TEXT])], (
        "a confirmed reply must not be sent again"
    )
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_resumed_requester_gets_a_recomputed_answer(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(
        ScriptedAgent("agent", return_large, return_outcomes), durable=False, ended_kept=1000
    )
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await client.reply(task_id)
    await mesh.idle()
    await client.ask("agent", 1, task_id, resume="00000001")
    await peer.respond(await peer.wait_for_request(2), 1)
    await mesh.idle()
    assert client.replies(task_id) == [Ok([LARGE_TEXT])] * 2


async def test_the_ids_of_ended_tasks_are_bounded() -> None:
    store = InProcessStore(FakeClock(), timings=StoreTimings(), max_ended=10)
    for _ in range(3000):
        (result,) = await store.begin([a_begin(a_run())])
        assert isinstance(result, BeginCommitted)
        (ended,) = await store.end([an_end(result.run)])
        assert isinstance(ended, EndCommitted)
        await store.confirm_sent([ended.reply])
    stored = store._tables
    assert len(stored.recently_ended) == 10
    assert stored.tasks == {}
    assert len(stored.tombstones) < 2000


async def test_cancels_of_unknown_tasks_are_bounded_in_number_and_age() -> None:
    clock = FakeClock()
    store = InProcessStore(clock, timings=StoreTimings(), max_ended=10)
    for number in range(3000):
        (found,) = await store.cancel([a_cancel(TaskId(str(number)), sender=f"sender {number}")])
        assert found == CancelBeforeRequest()
    stored = store._tables
    assert (
        list(stored.tasks)
        == list(stored.early_cancels)
        == [str(number) for number in range(2990, 3000)]
    ), "the last ones"
    assert not stored.recently_ended
    assert not stored.sending
    assert not stored.live
    assert len(stored.tombstones) < 2000
    clock.advance(timedelta(days=2))
    assert await store.purge(AGENT, 100) == 10
    assert stored.tasks == stored.early_cancels == {}


async def test_an_early_cancel_is_not_counted_once_its_reply_is_stored() -> None:
    store = InProcessStore(FakeClock(), timings=StoreTimings(), max_ended=1)
    await store.cancel([a_cancel(TaskId("a"))])
    reply = Reply(AGENT, TaskId("a"), TaskState.COMPLETED, b"done", a_requester())
    assert await store.store_replies([StoreReply(RunId("run"), reply, None)]) == [True]
    for task_id in ("b", "c"):
        await store.cancel([a_cancel(TaskId(task_id))])
    assert set(store._tables.tasks) == {"a", "c"}
    assert [item.task_id for item in store._tables.sending.values()] == ["a"]


async def test_failed_operations_are_bounded() -> None:
    store = InProcessStore(FakeClock(), timings=StoreTimings(), max_ended=1000)
    for _ in range(300):
        run = await failed(store)
        (reply,) = [row.to_reply(store.current_time) for row in store._tables.sending.values()]
        await store.confirm_sent([reply])
    stored = store._tables
    assert len(stored.tasks) == len(stored.resumable) == 100
    assert await store.operation(run.task_id) is not None, "the newest must be resumable"
    assert len(stored.recently_ended) == 200, "requests of the others must be recognized"


async def test_archived_checkpoints_are_bounded() -> None:
    store = InProcessStore(
        FakeClock(), timings=StoreTimings(checkpoint_archive=True), max_ended=1000
    )
    for _ in range(300):
        run = await operating(store)
        await saved(store, run)
        await store.end([an_end(run)])
    assert len(store._tables.archive) == 100
    assert await store.history(run.task_id), "the newest history must be kept"


async def test_a_client_keeps_open_requests_only(mesh: Mesh, peer: FakePeer) -> None:
    async with PlainClient(FaultyBroker(mesh.exchange)) as client:
        tracemalloc.start()
        try:
            for number in range(100):
                reply = await client.send("peer", number)
                await peer.respond(await peer.wait_for_request(number + 1), [number, LARGE_TEXT])
                assert (await reply).outcome == Ok([number, LARGE_TEXT])
                del reply
            allocated, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        await mesh.idle()
        assert allocated < 50 * len(LARGE_TEXT), "the client still holds replies"


async def test_a_client_counts_further_replies(mesh: Mesh, peer: FakePeer) -> None:
    async with PlainClient(FaultyBroker(mesh.exchange)) as client:
        reply = await client.send("peer", 1)
        request = await peer.wait_for_request()
        for value in (1, 1, 2, 1):
            await peer.respond(request, {"a": value})
        await mesh.idle()
        assert (await reply).outcome == Ok({"a": 1})
        assert (client.duplicates, client.conflicts) == (2, 1)


async def test_a_client_ignores_replies_that_nobody_awaits(mesh: Mesh, peer: FakePeer) -> None:
    async with PlainClient(FaultyBroker(mesh.exchange)) as client:
        reply = await client.send("peer", 1)
        request = await peer.wait_for_request()
        reply.cancel()
        await mesh.idle()
        await peer.respond(request, 1)
        await mesh.idle()
        assert (client.duplicates, client.conflicts) == (0, 0)
