"""Attach callers to tasks, wherever the tasks are.

A task in its first segment has no row. Only the replica that runs it knows it, so an attach to a
task without a row is broadcast, as cancels are. That replica keeps the address in memory and
writes it to the task's row at its pause. The caller asks again until a row has its address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, assert_never

from meshpoint.engine.backend import Backend
from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.open_questions import read_open_questions
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.replies import Replies
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import Segment
from meshpoint.engine.unknown_tasks import UnknownTasks
from meshpoint.errors import RowLocked
from meshpoint.model.envelopes import (
    MAX_STATUS_BYTES,
    Search,
    attach_message,
    attach_status,
    status_envelope,
)
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address, AttachStatus
from meshpoint.model.status_metadata import StatusMetadata, UpdateKind
from meshpoint.model.tasks import Reply, Requester, TaskState, same_requester
from meshpoint.model.transitions import (
    Attach,
    Attached,
    AttachEnded,
    AttachRefused,
    AttachResult,
    AttachUnknown,
    TaskLocked,
)


class AttachCommand(NamedTuple):
    """A task, the sender that asks for its outcome, and where to send it.

    With `wants_snapshot`, it also gets the latest status and the open questions.
    """

    task_id: TaskId
    sender: str
    reply_to: Address
    wants_snapshot: bool = False


class Attaches:
    """Attaches callers to the tasks of one agent, and replies with a status."""

    def __init__(
        self, runtime: ReplicaRuntime, tasks: LiveTasks, publisher: Publisher, replies: Replies
    ) -> None:
        self._runtime = runtime
        self._tasks = tasks
        self._publisher = publisher
        self._replies = replies
        self.unknown_tasks = UnknownTasks(runtime, tasks, publisher)

    async def attach_and_broadcast(
        self, commands: Sequence[AttachCommand], *, is_retry: bool = False
    ) -> dict[AttachCommand, AttachRefused | TaskLocked]:
        """Attach in the database, and broadcast the attaches of tasks that may be running.

        Returns the commands for tasks of other requesters or locked by another session.

        Raises:
            StoreUnavailable: As for `ReplicaRuntime.ask_store`.
        """
        refused: dict[AttachCommand, AttachRefused | TaskLocked] = {}
        to_broadcast: list[AttachCommand] = []
        unknown: list[AttachCommand] = []
        database = self._runtime.database
        if database is None:
            unknown = list(commands)
        else:
            if not (is_retry or self._runtime.new_task_backend.is_shared):
                # First, because the tasks may be in memory and the database unavailable.
                await self._broadcast(commands)
            results = await self._attach(database, commands)
            for command, result in zip(commands, results, strict=True):
                match result:
                    case Attached(state=state):
                        await self._report_attached(
                            database, command, result, AttachStatus.RECORDED
                        )
                        if state is TaskState.RUNNING:  # for its status updates
                            to_broadcast.append(command)
                    case AttachEnded(reply=reply):
                        await self._send_reply(reply, command.reply_to)
                    case AttachUnknown():
                        unknown.append(command)
                    case AttachRefused():
                        await self._send_status(command, AttachStatus.REFUSED, result.requester)
                        refused[command] = result
                    case TaskLocked():
                        refused[command] = result
                    case _:
                        assert_never(result)
        await self._broadcast(to_broadcast)
        await self._search(unknown)
        return refused

    async def _search(self, commands: Sequence[AttachCommand]) -> None:
        """Search for tasks without a row, all at the same time."""
        await asyncio.gather(
            *(
                self.unknown_tasks.search(
                    command.task_id,
                    command.sender,
                    partial(self._broadcast, [command]),
                    partial(self._send_unknown, command),
                )
                for command in commands
            )
        )

    async def _send_unknown(
        self, command: AttachCommand, status: AttachStatus, certain: bool
    ) -> None:
        await self._send_status(command, status, certain=certain)

    async def attach_in_process(
        self, commands: Sequence[AttachCommand]
    ) -> dict[AttachCommand, AttachRefused | TaskLocked]:
        """Attach to tasks in this process. No command is refused: its sender gets a status."""
        for command in commands:
            result = await self._attach_here(command)
            match result:
                case Attached():
                    await self._report_attached(
                        self._runtime.in_process, command, result, AttachStatus.RUNNING
                    )
                case AttachEnded(reply=reply):
                    await self._send_reply(reply, command.reply_to)
                case AttachRefused(requester=requester):
                    await self._send_status(command, AttachStatus.REFUSED, requester)
                case _:
                    pass  # another replica may know it
        return {}

    async def settle_unrecorded(
        self, segment: Segment, backend: Backend | None, reply: Reply | None
    ) -> None:
        """Serve the callers that attached while the task had no row.

        If the task has paused, their addresses are written to its row in `backend`. If it has
        ended, its `reply` is sent to them. The requests that brought them are acked later.
        """
        task_id, sender = segment.run.task_id, segment.requester.app_id or ""
        addresses, segment.unrecorded = segment.unrecorded, []
        for address in addresses:
            if reply is not None:
                await self._send_reply(reply, address)
            elif backend is not None:
                await self.attach_sender(backend, AttachCommand(task_id, sender, address))

    async def attach_sender(self, backend: Backend, command: AttachCommand) -> bool:
        """Attach the requester of a task with a row, which never asks again.

        If another database session has locked the task, wait for it. Returns whether the task had
        ended. Then its reply was sent.
        """

        async def attempt() -> AttachResult:
            (result,) = await backend.store.attach([self._build_attach(command)])
            if isinstance(result, TaskLocked):
                raise RowLocked(f"another session holds task {command.task_id}")
            return result

        match result := await self._runtime.retry.until_available(attempt):
            case AttachEnded(reply=reply):
                await self._send_reply(reply, command.reply_to)
            case Attached(dropped=dropped):
                self.report_dropped_later(command.task_id, dropped)
            case _:
                pass
        return isinstance(result, AttachEnded)

    async def _attach_here(self, command: AttachCommand) -> AttachResult:
        task_id = command.task_id
        segment = self._tasks.segments.get(task_id)
        if segment is not None:
            if not same_requester(segment.requester.app_id, command.sender):
                return AttachRefused(segment.requester.app_id)
            if segment.settling:  # soon, its row or its reply says more
                return AttachUnknown()
            is_recorded = segment.shared_backend is not None
            dropped = segment.attach(command.reply_to, recorded=is_recorded)
            if command.wants_snapshot and segment.updates is not None:
                await segment.updates.repeat_latest(command.reply_to)
            # If the task has a row, the replica that read the row has replied.
            return AttachUnknown() if is_recorded else Attached(TaskState.RUNNING, dropped)
        if task_id in self._tasks.unacked.by_task or self._runtime.database is None:
            (result,) = await self._attach(self._runtime.in_process, [command])
            return result
        return AttachUnknown()

    async def _attach(
        self, backend: Backend, commands: Sequence[AttachCommand]
    ) -> list[AttachResult]:
        attaches = [self._build_attach(command) for command in commands]
        return await self._runtime.ask_store(backend, lambda: backend.store.attach(attaches))

    def _build_attach(self, command: AttachCommand) -> Attach:
        return Attach(command.task_id, self._runtime.agent, command.sender, command.reply_to)

    async def _broadcast(
        self, commands: Sequence[AttachCommand], search: Search | None = None
    ) -> None:
        if not commands:
            return
        agent = self._runtime.agent

        async def broadcast_all() -> None:
            messages = [
                attach_message(
                    agent,
                    task_id,
                    reply_to,
                    on_behalf_of=sender,
                    wants_snapshot=wants_snapshot,
                    search=search,
                )
                for task_id, sender, reply_to, wants_snapshot in commands
            ]
            await asyncio.gather(
                *(self._runtime.broker.broadcast(agent, message) for message in messages)
            )

        await self._runtime.retry.until_available(broadcast_all)

    async def _report_attached(
        self, backend: Backend, command: AttachCommand, result: Attached, status: AttachStatus
    ) -> None:
        """Send the status, the snapshot, and a notice to a dropped address. All are advisory."""
        if command.wants_snapshot and result.state is not TaskState.RUNNING:
            await self._show_open_questions(backend, command)
        await self._send_status(command, status)
        await self._report_dropped(command.task_id, result.dropped)

    def report_dropped_later(self, task_id: TaskId, dropped: Address | None) -> None:
        """Notify a dropped address in the background.

        A settlement or a request must not wait for another caller's address.
        """
        if dropped is not None:
            self._runtime.background.spawn(self._report_dropped, task_id, dropped)

    async def _report_dropped(self, task_id: TaskId, dropped: Address | None) -> None:
        """Notify an address that newer ones took its place, so that its streams end."""
        if dropped is not None:
            envelope = attach_status(self._runtime.agent, task_id, dropped, AttachStatus.DETACHED)
            await self._publisher.publish_advisory([envelope])

    async def _show_open_questions(self, backend: Backend, command: AttachCommand) -> None:
        """Show the open questions of a waiting task to a caller that attached later."""
        store, ask = backend.store, partial(self._runtime.ask_store, backend)
        found = await ask(lambda: store.task(command.task_id))
        if found is None:
            return
        envelopes = [
            status_envelope(
                self._runtime.agent,
                command.task_id,
                Requester(command.reply_to),
                question.to_update(),
                StatusMetadata(UpdateKind.QUESTION),
            )
            for question in await read_open_questions(store, *found, ask)
        ]
        await self._publisher.publish_advisory(
            [each for each in envelopes if each and len(each[1].body) <= MAX_STATUS_BYTES]
        )

    async def _send_status(
        self,
        command: AttachCommand,
        status: AttachStatus,
        requester: str | None = None,
        *,
        certain: bool = False,
    ) -> None:
        """Reply to an attach. The reply is advisory: if it gets lost, the caller asks again."""
        envelope = attach_status(
            self._runtime.agent,
            command.task_id,
            command.reply_to,
            status,
            requester,
            certain=certain,
        )
        await self._publisher.publish_advisory([envelope])

    async def _send_reply(self, reply: Reply, address: Address) -> None:
        """Send the reply of an ended task to one more address, once."""
        requester = replace(reply.requester, reply_to=address)
        await self._replies.publish_refusal(replace(reply, requester=requester))
