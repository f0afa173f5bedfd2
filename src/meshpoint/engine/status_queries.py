"""Answer status queries, for tasks in the database and in memory. Nothing is written.

Only the replica that runs a first segment knows a task without a row, so a query for an unknown
task is broadcast, as an attach is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pydantic import JsonValue

from meshpoint.engine.backend import Backend
from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.open_questions import read_open_questions
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.unknown_tasks import UnknownTasks
from meshpoint.model.envelopes import Search, attach_message, attach_status
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address, AttachStatus
from meshpoint.model.questions import AskedQuestion
from meshpoint.model.task_status import MAX_WAITS, OpenWait, TaskStatus, WaitKind
from meshpoint.model.tasks import (
    NO_DEADLINE,
    CallState,
    CallSummary,
    TaskState,
    TaskSummary,
    cancel_applies,
    same_requester,
)
from meshpoint.model.transitions import AttachRefused
from meshpoint.model.waits import SLEEP_PEER, display_name, is_question, is_signal, is_wait

_MAX_PROMPT_LENGTH = 300
_MAX_REASON_LENGTH = 500
"""Maximum characters, so that a status with 100 questions fits into a status update."""


class StatusQuery(NamedTuple):
    """A query for the status of a task. The reply repeats `token`."""

    task_id: TaskId
    sender: str
    reply_to: Address
    token: str


class StatusQueries:
    """Answers queries for the status of one agent's tasks, to their requesters only."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        tasks: LiveTasks,
        publisher: Publisher,
        unknown_tasks: UnknownTasks,
    ) -> None:
        self._runtime, self._tasks, self._publisher = runtime, tasks, publisher
        self._unknown_tasks = unknown_tasks

    async def answer_and_broadcast(
        self, queries: Sequence[StatusQuery], *, is_retry: bool = False
    ) -> dict[StatusQuery, AttachRefused]:
        """Answer from the database, and broadcast the queries for tasks that it does not have.

        Returns the queries for tasks of other requesters.

        Raises:
            StoreUnavailable: As for `ReplicaRuntime.ask_store`.
        """
        refused: dict[StatusQuery, AttachRefused] = {}
        database = self._runtime.database
        is_early = not (is_retry or self._runtime.new_task_backend.is_shared)
        if database is not None and is_early:
            # First, because the tasks may be in memory and the database unavailable.
            await self._broadcast(queries)
        for query in queries:
            result = None if database is None else await self._read(database, query)
            match result:
                case TaskStatus():
                    await self._send(query, AttachStatus.RECORDED, result)
                case AttachRefused():
                    await self._send(query, AttachStatus.REFUSED, requester=result.requester)
                    refused[query] = result
                case None:
                    await self._unknown_tasks.search(
                        query.task_id,
                        query.sender,
                        partial(self._broadcast, [query]),
                        partial(self._send_unknown, query),
                    )
        return refused

    async def answer_in_process(
        self, queries: Sequence[StatusQuery]
    ) -> dict[StatusQuery, AttachRefused]:
        """Answer for tasks in this process. No query is refused: its sender gets a status."""
        for query in queries:
            match await self._read_here(query):
                case TaskStatus() as status:
                    await self._send(query, AttachStatus.RUNNING, status)
                case AttachRefused(requester=requester):
                    await self._send(query, AttachStatus.REFUSED, requester=requester)
                case None:
                    pass  # another replica may know it
        return {}

    async def _read_here(self, query: StatusQuery) -> TaskStatus | AttachRefused | None:
        segment = self._tasks.segments.get(query.task_id)
        if segment is not None:
            if not same_requester(segment.requester.app_id, query.sender):
                return AttachRefused(segment.requester.app_id)
            is_recorded = segment.shared_backend is not None  # the replica that read it replies
            return None if is_recorded else TaskStatus(state="running")
        if query.task_id in self._tasks.unacked.by_task or self._runtime.database is None:
            return await self._read(self._runtime.in_process, query)
        return None

    async def _read(
        self, backend: Backend, query: StatusQuery
    ) -> TaskStatus | AttachRefused | None:
        store, ask = backend.store, partial(self._runtime.ask_store, backend)
        existing = (await ask(lambda: store.lookup([query.task_id]))).get(query.task_id)
        if existing is None or existing.agent != self._runtime.agent:
            return None
        if existing.is_early_cancel:
            is_own = cancel_applies(existing.requester, query.sender)
            return TaskStatus(state="cancelled") if is_own else None
        if not same_requester(existing.requester, query.sender):
            return AttachRefused(existing.requester)
        found = await ask(lambda: store.task(query.task_id))
        if found is None:  # deleted meanwhile
            return None
        task, calls = found
        asked = await read_open_questions(store, task, calls, ask)
        return build_status(task, calls, asked)

    async def _send_unknown(self, query: StatusQuery, known: AttachStatus, certain: bool) -> None:
        await self._send(query, known, certain=certain)

    async def _broadcast(
        self, queries: Sequence[StatusQuery], search: Search | None = None
    ) -> None:
        agent, broker = self._runtime.agent, self._runtime.broker
        for task_id, sender, reply_to, token in queries:
            message = attach_message(
                agent, task_id, reply_to, on_behalf_of=sender, query=token, search=search
            )
            await self._runtime.retry.until_available(partial(broker.broadcast, agent, message))

    async def _send(
        self,
        query: StatusQuery,
        known: AttachStatus,
        status: TaskStatus | None = None,
        *,
        requester: str | None = None,
        certain: bool = False,
    ) -> None:
        """Reply to a query. The reply is advisory: if it gets lost, the caller asks again."""
        data: JsonValue = None
        if status is not None:
            data = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        envelope = attach_status(
            self._runtime.agent,
            query.task_id,
            query.reply_to,
            known,
            requester,
            certain=certain,
            query=query.token,
            data=data,
        )
        await self._publisher.publish_advisory([envelope])


def build_status(
    task: TaskSummary, calls: Sequence[CallSummary], asked: Sequence[AskedQuestion]
) -> TaskStatus:
    """The status of a task with these calls and open questions."""
    pending = [
        call
        for call in calls
        if call.generation == task.generation and call.state is CallState.PENDING
    ]
    by_id = {each.key.sub_task_id: each for each in asked}
    pending.sort(key=lambda call: not is_question(call.peer))
    reason = task.parked_reason if task.state is TaskState.PARKED else None
    return TaskStatus(
        state=task.state.value,
        is_suspended=task.suspended_at is not None,
        reason=None if reason is None else reason[:_MAX_REASON_LENGTH],
        waits=tuple([_build_wait(call, by_id) for call in pending[:MAX_WAITS]]),
        wait_count=len(pending),
    )


def _build_wait(call: CallSummary, asked: Mapping[TaskId, AskedQuestion]) -> OpenWait:
    question = asked.get(call.sub_task_id)
    prompt = None if question is None else question.prompt
    return OpenWait(
        kind=_kind_of(call.peer),
        name=display_name(call.peer),
        since=call.since,
        until=call.deadline if call.deadline < NO_DEADLINE else None,
        question_id=None if question is None else question.key.to_id(),
        prompt=None if prompt is None else prompt[:_MAX_PROMPT_LENGTH],
    )


def _kind_of(peer: str) -> WaitKind:
    if is_question(peer):
        return "question"
    if is_signal(peer):
        return "signal"
    if peer == SLEEP_PEER:
        return "sleep"
    return "other" if is_wait(peer) else "peer"
