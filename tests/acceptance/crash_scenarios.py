"""Scenarios that bring a replica to each step at which the crash matrix kills it."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from meshpoint.model.events import Step

from .crash_stage import VICTIM, Stage

Scenario = Callable[[Stage], Awaitable[None]]


async def journey(stage: Stage) -> None:
    """A request, two pauses and the reply, all in one replica."""
    await stage.ask(1, 2, rounds=2)
    await stage.doom()


async def on_receipt(stage: Stage) -> None:
    """A request that is acked before its first segment."""
    stage.configure(ack_policy="on_receipt")
    await stage.ask(1, 2)
    await stage.doom()


async def long_segment(stage: Stage) -> None:
    """Agent code that runs for as long as its replica lives."""
    stage.configure(ack_policy="on_receipt")
    await stage.ask(1, gated=True)
    await stage.doom()


async def drained(stage: Stage) -> None:
    """SIGTERM arrives while the code runs, and the code does not end in time."""
    await long_segment(stage)
    await stage.terminate_while_it_runs(stage.doomed)


async def handed_back(stage: Stage) -> None:
    """A drained replica has left a ready task."""
    stage.configure(ack_policy="on_receipt")
    await stage.ask(1, gated=True)
    earlier = await stage.replica()
    await stage.terminate_while_it_runs(earlier)
    assert await earlier.ended() == 0
    await stage.doom()


async def orphaned(stage: Stage) -> None:
    """A killed replica has left a running task."""
    stage.configure(ack_policy="on_receipt")
    await stage.ask(1)
    await stage.kill_one_at("begin:after")
    await stage.doom()


async def overdue(stage: Stage) -> None:
    """A killed replica has left a waiting task, and its deadline passes."""
    await stage.ask(-1, -2, timeout=0.4)
    stage.configure(sweep_interval_seconds=600)
    await stage.kill_one_at("ack:after")
    # so that the first sweep already finds the deadline passed
    stage.configure(settle_time_seconds=0.5)
    stage.expected = ["timeout", "timeout"]
    await stage.doom()


async def unsent(stage: Stage) -> None:
    """A killed replica has left calls that are committed but not sent."""
    stage.configure(dispatch_lease_seconds=0.5)
    await stage.ask(1, 2)
    await stage.kill_one_at("dispatch:before")
    await stage.doom()


async def unanswered(stage: Stage) -> None:
    """A killed replica has left an ended task whose reply is not sent."""
    await stage.ask(1, 2)
    await stage.kill_one_at("end:after")
    await stage.doom()


async def cancelled(stage: Stage) -> None:
    """The client cancels the task at the top; the cancel travels down three levels to the peer."""
    await stage.ask(-1)
    await stage.doom()
    await stage.cancel()


async def no_such_peer(stage: Stage) -> None:
    """The peer's queue does not exist at the broker."""
    await stage.ask(1, peer="nobody")
    stage.expected = ["undeliverable"]
    await stage.doom()


async def entombed(stage: Stage) -> None:
    """A killed replica has left an ended task whose tombstone has expired."""
    stage.configure(tombstone_ttl_seconds=0.2, sweep_interval_seconds=0.02)
    await stage.ask(1, agent=VICTIM)
    await stage.kill_one_at("mark:after", skip=1)
    stage.all_purged = True
    await stage.doom()


async def operation(stage: Stage) -> None:
    """An operation in one replica: two subtasks, a pause and a third subtask."""
    await stage.ask(1, 2, steps=2)
    await stage.doom()


async def failing(stage: Stage) -> None:
    """An operation that fails in the end and keeps its checkpoint."""
    await stage.ask(1, steps=1, broken=True)
    await stage.doom()


async def asked_again(stage: Stage) -> None:
    """A failed operation is asked for again, because its requester was resumed."""
    await stage.ask(1, steps=1, broken=True)
    earlier = await stage.replica()
    await earlier.wait("reply:after", agent=VICTIM)
    earlier.signal(signal.SIGTERM)
    assert await earlier.ended() == 0
    await stage.doom()
    await stage.resume()
    stage.expected = [10]


@dataclass(frozen=True)
class Way:
    """A scenario, and how many times the victim passes the step before it dies there."""

    scenario: Scenario
    what: str
    skip: int = 0


WAYS: Mapping[Step, Sequence[Way]] = {
    Step.RECEIVE: [Way(journey, "request")],
    Step.BEGIN: [Way(on_receipt, "request"), Way(operation, "within a segment")],
    Step.SEGMENT: [Way(journey, "first"), Way(journey, "resumed", 1), Way(journey, "last", 2)],
    Step.SUBTASK: [Way(operation, "first"), Way(operation, "second", 1), Way(operation, "after a pause", 2)],
    Step.SAVE: [
        Way(operation, "first"),
        Way(operation, "second", 1),
        Way(operation, "after a pause", 2),
        Way(failing, "before a failure", 1),
    ],
    Step.RESUME: [Way(asked_again, "failed")],
    Step.CHECKPOINT: [Way(journey, "first"), Way(journey, "second", 1), Way(operation, "of an operation")],
    Step.DISPATCH: [Way(journey, "first"), Way(journey, "second", 1), Way(unsent, "by the sweeper")],
    Step.MARK: [
        Way(journey, "of calls"),
        Way(journey, "of the reply", 2),
        Way(unsent, "of calls by the sweeper"),
        Way(cancelled, "of cancels", 1),
    ],
    Step.ACK: [
        Way(journey, "of the request"),
        Way(journey, "of a response", 1),
        Way(journey, "of the last response", 2),
        Way(on_receipt, "on receipt"),
        Way(operation, "within a segment"),
        Way(asked_again, "of a repeated request"),
    ],
    Step.CLAIM: [Way(journey, "of one of two"), Way(journey, "of the last", 1), Way(no_such_peer, "undeliverable")],
    Step.RESTORE: [
        Way(journey, "first"),
        Way(orphaned, "after a rescue"),
        Way(operation, "of an operation"),
    ],
    Step.END: [
        Way(journey, "completed"),
        Way(overdue, "after a timeout"),
        Way(operation, "of an operation"),
        Way(failing, "of an operation, failed"),
    ],
    Step.REPLY: [Way(journey, "at once"), Way(unanswered, "by the sweeper"), Way(cancelled, "cancelled")],
    Step.SWEEP: [Way(unsent, "calls are due"), Way(unanswered, "a reply is due")],
    Step.CANCEL: [Way(cancelled, "waiting")],
    Step.CANCEL_NOTICE: [Way(cancelled, "cancelled"), Way(overdue, "timed out")],
    Step.RELEASE: [Way(drained, "running")],
    Step.RENEW: [Way(long_segment, "running")],
    Step.EXPIRE: [Way(overdue, "waiting")],
    Step.TAKE: [Way(handed_back, "ready"), Way(asked_again, "resumed")],
    Step.TAKE_OVER: [Way(orphaned, "running")],
    Step.PURGE: [Way(entombed, "tombstone")],
}
"""Every step with an effect, and the scenarios in which a task reaches it."""
