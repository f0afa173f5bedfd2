"""A store that is compared with a reference store, answer by answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from machines.task_model import without_message
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.tasks import (
    CallState,
    CallSummary,
    DueCounts,
    KeepAlive,
    OutboxItem,
    Replica,
    Reply,
    Resumable,
    Run,
    TaskState,
    TaskSummary,
)
from meshpoint.model.transitions import (
    Append,
    Begin,
    BeginResult,
    Cancel,
    CancelCommitted,
    CancelResult,
    Claim,
    ClaimResult,
    End,
    EndCommitted,
    EndResult,
    ExistingTask,
    ExpiryResult,
    JoinCompleted,
    Overdue,
    Pause,
    PauseResult,
    Progress,
    ProgressRecorded,
    Release,
    SaveResult,
    StoreReply,
    SuspendResult,
    UnroutableCall,
)
from meshpoint.ports.task_store import CheckpointStore

T = TypeVar("T")
_STATES_WITH_EXACT_WAKE = {TaskState.RUNNING, TaskState.READY, TaskState.PARKED}


class LockstepStore:
    """A store whose every answer must equal the reference's, apart from free choices.

    A store may choose: the ids of runs that the sweeper starts, which of several met tasks get the
    slots, the order of equally due tasks, the wording of a timeout, and `dispatched_at` and
    `wake_at` where nothing relies on them (`dispatched_at` once the call has an outcome).
    """

    def __init__(self, store: CheckpointStore, reference: CheckpointStore) -> None:
        self._store, self._reference = store, reference
        self._reference_run_ids: dict[RunId, RunId] = {}

    @property
    def durable(self) -> bool:
        return self._store.durable

    async def open(self) -> None:
        await self._store.open()
        await self._reference.open()

    async def close(self) -> None:
        await self._store.close()
        await self._reference.close()

    async def lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, ExistingTask]:
        return _assert_equal(
            await self._store.lookup(task_ids), await self._reference.lookup(task_ids)
        )

    async def begin(self, begins: Sequence[Begin]) -> list[BeginResult]:
        return _assert_equal(await self._store.begin(begins), await self._reference.begin(begins))

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        return _assert_equal(
            await self._store.pause(pauses),
            await self._reference.pause(self._for_reference(pauses)),
        )

    async def append(self, appends: Sequence[Append]) -> list[SaveResult]:
        return _assert_equal(
            await self._store.append(appends),
            await self._reference.append(self._for_reference(appends)),
        )

    async def claim(
        self, claims: Sequence[Claim], replica: Replica, slots: int
    ) -> list[ClaimResult]:
        """The reference gives its slots to the same tasks as the store."""
        arrivals, reference = await self._store.claim(claims, replica, slots), list[ClaimResult]()
        for claim, arrival in zip(claims, arrivals, strict=True):
            reference += await self._reference.claim(
                [claim], replica, int(isinstance(arrival, JoinCompleted))
            )
        return _assert_equal(arrivals, reference)

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        actual = await self._store.end(ends)
        await self._confirm_unaddressed(
            [result.reply for result in actual if isinstance(result, EndCommitted)]
        )
        return _assert_equal(actual, await self._reference.end(self._for_reference(ends)))

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        return _assert_equal(
            await self._store.release(releases),
            await self._reference.release(self._for_reference(releases)),
        )

    async def cancel(self, cancels: Sequence[Cancel]) -> list[CancelResult]:
        actual = await self._store.cancel(cancels)
        await self._confirm_unaddressed(
            [result.reply for result in actual if isinstance(result, CancelCommitted)]
        )
        return _assert_equal(actual, await self._reference.cancel(cancels))

    async def record_progress(self, updates: Sequence[Progress]) -> list[ProgressRecorded | None]:
        return _assert_equal(
            await self._store.record_progress(updates),
            await self._reference.record_progress(updates),
        )

    async def due(self, replica: Replica, limit: int) -> DueCounts:
        """The store may count too much as due to be sent or to expire, but never too little."""
        actual, reference = (
            await self._store.due(replica, limit),
            await self._reference.due(replica, limit),
        )
        _assert_equal(
            replace(actual, unsent=0, expired=0),
            replace(reference, unsent=0, expired=0),
        )
        return actual

    async def store_replies(self, replies: Sequence[StoreReply]) -> list[bool]:
        return _assert_equal(
            await self._store.store_replies(replies), await self._reference.store_replies(replies)
        )

    async def expire(self, replica: Replica, limit: int, slots: int) -> list[ExpiryResult]:
        """Give slots for all tasks or for none, because stores may choose differently."""
        actual = await self._store.expire(replica, limit, slots)
        reference = await self._reference.expire(replica, limit, slots)
        self._pair_run_ids(
            [
                each.join_result.task
                for each in actual
                if isinstance(each.join_result, JoinCompleted)
            ],
            [
                each.join_result.task
                for each in reference
                if isinstance(each.join_result, JoinCompleted)
            ],
        )
        return _assert_equal(actual, reference, any_order=True)

    async def acquire(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Allow all suspects or none, because stores may choose differently."""
        actual = await self._store.acquire(replica, limit, suspect_slots)
        reference = await self._reference.acquire(replica, limit, suspect_slots)
        self._pair_run_ids(actual, reference)
        return _assert_equal(actual, reference, any_order=True)

    async def acquire_parked(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        actual = await self._store.acquire_parked(replica, limit, suspect_slots)
        reference = await self._reference.acquire_parked(replica, limit, suspect_slots)
        self._pair_run_ids(actual, reference)
        return _assert_equal(actual, reference, any_order=True)

    async def acquire_overdue(self, replica: Replica, limit: int) -> list[Overdue]:
        actual = await self._store.acquire_overdue(replica, limit)
        reference = await self._reference.acquire_overdue(replica, limit)
        self._pair_run_ids([each.task for each in actual], [each.task for each in reference])
        return _assert_equal(actual, reference, any_order=True)

    async def unpark(self, task_ids: Sequence[TaskId]) -> list[bool]:
        return _assert_equal(
            await self._store.unpark(task_ids), await self._reference.unpark(task_ids)
        )

    async def suspend(self, task_ids: Sequence[TaskId]) -> list[SuspendResult]:
        return _assert_equal(
            await self._store.suspend(task_ids), await self._reference.suspend(task_ids)
        )

    async def unsuspend(self, task_ids: Sequence[TaskId]) -> list[bool]:
        return _assert_equal(
            await self._store.unsuspend(task_ids), await self._reference.unsuspend(task_ids)
        )

    async def rescue(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Allow all suspects or none, because stores may choose differently."""
        actual = await self._store.rescue(replica, limit, suspect_slots)
        reference = await self._reference.rescue(replica, limit, suspect_slots)
        self._pair_run_ids(actual, reference)
        return _assert_equal(actual, reference, any_order=True)

    async def release_unread(self, replica: Replica, limit: int) -> list[TaskId]:
        return _assert_equal(
            await self._store.release_unread(replica, limit),
            await self._reference.release_unread(replica, limit),
            any_order=True,
        )

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        lost = await self._store.renew(runs, replica)
        return _assert_equal(
            lost,
            await self._reference.renew([self._reference_run(run) for run in runs], replica),
            any_order=True,
        )

    async def keep_alives(self, replica: Replica, limit: int) -> list[KeepAlive]:
        actual = await self._store.keep_alives(replica, limit)
        return _assert_equal(
            actual, await self._reference.keep_alives(replica, limit), any_order=True
        )

    async def purge(self, agent: AgentName, limit: int) -> int:
        return _assert_equal(
            await self._store.purge(agent, limit), await self._reference.purge(agent, limit)
        )

    async def unsent(self, agent: AgentName, limit: int) -> list[OutboxItem]:
        actual = await self._store.unsent(agent, limit)
        return _assert_equal(actual, await self._reference.unsent(agent, limit), any_order=True)

    async def confirm_sent(self, sent: Sequence[OutboxItem]) -> None:
        await self._store.confirm_sent(sent)
        await self._reference.confirm_sent(sent)

    async def record_unroutable(self, calls: Sequence[UnroutableCall]) -> None:
        await self._store.record_unroutable(calls)
        await self._reference.record_unroutable(calls)

    async def tasks(
        self, *, agent: AgentName | None = None, states: Sequence[TaskState] = (), limit: int = 100
    ) -> list[TaskSummary]:
        actual = await self._store.tasks(agent=agent, states=states, limit=limit)
        reference = await self._reference.tasks(agent=agent, states=states, limit=limit)
        return _assert_equal(actual, reference)

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        return _assert_equal(await self._store.task(task_id), await self._reference.task(task_id))

    async def _confirm_unaddressed(self, replies: Sequence[Reply]) -> None:
        """Confirm replies without an address, like the dispatcher of a store with an outbox."""
        await self._store.confirm_sent(
            [reply for reply in replies if reply.requester.reply_to is None]
        )

    # The reference gives other ids to runs that the sweeper starts.

    def _pair_run_ids(self, actual: Sequence[Resumable], reference: Sequence[Resumable]) -> None:
        ids = {task.run.task_id: task.run.id for task in reference}
        self._reference_run_ids |= {
            task.run.id: ids[task.run.task_id] for task in actual if task.run.task_id in ids
        }

    def _reference_run(self, run: Run) -> Run:
        return replace(run, id=self._reference_run_ids.get(run.id, run.id))

    def _for_reference(self, commands: Sequence[Any]) -> list[Any]:
        return [replace(command, run=self._reference_run(command.run)) for command in commands]


def _assert_equal(actual: T, reference: T, *, any_order: bool = False) -> T:
    actual_normal, reference_normal = _normalize(actual), _normalize(reference)
    if any_order:
        actual_normal, reference_normal = (
            sorted(actual_normal, key=repr),
            sorted(reference_normal, key=repr),
        )
    assert actual_normal == reference_normal, (
        f"the stores differ:\n{actual_normal}\n{reference_normal}"
    )
    return actual


def _normalize(value: Any) -> Any:
    """`value` without the parts that a store may choose."""
    match value:
        case Run():
            return replace(value, id=RunId(""))
        case Ok():
            return value
        case Failed():
            return without_message(value)
        case Resumable(run=run) if run.generation > 0 and value.request is not None:
            return _normalize(replace(value, request=None))
        case TaskSummary():
            return replace(
                value,
                wake_at=value.wake_at
                if value.state in _STATES_WITH_EXACT_WAKE
                else value.checkpointed_at,
            )
        case CallSummary():
            pending = value.state is CallState.PENDING
            return replace(
                value, dispatched_at=value.deadline if value.dispatched_at and pending else None
            )
        case dict():
            return {key: _normalize(item) for key, item in value.items()}
        case list() | tuple():
            return [_normalize(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {
            each.name: _normalize(getattr(value, each.name)) for each in fields(value)
        }
    return value
