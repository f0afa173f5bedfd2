"""Signals to tasks, and their values for callers.

A signal is accepted once a row has it. A task in its first segment has no row, so its signal is
broadcast, as attaches are: the replica that runs the task writes the row first. A task in memory
has its row in the process of its replica.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from pydantic_core import from_json, to_json

from meshpoint.engine.backend import Backend
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import Segment
from meshpoint.engine.segment_runner import SegmentRunner
from meshpoint.engine.senders import belongs_to_another, identify_signaller
from meshpoint.errors import NotJson, PoisonMessage
from meshpoint.model.bodies import CompletedBody, ReadBody, SignalBody, parse_body
from meshpoint.model.envelopes import completion_reply, forwarded_message
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.json_values import check_json
from meshpoint.model.mailbox import (
    MAX_SIGNAL_BYTES,
    MailAccepted,
    MailForbidden,
    MailRefused,
    MailResult,
    MailUnknown,
    SendSignal,
    StoredValue,
)
from meshpoint.model.messages import (
    CompletionStatus,
    Message,
    is_agent_name,
    is_valid_name,
    truncate_reason,
)
from meshpoint.model.tasks import same_requester
from meshpoint.model.transitions import TaskLocked

_NO_ROW = "no replica is running it, and it has no row"


class _Sender(NamedTuple):
    """The sender of a message. `on_behalf_of` is `None` if the sender may use every task."""

    name: str
    on_behalf_of: str | None

    def may_use(self, requester: str | None) -> bool:
        return self.on_behalf_of is None or same_requester(requester, self.on_behalf_of)


def _check_names(**fields: str) -> None:
    for field, name in fields.items():
        if not (name and is_valid_name(name)):
            raise PoisonMessage(f"{field}: must be printable, and 1 to 248 bytes long")


class _NotYours(PoisonMessage):
    """The task belongs to another requester."""

    def __init__(self, task_id: TaskId, requester: str | None) -> None:
        super().__init__(belongs_to_another(task_id))
        self.requester = requester


class Signals:
    """Keeps signals, reads values, and replies to their senders."""

    def __init__(
        self, runtime: ReplicaRuntime, runner: SegmentRunner, publisher: Publisher
    ) -> None:
        self._runtime, self._runner, self._publisher = runtime, runner, publisher
        self._tasks = runner.tasks

    async def signal(
        self, message: Message, *, shared: bool, is_retry: bool = False
    ) -> TaskLocked | None:
        """Keep a signal and reply to its sender. `shared`: it came from the agent's queue.

        Returns `TaskLocked` if another database session has locked the task; try again later.

        Raises:
            PoisonMessage: The signal cannot be read, or its sender may not signal the task. The
                reason was sent to the sender if its name and address are its own.
            StoreUnavailable: As for `ReplicaRuntime.ask_store`. Then call it with `is_retry`.
        """
        sender = self._identify(message, shared=shared)
        try:
            return await self._signal(message, sender, shared=shared, is_retry=is_retry)
        except PoisonMessage as error:
            await self._refuse(message, str(error))
            raise

    async def _signal(
        self, message: Message, sender: _Sender, *, shared: bool, is_retry: bool
    ) -> TaskLocked | None:
        command = self._parse_signal(message, sender)
        if len(command.value) > MAX_SIGNAL_BYTES:
            text = f"the value has {len(command.value)} bytes; {MAX_SIGNAL_BYTES} is the maximum"
            await self._refuse(message, text)
            return None
        if not shared:
            backend = await self._find_here(command.task_id, sender, begins=True)
            if backend is None:
                return None  # another replica may know the task
            result = await self._keep(backend, command)
            return await self._finish(message, command, backend, result)
        if (database := self._runtime.database) is not None:
            if not is_retry:
                await self._forward_early(message, sender)
            result = await self._keep(database, command)
            if not isinstance(result, MailUnknown):
                return await self._finish(message, command, database, result)
        await self._forward_unknown(message, sender)
        return None

    async def announce(self, message: Message) -> None:
        """Forward a signal that must wait here, as `signal` does before it asks the database.

        Raises:
            PoisonMessage: As for `signal`.
        """
        sender = self._identify(message, shared=True)
        if self._runtime.database is not None:
            await self._forward_early(message, sender)

    async def read(self, message: Message, *, shared: bool, is_retry: bool = False) -> None:
        """Reply with a value of a task. `shared` is as for `signal`.

        Raises:
            PoisonMessage: The message cannot be read, or its sender may not read the task. The
                sender gets the reason as for `signal`.
            StoreUnavailable: As for `signal`.
        """
        sender = self._identify(message, shared=shared)
        try:
            await self._read(message, sender, shared=shared, is_retry=is_retry)
        except PoisonMessage as error:
            await self._refuse_for(message, error)
            raise

    async def _read(
        self, message: Message, sender: _Sender, *, shared: bool, is_retry: bool
    ) -> None:
        body = self._parse_read(message)
        task_id, agent = TaskId(body.id), self._runtime.agent
        if shared and self._runtime.database is not None:
            if not is_retry:
                await self._forward_early(message, sender)
            backend: Backend | None = self._runtime.database
        else:
            backend = None if shared else await self._find_here(task_id, sender, begins=False)
        stored = None
        if backend is not None:
            read = partial(backend.store.value, task_id, agent, body.key)
            stored = await self._runtime.ask_store(backend, read)
        elif not shared and (segment := self._tasks.segments.get(task_id)) is not None:
            stored = StoredValue(segment.requester.app_id, None)  # a value makes it have a row
        if stored is None:
            if shared:
                await self._forward_unknown(message, sender)
            return
        if not sender.may_use(stored.requester):
            raise _NotYours(task_id, stored.requester)
        value = {} if stored.value is None else {"value": from_json(stored.value), "isSet": True}
        found = CompletedBody.model_validate(value)
        await self._reply(message, CompletionStatus.RECORDED, found)

    def _parse_signal(self, message: Message, sender: _Sender) -> SendSignal:
        body = parse_body(SignalBody, message.body, self._runtime.options.max_message_bytes)
        if not is_agent_name(body.signal):
            raise PoisonMessage("signal: not a valid signal name")
        _check_names(id=body.id, signalId=body.signal_id)
        try:
            check_json(body.value, "value")
        except NotJson as error:  # nested too deep to store with the task's pauses
            raise PoisonMessage(str(error)) from None
        return SendSignal(
            TaskId(body.id),
            self._runtime.agent,
            body.signal_id,
            body.signal,
            to_json(body.value),
            sender.name,
            is_trusted=sender.on_behalf_of is None,
        )

    def _parse_read(self, message: Message) -> ReadBody:
        body = parse_body(ReadBody, message.body, self._runtime.options.max_message_bytes)
        _check_names(id=body.id, key=body.key)
        return body

    def _identify(self, message: Message, *, shared: bool) -> _Sender:
        runtime = self._runtime
        name = identify_signaller(message, runtime.agent, runtime.options, shared=shared)
        return _Sender(message.app_id if name is None else name, name)

    async def _find_here(
        self, task_id: TaskId, sender: _Sender, *, begins: bool
    ) -> Backend | None:
        """The backend of a task that runs here or is in memory here.

        `begins`: write the row of a task in its first segment. `None` without a row.
        """
        segment = self._tasks.segments.get(task_id)
        if segment is not None:
            if not sender.may_use(segment.requester.app_id):
                raise _NotYours(task_id, segment.requester.app_id)
            return await self._find_row(segment) if begins else segment.backend
        is_here = task_id in self._tasks.unacked.by_task or self._runtime.database is None
        return self._runtime.in_process if is_here else None

    async def _find_row(self, segment: Segment) -> Backend | None:
        return segment.backend or await self._runner.ensure_row(segment)

    async def _keep(self, backend: Backend, command: SendSignal) -> MailResult:
        with self._runtime.steps.step(Step.SIGNAL, [command.task_id]):
            (result,) = await self._runtime.ask_store(
                backend, lambda: backend.store.signal([command])
            )
        return result

    async def _finish(
        self, message: Message, command: SendSignal, backend: Backend, result: MailResult
    ) -> TaskLocked | None:
        match result:
            case TaskLocked():
                return result
            case MailForbidden(requester=requester):
                raise _NotYours(command.task_id, requester)
            case MailRefused(reason=reason):
                await self._refuse(message, reason)
            case MailAccepted():
                self._runner.handle_mail(backend, command.task_id, result)
                await self._reply(message, CompletionStatus.RECORDED, CompletedBody())
            case MailUnknown():
                pass
        return None

    async def _forward_early(self, message: Message, sender: _Sender) -> None:
        """Broadcast before the look-up if tasks are in memory: the database may be unavailable."""
        if not self._runtime.new_task_backend.is_shared:
            await self._forward(message, sender)

    async def _forward_unknown(self, message: Message, sender: _Sender) -> None:
        """Broadcast to the replicas, of which one may run the task without a row."""
        if self._runtime.database is None or self._runtime.new_task_backend.is_shared:
            await self._forward(message, sender)
        await self._reply(message, CompletionStatus.NOT_OPEN, CompletedBody(text=_NO_ROW))

    async def _forward(self, message: Message, sender: _Sender) -> None:
        agent = self._runtime.agent
        copy = forwarded_message(agent, message, sender.on_behalf_of)
        await self._runtime.retry.until_available(
            lambda: self._runtime.broker.broadcast(agent, copy)
        )

    async def _refuse_for(self, message: Message, error: PoisonMessage) -> None:
        requester = error.requester if isinstance(error, _NotYours) else None
        await self._refuse(message, str(error), requester)

    async def _refuse(self, message: Message, reason: str, requester: str | None = None) -> None:
        body = CompletedBody(text=truncate_reason(reason), requester=requester)
        await self._reply(message, CompletionStatus.REFUSED, body)

    async def _reply(
        self, message: Message, status: CompletionStatus, body: CompletedBody
    ) -> None:
        envelope = completion_reply(self._runtime.agent, message, status, body)
        await self._publisher.publish_advisory([envelope])
