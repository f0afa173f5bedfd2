"""Scenarios that bring a replica to each step at which the crash matrix kills it."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from meshpoint.model.events import Step

from .crash_harness import VICTIM, CrashHarness

Scenario = Callable[[CrashHarness], Awaitable[None]]


async def two_pauses(stage: CrashHarness) -> None:
    """A request, two pauses and the reply, all in one replica."""
    await stage.ask(1, 2, rounds=2)
    await stage.start_victim()


async def on_receipt(stage: CrashHarness) -> None:
    """A request that is acked before its first segment."""
    stage.configure(ack_policy="on_receipt")
    await stage.ask(1, 2)
    await stage.start_victim()


async def long_segment(stage: CrashHarness) -> None:
    """Agent code that runs for as long as its replica lives."""
    stage.configure(ack_policy="on_receipt")
    await stage.ask(1, gated=True)
    await stage.start_victim()


async def drained(stage: CrashHarness) -> None:
    """SIGTERM arrives while the code runs, and the code does not end in time."""
    await long_segment(stage)
    await stage.terminate_while_it_runs(stage.victim)


async def released_by_drain(stage: CrashHarness) -> None:
    """A drained replica has left a ready task."""
    stage.configure(ack_policy="on_receipt")
    await stage.ask(1, gated=True)
    first_replica = await stage.replica()
    await stage.terminate_while_it_runs(first_replica)
    assert await first_replica.wait_ended() == 0
    await stage.start_victim()


async def orphaned(stage: CrashHarness) -> None:
    """A killed replica has left a running task."""
    stage.configure(ack_policy="on_receipt")
    await stage.ask(1)
    await stage.start_and_kill_at("begin:after")
    await stage.start_victim()


async def overdue(stage: CrashHarness) -> None:
    """A killed replica has left a waiting task, and its deadline passes."""
    await stage.ask(-1, -2, timeout=0.4)
    stage.configure(sweep_interval_seconds=600)
    await stage.start_and_kill_at("ack:after")
    # so that the first sweep already finds the deadline passed
    stage.configure(settle_time_seconds=0.5)
    stage.expected = ["timeout", "timeout"]
    await stage.start_victim()


async def unsent(stage: CrashHarness) -> None:
    """A killed replica has left calls that are committed but not sent."""
    stage.configure(dispatch_lease_seconds=0.5)
    await stage.ask(1, 2)
    await stage.start_and_kill_at("dispatch:before")
    await stage.start_victim()


async def unanswered(stage: CrashHarness) -> None:
    """A killed replica has left an ended task whose reply is not sent."""
    await stage.ask(1, 2)
    await stage.start_and_kill_at("end:after")
    await stage.start_victim()


async def cancelled(stage: CrashHarness) -> None:
    """The client cancels the task at the top; the cancel travels down three levels to the peer."""
    await stage.ask(-1)
    await stage.start_victim()
    await stage.cancel()


async def no_such_peer(stage: CrashHarness) -> None:
    """The peer's queue does not exist at the broker."""
    stage.configure(undeliverable_after_seconds=0)
    await stage.ask(1, peer="nobody")
    stage.expected = ["undeliverable"]
    await stage.start_victim()


async def expired_tombstone(stage: CrashHarness) -> None:
    """A killed replica has left an ended task whose tombstone has expired."""
    stage.configure(tombstone_ttl_seconds=0.2, sweep_interval_seconds=0.02)
    await stage.ask(1, agent=VICTIM)
    await stage.start_and_kill_at("confirm_sent:after", skip=1)
    stage.all_purged = True
    await stage.start_victim()


async def operation(stage: CrashHarness) -> None:
    """An operation in one replica: two subtasks, a pause and a third subtask."""
    await stage.ask(1, 2, steps=2)
    await stage.start_victim()


async def recording(stage: CrashHarness) -> None:
    """Two recorded steps, a pause and a third one, in one replica."""
    await stage.ask(1, 2, recorded=2)
    await stage.start_victim()


async def failing(stage: CrashHarness) -> None:
    """An operation that fails in the end and keeps its checkpoint."""
    await stage.ask(1, steps=1, broken=True)
    await stage.start_victim()


async def setting_values(stage: CrashHarness) -> None:
    """A task that sets a value twice before its pause."""
    await stage.ask(1, 2, values=2)
    await stage.start_victim()


async def signalled(stage: CrashHarness) -> None:
    """A task without calls that receives three signals."""
    await stage.ask(agent=VICTIM, signals=3)
    stage.expected = [7, 8, 9]
    await stage.start_victim()
    await stage.send_signals(7, 8, 9)


async def requested_again(stage: CrashHarness) -> None:
    """A failed operation is asked for again, because its requester was resumed."""
    await stage.ask(1, steps=1, broken=True)
    first_replica = await stage.replica()
    await first_replica.wait("reply:after", agent=VICTIM)
    first_replica.signal(signal.SIGTERM)
    assert await first_replica.wait_ended() == 0
    await stage.start_victim()
    await stage.resume()
    stage.expected = [10]


