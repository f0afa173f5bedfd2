"""What this process knows of one task that it started or attached to."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakSet

from meshpoint.client.attachment import Attachment
from meshpoint.client.read_update import read_update
from meshpoint.client.updates import LiveUpdate, QuestionUpdate
from meshpoint.errors import MeshClosed, MeshpointError, PoisonMessage, TaskNotFound
from meshpoint.model.bodies import StatusBody, parse_body
from meshpoint.model.envelopes import MAX_STATUS_BYTES
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import AttachStatus, Message
from meshpoint.model.outcomes import Failed, FailureKind, Outcome
from meshpoint.model.status_metadata import StatusMetadata, StatusNumber

log = logging.getLogger("meshpoint.client")

ANSWER_GRACE = 5.0
"""Seconds after a task's deadline within which its agent's answer arrives."""
_MAX_BUFFERED = 100
"""Maximum status updates kept for the iterators of one task. The oldest are dropped."""
_MAX_BUFFERED_BYTES = 1024 * 1024
"""Maximum bytes of their messages in all. Small messages can take ten times as much in memory."""
_UPDATES_PER_SECOND, _MAX_BURST = 100, 2_000
"""Maximum status updates of one task that are read. An agent sends at most 20 a second of its own
and forwards as many of its peers. The burst leaves room for a caller that was busy or offline.
"""
_FLOOD_SECONDS = 10.0
"""Seconds after a dropped update until the latest status and the open questions are asked for."""
_MAX_WITHOUT_READER = 8
"""Maximum status updates kept while no iterator exists: the first items of the next one."""
_DISPLACED_SECONDS = 60.0
"""Seconds for which a connection takes no place after losing its own.

If more connections follow a task than it has places, they take turns.
"""
_MAX_FINGERPRINTS = 16
"""Maximum requests of one task that a refusal can name."""
_MAX_ORIGINS = 1000
"""Maximum tasks whose last number is kept: the task itself and its peers'."""


