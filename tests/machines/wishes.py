"""Inputs of the store, made from small numbers so that failing runs are readable and shrink well."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import count

from meshpoint.model.calls import Join
from meshpoint.model.checkpoint import (
    Begin,
    Cancel,
    Checkpoint,
    Claim,
    End,
    Pause,
    PlannedCall,
    Replica,
    Requester,
    Run,
    TaskState,
)
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.testing.conformance.build import AGENT, FORMAT, HOUR, LEASE, OTHER_FORMAT, PEER, REQUESTER, SECOND

REPLICAS = tuple(
    Replica(ReplicaId(name), AGENT, frozenset(formats), LEASE, isolates=name != "A")
    for name, formats in (("A", {FORMAT}), ("B", {FORMAT, OTHER_FORMAT}), ("C", {OTHER_FORMAT}))
)
READS_ALL = Replica(ReplicaId("Z"), AGENT, frozenset({FORMAT, OTHER_FORMAT}), LEASE)
PEERS = (PEER, AgentName("hotels"))
TIMEOUTS = (60 * SECOND, 20 * SECOND, HOUR, 5 * SECOND)
IDLE_TIMEOUTS = (None, None, 12 * SECOND)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a pause: which calls failed before sending, and the join."""

    failed: tuple[bool, ...]
    needed: int | None
    join_seconds: int | None
    times: int
    state_format: str

    def join(self) -> Join:
        """The join; it never needs more results than there are calls."""
        needed = None if self.needed is None else min(self.needed, len(self.failed))
        return Join(needed, None if self.join_seconds is None else self.join_seconds * SECOND)


class Wishes:
    """Makes inputs with unique ids. `prefix` separates machines that share a database."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._numbers = prefix, count()

    def id(self, word: str) -> str:
        """A new id that contains `word`."""
        return f"{self._prefix}-{word}-{next(self._numbers):04}"

    def run(self, task_id: TaskId | None = None) -> Run:
        """The first run of a task."""
        return Run(task_id or TaskId(self.id("task")), AGENT, RunId(self.id("run")))

    def requester(self, number: int, now: datetime) -> Requester:
        """A requester that is plain, has a deadline, has an idle timeout, or has no address."""
        address = Address("desk.resp")
        return (
            Requester(address, REQUESTER, "parent"),
            Requester(address, REQUESTER, "parent", deadline=now + 40 * SECOND),
            Requester(address, REQUESTER, None, deadline=now + 3 * HOUR, idle_timeout=30 * SECOND),
            Requester(),
        )[number % 4]

    def begin(self, run: Run, replica: Replica, requester: Requester) -> Begin:
        """A request written before it runs."""
        return Begin(run, replica, requester, b"request")

    def pause(self, run: Run, requester: Requester, shape: Shape) -> Pause:
        """A checkpoint of the given shape."""
        calls = tuple(self._call(number, shape, failed) for number, failed in enumerate(shape.failed))
        state = f"state of {run.id}".encode()
        context: Checkpoint = {"flags": {"run": run.id}}
        return Pause(run, context, state, shape.state_format, calls, shape.join(), requester, b"request")

    def _call(self, number: int, shape: Shape, failed: bool) -> PlannedCall:
        turn = number + shape.times
        return PlannedCall(
            sub_task_id=TaskId(self.id("call")),
            call_id="edcba"[number],
            peer=PEERS[turn % len(PEERS)],
            body=f"call {number}".encode(),
            timeout=TIMEOUTS[turn % len(TIMEOUTS)],
            idle_timeout=IDLE_TIMEOUTS[turn % len(IDLE_TIMEOUTS)],
            headers={"x-call-depth": 1},
            outcome=Failed(FailureKind.INVALID, "too large") if failed else None,
        )

    def claim(self, task_id: TaskId, sub_task_id: TaskId, sender: str | None, number: int) -> Claim:
        """A response; one in four is a failure."""
        claim_id = RunId(self.id("claim"))
        outcome: Outcome = Failed(FailureKind.ERROR, claim_id) if number % 4 == 3 else Ok(claim_id)
        return Claim(claim_id, task_id, sub_task_id, outcome, sender)

    def end(self, run: Run, number: int) -> End:
        """An end as completed, failed, dead or cancelled."""
        state = (TaskState.COMPLETED, TaskState.FAILED, TaskState.FAILED, TaskState.CANCELLED)[number % 4]
        return End(run, state, self.id("reply").encode(), "too many attempts" if number % 4 == 2 else None)

    def cancel(self, task_id: TaskId) -> Cancel:
        """A cancel with a new id."""
        return Cancel(task_id, AGENT, RunId(self.id("cancel")), b"cancelled")
