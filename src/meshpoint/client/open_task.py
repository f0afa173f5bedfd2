"""What this process knows of one task that it started."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from weakref import WeakSet

from meshpoint.client.updates import StatusUpdate
from meshpoint.errors import MeshClosed
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Outcome

ANSWER_GRACE = 5.0
"""Seconds after a task's deadline within which its agent's answer arrives."""
_MAX_BUFFERED = 100
"""Maximum status updates kept for the iterators of one task. The oldest are dropped."""
_MAX_WITHOUT_READER = 8
"""Maximum status updates kept while no iterator exists: the first items of the next one."""
_MAX_FINGERPRINTS = 16
"""Maximum requests of one task that a refusal can name."""


class OpenTask:
    """A task that this process started: its latest updates, and its outcome once known.

    The transport refers to it weakly: a task without a handle and without a wait leaves nothing
    behind.

    Attributes:
        agent: Name of the agent.
        id: Id of the task.
        digest: Digest of its input, or `None` if no other input can have this id.
        outcome: Its outcome, with the value as JSON, or `None` while it is open.
        is_answered: Whether the outcome is final: it did not result from a missing answer.
    """

    def __init__(self, agent: str, task_id: TaskId, awaited: set[object]) -> None:
        """Create a task. `awaited` holds references to it while someone waits."""
        self.agent, self.id = agent, task_id
        self.digest: str | None = None
        self.outcome: Outcome | None = None
        self.is_answered = False
        self._awaited = awaited
        self._fingerprints: deque[str] = deque(maxlen=_MAX_FINGERPRINTS)
        self._expires_at = 0.0  # of the event loop's clock; 0 if no request was sent
        self._updates: deque[StatusUpdate] = deque()
        self._dropped = 0  # number of updates before the first one in `_updates`
        self._readers: WeakSet[object] = WeakSet()
        self._is_closed = False
        self._news = asyncio.Event()

    def add_request(self, fingerprint: str, timeout: float | None) -> None:
        """Record that a request for the task is sent, with a timeout in seconds."""
        self._fingerprints.append(fingerprint)
        now = asyncio.get_running_loop().time()
        expires_at = math.inf if timeout is None else now + timeout + ANSWER_GRACE
        self._expires_at = max(self._expires_at, expires_at)

    def is_refused_by(self, fingerprint: str) -> bool:
        """Whether a refusal of the request with this fingerprint refuses this task."""
        return not self._fingerprints or fingerprint in self._fingerprints

    def end(self, outcome: Outcome, *, answered: bool = True) -> None:
        """Record the outcome. Only the first one counts."""
        if self.outcome is None:
            self.outcome, self.is_answered = outcome, answered
            self._notify()

    def close(self) -> None:
        """End all waits with `MeshClosed`, unless the outcome is known."""
        self._is_closed = True
        self._notify()

    def add_update(self, update: StatusUpdate) -> None:
        """Record a status update for all iterators."""
        self._updates.append(update)
        limit = _MAX_BUFFERED if self._readers else _MAX_WITHOUT_READER
        while len(self._updates) > limit:
            self._updates.popleft()
            self._dropped += 1
        self._notify()

    def add_reader(self, reader: object) -> None:
        """Keep more updates for as long as `reader` exists."""
        self._readers.add(reader)

    def find_update(self, position: int) -> tuple[StatusUpdate, int] | None:
        """Return the first kept update from `position` on, and the position after it."""
        position = max(position, self._dropped)
        index = position - self._dropped
        return (self._updates[index], position + 1) if index < len(self._updates) else None

    async def wait_outcome(self) -> Outcome:
        """Wait until the task has ended.

        Raises:
            MeshClosed: The connection was closed before.
        """
        while self.outcome is None:
            await self.wait_news()
        return self.outcome

    async def wait_news(self) -> None:
        """Wait until the task has ended or another update has arrived.

        Some seconds after its deadline, a task without an answer ends as `Failed(TIMEOUT)`.

        Raises:
            MeshClosed: The connection was closed before.
        """
        if self._is_closed:
            raise MeshClosed(
                f"the connection was closed before task {self.id!r} of {self.agent!r} ended"
            )
        # The event loop has only weak references to asyncio tasks, the transport to this one.
        reference = (self, object())
        self._awaited.add(reference)
        limit = self._expires_at if 0 < self._expires_at < math.inf else None
        try:
            async with asyncio.timeout_at(limit):
                await self._news.wait()
        except TimeoutError:
            if asyncio.get_running_loop().time() < self._expires_at:
                return  # the request was repeated with a later deadline
            message = f"{self.agent!r} has not answered by the task's deadline"
            self.end(Failed(FailureKind.TIMEOUT, message), answered=False)
        finally:
            self._awaited.discard(reference)

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def task_with_other_input(agent: str, task_id: TaskId) -> OpenTask:
    """An ended task: its id was used for another input, so nothing was sent."""
    task = OpenTask(agent, task_id, set())
    message = f"task {task_id!r} exists with another input"
    task.end(Failed(FailureKind.INVALID, message))
    return task
