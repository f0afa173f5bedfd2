"""Calls to peers that have no queue yet."""

from __future__ import annotations

from datetime import timedelta

from meshpoint.model.calls import Join
from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import MAX_SWEEP_DELAY, Dispatch
from meshpoint.model.transitions import JoinCompleted, Pause, UnroutableCall
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    LEASED,
    SECOND,
    TIMEOUT,
    a_call,
    a_pause,
    answered,
    one,
    outcomes,
    paused,
    sub,
    write_pause,
)


def unroutable(
    pause: Pause, call_id: str = "a", *, starts: bool = True, retry_after: timedelta = SECOND
) -> UnroutableCall:
    """The broker's answer to the request of one call of `pause`."""
    return UnroutableCall(pause.run.task_id, 1, sub(pause, call_id), starts, retry_after)


async def due_dispatch(store: CheckpointStore) -> Dispatch:
    """The only message that is due, which must be a request."""
    send = one(await store.unsent(AGENT, 10))
    assert isinstance(send, Dispatch)
    return send


class UnroutableSuite:
    """A request without a queue stays due, and its row records the time of its first return."""

    async def test_unroutable_is_due_soon(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store)
        await store.record_unroutable([unroutable(pause)])
        assert await store.unsent(AGENT, 10) == []
        clock.advance(SECOND)
        assert (await due_dispatch(store)).unroutable_for == SECOND
        assert await store.unsent(AGENT, 10) == []

    async def test_unroutable_keeps_start(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store)
        await store.record_unroutable([unroutable(pause)])
        clock.advance(SECOND)
        await due_dispatch(store)
        await store.record_unroutable([unroutable(pause, starts=False)])
        clock.advance(SECOND)
        assert (await due_dispatch(store)).unroutable_for == 2 * SECOND
        await store.record_unroutable([unroutable(pause)])
        clock.advance(SECOND)
        assert (await due_dispatch(store)).unroutable_for == SECOND

    async def test_unroutable_starts_over_after_a_gap(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        """Neither a replica nor the broker can have been there all the time."""
        pause = await paused(store)
        await store.record_unroutable([unroutable(pause)])
        clock.advance(SECOND + MAX_SWEEP_DELAY)
        assert (await due_dispatch(store)).unroutable_for == SECOND + MAX_SWEEP_DELAY
        await store.record_unroutable([unroutable(pause, starts=False)])
        clock.advance(SECOND + MAX_SWEEP_DELAY + SECOND)
        assert (await due_dispatch(store)).unroutable_for is None

    async def test_unroutable_never_postpones(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store)
        await store.record_unroutable([unroutable(pause, retry_after=100 * LEASED)])
        clock.advance(LEASED)
        assert (await due_dispatch(store)).unroutable_for == LEASED

    async def test_sent_call_is_not_unroutable(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause("a")
        committed = await write_pause(store, pause)
        await store.record_unroutable([unroutable(pause)])
        await store.confirm_sent(committed.dispatches)
        await store.record_unroutable([unroutable(pause)])
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == []
        clock.advance(TIMEOUT)
        expired = one(await store.expire(HERE, 10, 1))
        assert isinstance(expired.join_result, JoinCompleted)
        assert _kinds(expired.join_result) == {"a": "timeout"}

    async def test_unroutable_call_expires_as_undeliverable(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause("a", "b")
        committed = await write_pause(store, pause)
        await store.confirm_sent(committed.dispatches[1:])
        await store.record_unroutable([unroutable(pause)])
        clock.advance(TIMEOUT + SECOND)
        expired = one(await store.expire(HERE, 10, 1))
        assert isinstance(expired.join_result, JoinCompleted)
        assert _kinds(expired.join_result) == {"a": "undeliverable", "b": "timeout"}

    async def test_unroutable_call_expires_with_its_join(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_call("a", timeout=2 * TIMEOUT), join=Join(deadline=SECOND))
        await store.record_unroutable([unroutable(pause)])
        clock.advance(2 * SECOND)
        expired = one(await store.expire(HERE, 10, 1))
        assert isinstance(expired.join_result, JoinCompleted)
        assert _kinds(expired.join_result) == {"a": "undeliverable"}

    async def test_unroutable_call_with_outcome(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, "a", "b")
        await answered(store, pause, "a")
        await store.record_unroutable([unroutable(pause)])
        clock.advance(LEASED)
        again = await due_dispatch(store)
        assert (again.sub_task_id, again.unroutable_for) == (sub(pause, "b"), None)

    async def test_unroutable_unknown_calls(self, store: CheckpointStore) -> None:
        pause = await paused(store)
        gone = UnroutableCall(TaskId("nobody"), 1, TaskId("nobody"), True, SECOND)
        await store.record_unroutable([gone, unroutable(pause)])
        await store.record_unroutable([])


def _kinds(arrival: JoinCompleted) -> dict[str, str]:
    return {
        call_id: getattr(outcome, "kind", "ok")
        for call_id, outcome in outcomes(arrival.task).items()
    }