@dataclass(frozen=True)
class CrashCase:
    """A scenario, and how many times the victim passes the step before it dies there."""

    scenario: Scenario
    label: str
    skip: int = 0

    def needs_unsent_messages(self, step: Step) -> bool:
        """Whether messages must be sent after the commit, as with queues in another database."""
        return step is Step.CONFIRM_SENT or self.scenario in {
            unsent,
            unanswered,
            expired_tombstone,
        }


CASES_BY_STEP: Mapping[Step, Sequence[CrashCase]] = {
    Step.RECEIVE: [CrashCase(two_pauses, "request")],
    Step.BEGIN: [
        CrashCase(on_receipt, "request"),
        CrashCase(operation, "within a segment"),
        CrashCase(recording, "before a step"),
    ],
    Step.SEGMENT: [
        CrashCase(two_pauses, "first"),
        CrashCase(two_pauses, "resumed", 1),
        CrashCase(two_pauses, "last", 2),
    ],
    Step.SUBTASK: [
        CrashCase(operation, "first"),
        CrashCase(operation, "second", 1),
        CrashCase(operation, "after a pause", 2),
    ],
    Step.STEP: [
        CrashCase(recording, "first"),
        CrashCase(recording, "second", 1),
        CrashCase(recording, "after a pause", 2),
    ],
    Step.RECORD: [
        CrashCase(recording, "first"),
        CrashCase(recording, "second", 1),
        CrashCase(recording, "after a pause", 2),
    ],
    Step.SET_VALUE: [
        CrashCase(setting_values, "first"),
        CrashCase(setting_values, "second", 1),
    ],
    Step.SIGNAL: [CrashCase(signalled, "first"), CrashCase(signalled, "second", 1)],
    Step.SAVE: [
        CrashCase(operation, "first"),
        CrashCase(operation, "second", 1),
        CrashCase(operation, "after a pause", 2),
        CrashCase(failing, "before a failure", 1),
    ],
    Step.RESUME: [CrashCase(requested_again, "failed")],
    Step.CHECKPOINT: [
        CrashCase(two_pauses, "first"),
        CrashCase(two_pauses, "second", 1),
        CrashCase(operation, "of an operation"),
        CrashCase(recording, "after steps"),
    ],
    Step.DISPATCH: [
        CrashCase(two_pauses, "first"),
        CrashCase(two_pauses, "second", 1),
        CrashCase(unsent, "by the sweeper"),
    ],
    Step.CONFIRM_SENT: [
        CrashCase(two_pauses, "of calls"),
        CrashCase(two_pauses, "of the reply", 2),
        CrashCase(unsent, "of calls by the sweeper"),
        CrashCase(cancelled, "of cancels", 1),
    ],
    Step.ACK: [
        CrashCase(two_pauses, "of the request"),
        CrashCase(two_pauses, "of a response", 1),
        CrashCase(two_pauses, "of the last response", 2),
        CrashCase(on_receipt, "on receipt"),
        CrashCase(operation, "within a segment"),
        CrashCase(requested_again, "of a repeated request"),
    ],
    Step.CLAIM: [
        CrashCase(two_pauses, "of one of two"),
        CrashCase(two_pauses, "of the last", 1),
        CrashCase(no_such_peer, "undeliverable"),
    ],
    Step.RESTORE: [
        CrashCase(two_pauses, "first"),
        CrashCase(orphaned, "after a rescue"),
        CrashCase(operation, "of an operation"),
        CrashCase(recording, "with steps"),
    ],
    Step.END: [
        CrashCase(two_pauses, "completed"),
        CrashCase(overdue, "after a timeout"),
        CrashCase(operation, "of an operation"),
        CrashCase(recording, "after steps"),
        CrashCase(failing, "of an operation, failed"),
    ],
    Step.REPLY: [
        CrashCase(two_pauses, "at once"),
        CrashCase(unanswered, "by the sweeper"),
        CrashCase(cancelled, "cancelled"),
    ],
    Step.SWEEP: [CrashCase(unsent, "calls are due"), CrashCase(unanswered, "a reply is due")],
    Step.CANCEL: [CrashCase(cancelled, "waiting")],
    Step.CANCEL_NOTICE: [CrashCase(cancelled, "cancelled"), CrashCase(overdue, "timed out")],
    Step.RELEASE: [CrashCase(drained, "running")],
    Step.RENEW: [CrashCase(long_segment, "running")],
    Step.EXPIRE: [CrashCase(overdue, "waiting")],
    Step.ACQUIRE: [CrashCase(released_by_drain, "ready"), CrashCase(requested_again, "resumed")],
    Step.RESCUE: [CrashCase(orphaned, "running")],
    Step.PURGE: [CrashCase(expired_tombstone, "tombstone")],
}
"""Every step with an effect, and the scenarios in which a task reaches it."""