class OpenTask:
    """A task that this process waits for: its latest updates, and its outcome once known.

    The transport refers to it weakly: a task without a handle and without a wait leaves nothing
    behind.

    Attributes:
        agent: Name of the agent.
        id: Id of the task.
        digest: Digest of its input, or `None` if no other input can have this id.
        outcome: Its outcome, with the value as JSON, or `None` while it is open.
        is_answered: Whether the outcome is final: it did not result from a missing answer.
        attachment: Decides when to ask the agent for the outcome.
        kept_bytes: Size of the messages with its updates and its outcome.
        detach_count: How often other connections took the place of this one.
    """

    def __init__(self, agent: str, task_id: TaskId, awaited: set[object]) -> None:
        """Create a task. `awaited` holds references to it while someone waits."""
        self.agent, self.id = agent, task_id
        self.attachment = Attachment(agent, task_id)
        self.digest: str | None = None
        self.outcome: Outcome | None = None
        self.is_answered = False
        self.kept_bytes = self.detach_count = 0
        self._displaced_until = 0.0  # of the event loop's clock
        self._outcome_bytes = self._update_bytes = 0
        self._has_warned = False
        self._update_budget, self._budget_at = float(_MAX_BURST), 0.0  # of the loop's clock
        self._earlier: tuple[Outcome, int] | None = None  # with the size of its message
        self._awaited = awaited
        self._fingerprints: deque[str] = deque(maxlen=_MAX_FINGERPRINTS)
        self._expires_at = 0.0  # of the event loop's clock; 0 if no request was sent
        self._order = _UpdateOrder()
        self._updates: deque[tuple[LiveUpdate, int]] = deque()  # with the size of the message
        self._dropped = 0  # number of updates before the first one in `_updates`
        self._readers: WeakSet[object] = WeakSet()
        self._was_followed = False
        self._questions: dict[str, bool] = {}  # ids shown; whether by a snapshot
        self._is_closed = False
        self._news = asyncio.Event()
        self._updated = asyncio.Event()

    def add_request(self, fingerprint: str, timeout: float | None) -> None:
        """Record that a request for the task is sent, with a timeout in seconds."""
        self._fingerprints.append(fingerprint)
        now = asyncio.get_running_loop().time()
        expires_at = math.inf if timeout is None else now + timeout + ANSWER_GRACE
        self._expires_at = max(self._expires_at, expires_at)
        self.attachment.expect_reply(now)

    @property
    def is_requested(self) -> bool:
        """Whether this connection has sent a request for it."""
        return bool(self._fingerprints)

    @property
    def is_followed(self) -> bool:
        """Whether someone may be waiting for its next update."""
        return bool(self._readers)

    def expect_at_least(self, earlier: OpenTask) -> None:
        """End with the outcome of `earlier` if no replica knows the task."""
        self._forget_earlier()
        if earlier.outcome is not None:
            self._earlier = earlier.outcome, earlier._outcome_bytes
            self.kept_bytes += earlier._outcome_bytes

    def _forget_earlier(self) -> None:
        if self._earlier is not None:
            self.kept_bytes -= self._earlier[1]
            self._earlier = None

    def detach(self) -> None:
        """Record that other connections took the place of this one, and end its streams.

        Waits for the outcome query the task's status from now on.
        """
        now = asyncio.get_running_loop().time()
        self.detach_count += 1
        self._displaced_until = now + _DISPLACED_SECONDS
        self.attachment.displace(now)
        self._notify()

    def refuse(self, create_error: Callable[[], MeshpointError]) -> None:
        """Let every wait raise an error, unless the outcome is known."""
        self.attachment.fail(create_error)
        self._notify()

    def record_attach_status(self, status: AttachStatus, *, certain: bool = False) -> None:
        """Record what a replica knows about the task, and whether `UNKNOWN` is certain."""
        now = asyncio.get_running_loop().time()
        self.attachment.record_status(status, now, certain=certain)
        self._notify()

    def record_end(self) -> None:
        """Record that a replica has the outcome: ask for it."""
        self.attachment.record_end()
        self._notify()

    def ask_again(self, delay: float = 0.0) -> None:
        """Ask for the outcome after `delay` seconds if someone waits, else at a later wait."""
        self.attachment.start(asyncio.get_running_loop().time() + delay)
        self._notify()

    def is_refused_by(self, fingerprint: str) -> bool:
        """Whether a refusal of the request with this fingerprint refuses this task."""
        return not self._fingerprints or fingerprint in self._fingerprints

    def end(self, outcome: Outcome, *, answered: bool = True, size: int = 0) -> None:
        """Record the outcome, received in a message of `size` bytes. Only the first one counts."""
        if self.outcome is None:
            self._forget_earlier()
            self.outcome, self.is_answered = outcome, answered
            self._outcome_bytes = size
            self.kept_bytes += size
            self._notify()

    def close(self) -> None:
        """End all waits with `MeshClosed`, unless the outcome is known."""
        self._is_closed = True
        self._notify()

    def add_status(self, message: Message) -> None:
        """Record the update in a status message for all iterators.

        Updates that are unreadable, too large, too many, repeated or outdated are dropped: they
        are advisory.
        """
        if not self._may_read_update():
            return
        if len(message.body) > MAX_STATUS_BYTES:
            self._warn_too_large(len(message.body))
            return
        try:
            body = parse_body(StatusBody, message.body)
        except PoisonMessage:
            return
        metadata = StatusMetadata.from_json(body.status_update.metadata)
        if (reset := self._order.accept(metadata)) is None:
            return
        update = read_update(message, body, metadata, reset=reset)
        if update is None or (
            isinstance(update, QuestionUpdate)
            and self._is_shown(update.question_id, is_snapshot=metadata.number is None)
        ):
            return
        self._add_update(update, len(message.body))

    def _may_read_update(self) -> bool:
        """Whether the rate of updates is below its limit. A flood is not parsed."""
        now = asyncio.get_running_loop().time()
        refill = (now - self._budget_at) * _UPDATES_PER_SECOND
        self._update_budget = min(_MAX_BURST, self._update_budget + refill)
        self._budget_at = now
        if self._update_budget < 1:
            if self._readers and self.attachment.hasten(now + _FLOOD_SECONDS):
                self._notify()
            return False
        self._update_budget -= 1
        return True

    def _warn_too_large(self, size: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "task %s of %s: an update of %d bytes was dropped; the limit is %d",
                self.id,
                self.agent,
                size,
                MAX_STATUS_BYTES,
            )

    def _is_shown(self, question_id: str, *, is_snapshot: bool) -> bool:
        """Whether a question was shown by the pause that asks it, or by a snapshot of it.

        A question that is asked again has a new number, and is shown again.
        """
        shown_by_snapshot = self._questions.pop(question_id, None)
        self._questions[question_id] = is_snapshot and shown_by_snapshot is not False
        if len(self._questions) > _MAX_BUFFERED:
            del self._questions[next(iter(self._questions))]
        return shown_by_snapshot is not None and (is_snapshot or shown_by_snapshot)

    def _add_update(self, update: LiveUpdate, size: int) -> None:
        self._updates.append((update, size))
        self.kept_bytes += size
        self._update_bytes += size
        is_followed = self._readers or self._was_followed
        max_count = _MAX_BUFFERED if is_followed else _MAX_WITHOUT_READER
        while len(self._updates) > max_count or self._update_bytes > _MAX_BUFFERED_BYTES:
            _, size = self._updates.popleft()
            self.kept_bytes -= size
            self._update_bytes -= size
            self._dropped += 1
        self._notify_readers()

    def add_reader(self, reader: object) -> bool:
        """Keep more updates from now on, and ask for the latest status at the next wait.

        Returns `False` if other connections have just taken the place of this one: the reader
        gets no further update.
        """
        self._readers.add(reader)
        self._was_followed = True
        if self.outcome is not None:
            return True
        if self.detach_count:
            if asyncio.get_running_loop().time() < self._displaced_until:
                return False
            self.attachment.take_place()
        elif not self.is_requested:
            self.attachment.start()
        return True

    def position_after(self, update_id: str) -> int | None:
        """The position after the update with this id, or `None` if the update is not kept."""
        for index, (update, _) in enumerate(self._updates):
            if update.id == update_id:
                return self._dropped + index + 1
        return None

    def find_update(self, position: int) -> tuple[LiveUpdate, int] | None:
        """Return the first kept update from `position` on, and the position after it."""
        position = max(position, self._dropped)
        index = position - self._dropped
        return (self._updates[index][0], position + 1) if index < len(self._updates) else None

    async def wait_outcome(self) -> Outcome:
        """Wait until the task has ended.

        Raises:
            TaskNotFound, OtherRequester, UnknownAgent: As for `TaskHandle.result`.
            MeshClosed: The connection was closed before.
        """
        self.attachment.restart_if_failed()
        while self.outcome is None:
            await self.wait_news(with_updates=False)
        return self.outcome

    def wait_news(self, *, with_updates: bool = True) -> Coroutine[Any, Any, None]:
        """Wait until the task has ended or, `with_updates`, another update may have arrived.

        This counts from the call, so updates that arrive before the coroutine runs are not missed.
        Some seconds after its deadline, a task without an answer ends as `Failed(TIMEOUT)`. When
        it is time to ask the agent for the outcome, the first wait does so.

        Raises:
            TaskNotFound, OtherRequester, UnknownAgent: As for `TaskHandle.result`.
            MeshClosed: The connection was closed before.
        """
        return self._wait_until_set(self._updated if with_updates else self._news)

    async def _wait_until_set(self, news: asyncio.Event) -> None:
        if self._is_closed:
            raise MeshClosed(
                f"the connection was closed before task {self.id!r} of {self.agent!r} ended"
            )
        # The event loop has only weak references to asyncio tasks, the transport to this one.
        reference = (self, object())
        self._awaited.add(reference)
        now = asyncio.get_running_loop().time
        try:
            if self.attachment.due_at <= now():
                await self.attachment.ask(now(), wants_snapshot=self.is_followed)
            self._raise_error()
            if self.outcome is not None:
                return
            limit = min(self._expires_at or math.inf, self.attachment.due_at)
            async with asyncio.timeout_at(limit if limit < math.inf else None):
                await news.wait()
            if self.outcome is None:
                self._raise_error()
        except TimeoutError:
            if not 0 < self._expires_at <= now():
                return  # it is time to ask, or the request was repeated with a later deadline
            message = f"{self.agent!r} has not answered by the task's deadline"
            self.end(Failed(FailureKind.TIMEOUT, message), answered=False)
        finally:
            self._awaited.discard(reference)

    def _raise_error(self) -> None:
        """Raise the error of the attachment, or end with the outcome of an earlier attempt."""
        try:
            self.attachment.raise_error()
        except TaskNotFound:
            if self._earlier is None:
                raise
            outcome, size = self._earlier
            self.end(outcome, size=size)

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        self._notify_readers()

    def _notify_readers(self) -> None:
        self._updated.set()
        self._updated = asyncio.Event()


