"""From any state, replicas that keep sweeping end every task and empty the tables."""

from __future__ import annotations

from machines import passing
from machines.ledger import Ledger
from machines.wishes import READS_ALL, Wishes
from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.checkpoint import AllArrived, Resumable, TaskState
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import AGENT, HOUR

PLENTY = 1_000
_LIVE = (TaskState.WAITING, TaskState.READY, TaskState.RUNNING)


async def drained(store: CheckpointStore, ledger: Ledger, wishes: Wishes, clock: FakeClock) -> None:
    """Sweep until every task has ended, everything is sent, and all rows are purged.

    Parked tasks are cancelled first, as a person would do.
    """
    # exceeds any timeout, lease or back-off, so everything that can be due is due in the first
    # round
    for _ in range(2):
        clock.advance(4 * HOUR)
        await _sweep(store, ledger, wishes)
    assert await store.tasks(states=_LIVE, limit=PLENTY) == [], "tasks are still open"
    for story in ledger.in_state(TaskState.PARKED):
        cancel = wishes.cancel(story.task_id)
        [result] = await store.cancel([cancel])
        ledger.cancelled(cancel, result)
    clock.advance(12 * HOUR)
    await _send(store, ledger)
    clock.advance(12 * HOUR)
    assert await store.unsent(AGENT, PLENTY) == [], "messages are still unsent"
    passing.purged(ledger, await store.purge(AGENT, PLENTY))
    assert await store.tasks(limit=PLENTY) == [], "rows are left"
    assert ledger.stories == {}


async def _sweep(store: CheckpointStore, ledger: Ledger, wishes: Wishes) -> None:
    """One sweep, as the sweeper does it, by a replica that reads every format."""
    ready = await store.take(READS_ALL, PLENTY, PLENTY)
    passing.taken(ledger, READS_ALL, PLENTY, PLENTY, ready)
    expired = await store.expire(READS_ALL, PLENTY, PLENTY)
    passing.expired(ledger, READS_ALL, PLENTY, expired)
    abandoned = await store.take_over(READS_ALL, PLENTY, PLENTY)
    passing.rescued(ledger, READS_ALL, PLENTY, PLENTY, abandoned)
    resumed = [each.then.task for each in expired if isinstance(each.then, AllArrived)]
    await _end([*ready, *resumed, *abandoned], store, ledger, wishes)
    await _send(store, ledger)


async def _end(tasks: list[Resumable], store: CheckpointStore, ledger: Ledger, wishes: Wishes) -> None:
    ends = [wishes.end(task.run, number) for number, task in enumerate(tasks)]
    for end, result in zip(ends, await store.end(ends), strict=True):
        ledger.ended(end, result)


async def _send(store: CheckpointStore, ledger: Ledger) -> None:
    sends = await store.unsent(AGENT, PLENTY)
    passing.offered(ledger, sends)
    await store.mark_sent(sends)
    passing.marked(ledger, sends)
