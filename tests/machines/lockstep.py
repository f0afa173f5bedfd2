"""A store that is compared with a reference store, answer by answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from machines.story import plain
from meshpoint.model.checkpoint import (
    AllArrived,
    Arrival,
    Begin,
    BeginResult,
    CallState,
    CallSummary,
    Cancel,
    CancelledNow,
    CancelResult,
    Claim,
    Due,
    End,
    Ended,
    EndResult,
    Expired,
    KeepAlive,
    KeepReply,
    Known,
    Pause,
    PauseResult,
    Progress,
    ProgressNoted,
    Release,
    Replica,
    Reply,
    Resumable,
    Run,
    Send,
    TaskState,
    TaskSummary,
)
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.ports.task_store import CheckpointStore

T = TypeVar("T")
_TELLING_WAKE = {TaskState.RUNNING, TaskState.READY}


class Lockstep:
    """A store whose every answer must equal the reference's, apart from free choices.

    A store may choose: the ids of runs that the sweeper starts, which of several met tasks get the
    slots, the order of equally due tasks, the wording of a timeout, and `dispatched_at` and
    `wake_at` where nothing relies on them (`dispatched_at` once the call has an outcome).
    """

    def __init__(self, store: CheckpointStore, reference: CheckpointStore) -> None:
        self._store, self._reference = store, reference
        self._theirs: dict[RunId, RunId] = {}

    @property
    def durable(self) -> bool:
        return self._store.durable

    async def open(self) -> None:
        await self._store.open()
        await self._reference.open()

    async def close(self) -> None:
        await self._store.close()
        await self._reference.close()

    async def lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, Known]:
        return _agree(await self._store.lookup(task_ids), await self._reference.lookup(task_ids))

    async def begin(self, begins: Sequence[Begin]) -> list[BeginResult]:
        return _agree(await self._store.begin(begins), await self._reference.begin(begins))

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        return _agree(await self._store.pause(pauses), await self._reference.pause(self._translated(pauses)))

    async def claim(self, claims: Sequence[Claim], replica: Replica, slots: int) -> list[Arrival]:
        """The reference gives its slots to the same tasks as the store."""
        arrivals, theirs = await self._store.claim(claims, replica, slots), list[Arrival]()
        for claim, arrival in zip(claims, arrivals, strict=True):
            theirs += await self._reference.claim([claim], replica, int(isinstance(arrival, AllArrived)))
        return _agree(arrivals, theirs)

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        ours = await self._store.end(ends)
        await self._settle([result.reply for result in ours if isinstance(result, Ended)])
        return _agree(ours, await self._reference.end(self._translated(ends)))

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        return _agree(await self._store.release(releases), await self._reference.release(self._translated(releases)))

    async def cancel(self, cancels: Sequence[Cancel]) -> list[CancelResult]:
        ours = await self._store.cancel(cancels)
        await self._settle([result.reply for result in ours if isinstance(result, CancelledNow)])
        return _agree(ours, await self._reference.cancel(cancels))

    async def progress(self, updates: Sequence[Progress]) -> list[ProgressNoted | None]:
        return _agree(await self._store.progress(updates), await self._reference.progress(updates))

    async def due(self, replica: Replica, limit: int) -> Due:
        """The store may count too much as due to be sent or to expire, but never too little."""
        ours, theirs = await self._store.due(replica, limit), await self._reference.due(replica, limit)
        _agree((ours.ready, ours.lapsed, ours.keep_alives), (theirs.ready, theirs.lapsed, theirs.keep_alives))
        return ours

    async def keep_replies(self, wishes: Sequence[KeepReply]) -> list[bool]:
        return _agree(await self._store.keep_replies(wishes), await self._reference.keep_replies(wishes))

    async def expire(self, replica: Replica, limit: int, slots: int) -> list[Expired]:
        """Give slots for all tasks or for none, because stores may choose differently."""
        ours = await self._store.expire(replica, limit, slots)
        theirs = await self._reference.expire(replica, limit, slots)
        self._pair(
            [each.then.task for each in ours if isinstance(each.then, AllArrived)],
            [each.then.task for each in theirs if isinstance(each.then, AllArrived)],
        )
        return _agree(ours, theirs, any_order=True)

    async def take(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """Allow all suspects or none, because stores may choose differently."""
        ours = await self._store.take(replica, limit, suspects)
        theirs = await self._reference.take(replica, limit, suspects)
        self._pair(ours, theirs)
        return _agree(ours, theirs, any_order=True)

    async def take_over(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """Allow all suspects or none, because stores may choose differently."""
        ours = await self._store.take_over(replica, limit, suspects)
        theirs = await self._reference.take_over(replica, limit, suspects)
        self._pair(ours, theirs)
        return _agree(ours, theirs, any_order=True)

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        lost = await self._store.renew(runs, replica)
        return _agree(lost, await self._reference.renew([self._run(run) for run in runs], replica), any_order=True)

    async def keep_alives(self, replica: Replica, limit: int) -> list[KeepAlive]:
        ours = await self._store.keep_alives(replica, limit)
        return _agree(ours, await self._reference.keep_alives(replica, limit), any_order=True)

    async def purge(self, agent: AgentName, limit: int) -> int:
        return _agree(await self._store.purge(agent, limit), await self._reference.purge(agent, limit))

    async def unsent(self, agent: AgentName, limit: int) -> list[Send]:
        ours = await self._store.unsent(agent, limit)
        return _agree(ours, await self._reference.unsent(agent, limit), any_order=True)

    async def mark_sent(self, sent: Sequence[Send]) -> None:
        await self._store.mark_sent(sent)
        await self._reference.mark_sent(sent)

    async def tasks(
        self, *, agent: AgentName | None = None, states: Sequence[TaskState] = (), limit: int = 100
    ) -> list[TaskSummary]:
        ours = await self._store.tasks(agent=agent, states=states, limit=limit)
        theirs = await self._reference.tasks(agent=agent, states=states, limit=limit)
        return _agree(ours, theirs)

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        return _agree(await self._store.task(task_id), await self._reference.task(task_id))

    async def _settle(self, replies: Sequence[Reply]) -> None:
        """Confirm replies without an address, as the dispatcher does for a store with an outbox."""
        await self._store.mark_sent([reply for reply in replies if reply.requester.reply_to is None])

    # The reference gives other ids to runs that the sweeper starts.

    def _pair(self, ours: Sequence[Resumable], theirs: Sequence[Resumable]) -> None:
        ids = {task.run.task_id: task.run.id for task in theirs}
        self._theirs |= {task.run.id: ids[task.run.task_id] for task in ours if task.run.task_id in ids}

    def _run(self, run: Run) -> Run:
        return replace(run, id=self._theirs.get(run.id, run.id))

    def _translated(self, wishes: Sequence[Any]) -> list[Any]:
        return [replace(wish, run=self._run(wish.run)) for wish in wishes]


def _agree(ours: T, theirs: T, *, any_order: bool = False) -> T:
    left, right = _normal(ours), _normal(theirs)
    if any_order:
        left, right = sorted(left, key=repr), sorted(right, key=repr)
    assert left == right, f"the stores differ:\n{left}\n{right}"
    return ours


def _normal(value: Any) -> Any:
    """`value` without the parts that a store may choose."""
    match value:
        case Run():
            return replace(value, id=RunId(""))
        case Ok():
            return value
        case Failed():
            return plain(value)
        case Resumable(run=run) if run.generation > 0 and value.request is not None:
            return _normal(replace(value, request=None))
        case TaskSummary():
            return replace(value, wake_at=value.wake_at if value.state in _TELLING_WAKE else value.checkpointed_at)
        case CallSummary():
            pending = value.state is CallState.PENDING
            return replace(value, dispatched_at=value.deadline if value.dispatched_at and pending else None)
        case dict():
            return {key: _normal(each) for key, each in value.items()}
        case list() | tuple():
            return [_normal(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {each.name: _normal(getattr(value, each.name)) for each in fields(value)}
    return value
