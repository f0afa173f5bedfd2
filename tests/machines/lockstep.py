"""A store that is compared with a reference store, answer by answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from machines.task_model import without_message
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.mailbox import (
    Mailbox,
    MailResult,
    RecordAnswer,
    SendSignal,
    SetValue,
    TooManyValues,
)
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.questions import AskedQuestion, QuestionKey
from meshpoint.model.tasks import (
    CallState,
    CallSummary,
    Dispatch,
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
    Attach,
    AttachResult,
    Begin,
    BeginResult,
    CallRetried,
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
        self._own_ids: dict[TaskId, TaskId] = {}  # of attempts, by the reference's id
        self._reference_ids: dict[TaskId, TaskId] = {}

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
        return self._assert_equal(
            await self._store.lookup(task_ids), await self._reference.lookup(task_ids)
        )

    async def begin(self, begins: Sequence[Begin]) -> list[BeginResult]:
        return self._assert_equal(
            await self._store.begin(begins), await self._reference.begin(begins)
        )

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        return self._assert_equal(
            await self._store.pause(pauses),
            await self._reference.pause(self._for_reference(pauses)),
        )

    async def append(self, appends: Sequence[Append]) -> list[SaveResult]:
        return self._assert_equal(
            await self._store.append(appends),
            await self._reference.append(self._for_reference(appends)),
        )

    async def claim(
        self, claims: Sequence[Claim], replica: Replica, slots: int
    ) -> list[ClaimResult]:
        """The reference gives its slots to the same tasks as the store."""
        arrivals, reference = await self._store.claim(claims, replica, slots), list[ClaimResult]()
        for claim, arrival in zip(claims, arrivals, strict=True):
            own = replace(claim, sub_task_id=self._reference_id(claim.sub_task_id))
            reference += await self._reference.claim(
                [own], replica, int(isinstance(arrival, JoinCompleted))
            )
        self._pair_attempts(arrivals, reference)
        return self._assert_equal(arrivals, reference)

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        actual = await self._store.end(ends)
        await self._confirm_unaddressed(
            [result.reply for result in actual if isinstance(result, EndCommitted)]
        )
        return self._assert_equal(actual, await self._reference.end(self._for_reference(ends)))

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        return self._assert_equal(
            await self._store.release(releases),
            await self._reference.release(self._for_reference(releases)),
        )

    async def cancel(self, cancels: Sequence[Cancel]) -> list[CancelResult]:
        actual = await self._store.cancel(cancels)
        await self._confirm_unaddressed(
            [result.reply for result in actual if isinstance(result, CancelCommitted)]
        )
        return self._assert_equal(actual, await self._reference.cancel(cancels))

    async def record_progress(self, updates: Sequence[Progress]) -> list[ProgressRecorded | None]:
        return self._assert_equal(
            await self._store.record_progress(updates),
            await self._reference.record_progress(self._with_reference_ids(updates)),
        )

    async def due(self, replica: Replica, limit: int) -> DueCounts:
        """The store may count too much as due to be sent or to expire, but never too little."""
        actual, reference = (
            await self._store.due(replica, limit),
            await self._reference.due(replica, limit),
        )
        self._assert_equal(
            replace(actual, unsent=0, expired=0),
            replace(reference, unsent=0, expired=0),
        )
        return actual

    async def store_replies(self, replies: Sequence[StoreReply]) -> list[bool]:
        return self._assert_equal(
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
        by_task = {each.task_id: each for each in reference}
        for each in actual:
            if each.task_id in by_task:
                self._pair_attempts(each.retried, by_task[each.task_id].retried)
        return self._assert_equal(actual, reference, any_order=True)

    async def acquire(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Allow all suspects or none, because stores may choose differently."""
        actual = await self._store.acquire(replica, limit, suspect_slots)
        reference = await self._reference.acquire(replica, limit, suspect_slots)
        self._pair_run_ids(actual, reference)
        return self._assert_equal(actual, reference, any_order=True)

    async def acquire_parked(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        actual = await self._store.acquire_parked(replica, limit, suspect_slots)
        reference = await self._reference.acquire_parked(replica, limit, suspect_slots)
        self._pair_run_ids(actual, reference)
        return self._assert_equal(actual, reference, any_order=True)

    async def acquire_overdue(self, replica: Replica, limit: int) -> list[Overdue]:
        actual = await self._store.acquire_overdue(replica, limit)
        reference = await self._reference.acquire_overdue(replica, limit)
        self._pair_run_ids([each.task for each in actual], [each.task for each in reference])
        return self._assert_equal(actual, reference, any_order=True)

    async def attach(self, attaches: Sequence[Attach]) -> list[AttachResult]:
        return self._assert_equal(
            await self._store.attach(attaches), await self._reference.attach(attaches)
        )

    async def unpark(self, task_ids: Sequence[TaskId]) -> list[bool]:
        return self._assert_equal(
            await self._store.unpark(task_ids), await self._reference.unpark(task_ids)
        )

    async def suspend(self, task_ids: Sequence[TaskId]) -> list[SuspendResult]:
        return self._assert_equal(
            await self._store.suspend(task_ids), await self._reference.suspend(task_ids)
        )

    async def unsuspend(self, task_ids: Sequence[TaskId]) -> list[bool]:
        return self._assert_equal(
            await self._store.unsuspend(task_ids), await self._reference.unsuspend(task_ids)
        )

    async def rescue(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Allow all suspects or none, because stores may choose differently."""
        actual = await self._store.rescue(replica, limit, suspect_slots)
        reference = await self._reference.rescue(replica, limit, suspect_slots)
        self._pair_run_ids(actual, reference)
        return self._assert_equal(actual, reference, any_order=True)

    async def release_unread(self, replica: Replica, limit: int) -> list[TaskId]:
        return self._assert_equal(
            await self._store.release_unread(replica, limit),
            await self._reference.release_unread(replica, limit),
            any_order=True,
        )

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        lost = await self._store.renew(runs, replica)
        return self._assert_equal(
            lost,
            await self._reference.renew([self._reference_run(run) for run in runs], replica),
            any_order=True,
        )

    async def keep_alives(self, replica: Replica, limit: int) -> list[KeepAlive]:
        actual = await self._store.keep_alives(replica, limit)
        return self._assert_equal(
            actual, await self._reference.keep_alives(replica, limit), any_order=True
        )

    async def purge(self, agent: AgentName, limit: int) -> int:
        return self._assert_equal(
            await self._store.purge(agent, limit), await self._reference.purge(agent, limit)
        )

    async def unsent(self, agent: AgentName, limit: int) -> list[OutboxItem]:
        actual = await self._store.unsent(agent, limit)
        return self._assert_equal(
            actual, await self._reference.unsent(agent, limit), any_order=True
        )

    async def confirm_sent(self, sent: Sequence[OutboxItem]) -> None:
        await self._store.confirm_sent(sent)
        await self._reference.confirm_sent(self._with_reference_ids(sent))

    async def record_unroutable(self, calls: Sequence[UnroutableCall]) -> None:
        await self._store.record_unroutable(calls)
        await self._reference.record_unroutable(self._with_reference_ids(calls))

    async def signal(self, signals: Sequence[SendSignal]) -> list[MailResult]:
        return self._assert_equal(
            await self._store.signal(signals), await self._reference.signal(signals)
        )

    async def answer(self, answers: Sequence[RecordAnswer]) -> list[MailResult]:
        return self._assert_equal(
            await self._store.answer(answers), await self._reference.answer(answers)
        )

    async def set_value(self, command: SetValue) -> SaveResult | TooManyValues:
        (own,) = self._for_reference([command])
        return self._assert_equal(
            await self._store.set_value(command), await self._reference.set_value(own)
        )

    async def find_questions(self, keys: Sequence[QuestionKey]) -> list[AskedQuestion | None]:
        return self._assert_equal(
            await self._store.find_questions(keys), await self._reference.find_questions(keys)
        )

    async def mailbox(self, task_id: TaskId) -> Mailbox:
        return self._assert_equal(
            await self._store.mailbox(task_id), await self._reference.mailbox(task_id)
        )

    async def tasks(
        self, *, agent: AgentName | None = None, states: Sequence[TaskState] = (), limit: int = 100
    ) -> list[TaskSummary]:
        actual = await self._store.tasks(agent=agent, states=states, limit=limit)
        reference = await self._reference.tasks(agent=agent, states=states, limit=limit)
        return self._assert_equal(actual, reference)

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        return self._assert_equal(
            await self._store.task(task_id), await self._reference.task(task_id)
        )

    async def _confirm_unaddressed(self, replies: Sequence[Reply]) -> None:
        """Confirm replies without an address, like the dispatcher of a store with an outbox."""
        await self._store.confirm_sent(
            [reply for reply in replies if reply.requester.reply_to is None]
        )

    # The reference gives other ids to attempts, and to runs that the sweeper starts.

    def _pair_attempts(self, actual: Sequence[object], reference: Sequence[object]) -> None:
        pairs = zip(actual, reference, strict=False)
        for mine, other in pairs:
            if isinstance(mine, CallRetried) and isinstance(other, CallRetried):
                self._own_ids[other.next_id] = mine.next_id
                self._reference_ids[mine.next_id] = other.next_id

    def _reference_id(self, id_: TaskId) -> TaskId:
        return self._reference_ids.get(id_, id_)

    def _with_reference_ids(self, items: Sequence[Any]) -> list[Any]:
        return [
            item
            if isinstance(item, Reply)
            else replace(item, sub_task_id=self._reference_id(item.sub_task_id))
            for item in items
        ]

    def _pair_run_ids(self, actual: Sequence[Resumable], reference: Sequence[Resumable]) -> None:
        ids = {task.run.task_id: task.run.id for task in reference}
        self._reference_run_ids |= {
            task.run.id: ids[task.run.task_id] for task in actual if task.run.task_id in ids
        }

    def _reference_run(self, run: Run) -> Run:
        return replace(run, id=self._reference_run_ids.get(run.id, run.id))

    def _for_reference(self, commands: Sequence[Any]) -> list[Any]:
        return [replace(command, run=self._reference_run(command.run)) for command in commands]

    def _assert_equal(self, actual: T, reference: T, *, any_order: bool = False) -> T:
        actual_normal, reference_normal = _normalize(actual), _normalize(reference, self._own_ids)
        if any_order:
            actual_normal, reference_normal = (
                sorted(actual_normal, key=repr),
                sorted(reference_normal, key=repr),
            )
        assert actual_normal == reference_normal, (
            f"the stores differ:\n{actual_normal}\n{reference_normal}"
        )
        return actual


def _normalize(value: Any, own_ids: Mapping[TaskId, TaskId] | None = None) -> Any:
    """`value` without the parts that a store may choose."""
    match value:
        case Run():
            return replace(value, id=RunId(""))
        case Ok():
            return value
        case Failed():
            return without_message(value)
        case Resumable(run=run) if run.generation > 0 and value.request is not None:
            return _normalize(replace(value, request=None), own_ids)
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
                value,
                sub_task_id=_own_id(value.sub_task_id, own_ids),
                dispatched_at=value.deadline if value.dispatched_at and pending else None,
            )
        case str():
            return _own_id(TaskId(value), own_ids)
        case Dispatch(is_retry=True):
            return _normalize(replace(value, is_retry=False, body=b""), own_ids)
        case dict():
            return {key: _normalize(item, own_ids) for key, item in value.items()}
        case list() | tuple():
            return [_normalize(each, own_ids) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {
            each.name: _normalize(getattr(value, each.name), own_ids) for each in fields(value)
        }
    return value


def _own_id(id_: TaskId, own_ids: Mapping[TaskId, TaskId] | None) -> TaskId:
    return id_ if own_ids is None else own_ids.get(id_, id_)
