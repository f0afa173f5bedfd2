"""The in-memory state of one live segment while its agent code runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NoReturn, cast

from pydantic import JsonValue

from meshpoint.engine.containment import from_outside
from meshpoint.engine.senders import ITSELF, Sender
from meshpoint.engine.unacked import may_run_elsewhere
from meshpoint.model.checkpoint import BeginResult, Requester, Run
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.error_text import described
from meshpoint.model.json_values import digest_of
from meshpoint.model.messages import Message
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.ports.backend import Home
from meshpoint.ports.broker import Delivery
from meshpoint.subtasks.runner import ClosedSubtasks, Subtasks
from meshpoint.working_memory.task_memory import MemoryRef, TaskMemory

log = logging.getLogger("meshpoint.run")

NOT_KEPT = object()
"""Placeholder for the input of a task with a row, which stores the digest."""


class Stop(Enum):
    """Why running code was stopped from outside."""

    CANCELLED = auto()  # the task was cancelled
    DRAINING = auto()  # the replica ends, and another one resumes the task
    LOST = auto()  # another replica owns the task


@dataclass(frozen=True, slots=True)
class Last:
    """The last checkpoint of an operation in this segment, with its memory reference.

    The operation is waiting, or did not complete.
    """

    checkpoint: AgentCheckpoint
    mark: MemoryRef

    @classmethod
    def of(cls, checkpoint: AgentCheckpoint, mark: MemoryRef) -> Last:
        """Combine `checkpoint` with the memory reference `mark`."""
        return cls(mark.apply_to(checkpoint), mark)


@dataclass(eq=False, slots=True)
class Segment:
    """A task between its trigger and its next pause or end.

    Attributes:
        home: Where the task is stored, or `None` until the first checkpoint chooses a home.
        request: The request, kept for the row that the first pause writes.
        input_: The input of the request.
        sender: The sender of the request.
        deliveries: The unacked requests of the task, more than one if a request was sent again.
        beginning: Writes the task's row while its first subtask waits.
        subtasks: Runs and records the subtasks of this segment.
        memory: The working memory.
        failure: Details of how an operation's code failed.
        last: The final checkpoint that a failed operation leaves.
        settling: Set when the code has ended.
        decided: Set when it is known whether the task runs here.
        left: Set when the replica has forgotten the segment.
        attempt: The attempt number of an isolated segment.
        dead_reason: Set when the task ends because its runs keep killing their process.
    """

    run: Run
    requester: Requester
    context: TaskExecutionContext | None = None
    home: Home | None = None
    request: Message | None = None
    input_: object = NOT_KEPT
    sender: Sender = ITSELF
    known_digest: str | None = None
    deliveries: list[Delivery] = field(default_factory=list)
    code: asyncio.Task[object] | None = None
    beginning: asyncio.Task[BeginResult] | None = None
    subtasks: Subtasks | None = None
    memory: TaskMemory | None = None
    failure: dict[str, JsonValue] | None = None
    last: Last | None = None
    settling: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: Stop | None = None
    attempt: int = 1
    dead_reason: str | None = None

    @property
    def digest(self) -> str | None:
        """Digest of the requested input, `None` if unknown."""
        if self.known_digest is None and self.input_ is not NOT_KEPT:
            self.known_digest = digest_of(cast(JsonValue, self.input_))
        return self.known_digest

    @property
    def may_run_elsewhere(self) -> bool:
        """Whether its request was redelivered or requeued, so another replica may run it too."""
        return may_run_elsewhere(self.deliveries)

    def stop(self, why: Stop) -> None:
        """Cancel the code at its next await.

        The first reason counts, but a lost lease overrides it.

        Errors are logged, not raised: they come from objects that the agent's code awaits, and
        other segments must be stopped too.
        """
        self._note_stop(why)
        self.cancel_code()
        self._tell_code()

    def stop_here(self, why: Stop) -> NoReturn:
        """Cancel the code from inside. Any of its asyncio tasks may call this."""
        self._note_stop(why)
        if self.code is not asyncio.current_task():
            self.cancel_code()
        self._tell_code()
        raise asyncio.CancelledError(why.name.lower())

    def cancel_code(self) -> None:
        """Cancel the code if it runs. Errors from the future it awaits are logged."""
        if self.code is not None:
            self._attempt(self.code.cancel)

    def _note_stop(self, why: Stop) -> None:
        if self.stopped is None or why is Stop.LOST:
            self.stopped = why

    def _tell_code(self) -> None:
        if self.context is not None:
            self._attempt(self.context.cancelled.set)  # fails if a waiter's loop is closed

    def _attempt(self, call: Callable[[], object]) -> None:
        """Call `call`, which agent code may have replaced. Errors are logged."""
        try:
            call()
        except BaseException as error:
            if from_outside(error):
                raise
            log.warning("task %s: its code cannot be stopped: %s", self.run.task_id, described(error))

    def close(self) -> None:
        """Break reference cycles, so that the segment is freed without the garbage collector."""
        if self.context is not None:
            over = None if self.subtasks is None else ClosedSubtasks(self.subtasks.progress)
            # Called on the class: agent code may have replaced the methods of the instance.
            TaskExecutionContext.run_subtasks_with(self.context, over)
            TaskExecutionContext.remember_with(self.context, None)
        self.subtasks = self.memory = None
        if self.beginning is not None:
            self.beginning.cancel()