def task_with_other_input(agent: str, task_id: TaskId) -> OpenTask:
    """An ended task: its id was used for another input, so nothing was sent."""
    task = OpenTask(agent, task_id, set())
    message = f"task {task_id!r} exists with another input"
    task.end(Failed(FailureKind.INVALID, message))
    return task


class _UpdateOrder:
    """Keeps the updates of one task in order: drops duplicates and late ones of outdated runs.

    Knows the number of the latest update of the task, and of each peer's task below it.
    """

    def __init__(self) -> None:
        self._latest: OrderedDict[str, StatusNumber] = OrderedDict()

    def accept(self, metadata: StatusMetadata) -> bool | None:
        """Whether an update begins a run that repeats an earlier one; `None` if it is outdated.

        An update without a number is never outdated.
        """
        if (number := metadata.number) is None:
            return False
        origin = metadata.origin
        latest = self._latest.get(origin)
        repeats = False
        if latest is not None and number.run == latest.run:
            if number.position <= latest.position:
                return None
        elif latest is not None:
            if not number.is_of_later_run(latest):
                return None
            repeats = number.generation <= latest.generation
        self._latest[origin] = number
        self._latest.move_to_end(origin)
        if len(self._latest) > _MAX_ORIGINS:
            self._latest.popitem(last=False)
        return repeats
