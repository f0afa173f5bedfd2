"""One task, as its caller sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from meshpoint.agents.peer import Peer
from meshpoint.client.open_task import OpenTask
from meshpoint.client.transport import Transport
from meshpoint.client.updates import ArtifactUpdate, Ended, Update
from meshpoint.errors import TaskCancelled, TaskFailed, TaskTimeout
from meshpoint.model.outcomes import Failed, FailureKind, Ok

T_co = TypeVar("T_co", covariant=True)


class TaskHandle(Generic[T_co]):
    """A task that `Mesh.send` started.

    Any number of asyncio tasks may wait for it, on this handle or on others for the same id: each
    gets the outcome. To stop waiting without ending the task, use `asyncio.timeout`.
    """

    def __init__(self, task: OpenTask, peer: Peer[Any, T_co], transport: Transport) -> None:
        self._task, self._peer, self._transport = task, peer, transport
        self._outcome: Ok[T_co] | Failed | None = None

    def __repr__(self) -> str:
        return f"TaskHandle({self.agent!r}, {self.id!r})"

    @property
    def id(self) -> str:
        """The task's id."""
        return self._task.id

    @property
    def agent(self) -> str:
        """The agent's name."""
        return self._task.agent

    async def result(self) -> T_co:
        """Wait for the task to end, and return its result.

        Raises:
            TaskTimeout: It did not end before its deadline, or no answer arrived within a few
                seconds after it.
            TaskCancelled: It was cancelled.
            TaskFailed: It failed. `kind` is "invalid" if the result does not fit the declared
                output, if the agent could not read the request, or if the id is in use for
                another input.
            MeshClosed: The connection was closed before. The task is not affected.
        """
        outcome = await self.outcome()
        if isinstance(outcome, Failed):
            raise _error_class(outcome)(self.agent, self.id, outcome)
        return outcome.value

    async def outcome(self) -> Ok[T_co] | Failed:
        """Wait for the task to end, and return its outcome; a failure is a value.

        Raises:
            MeshClosed: The connection was closed before.
        """
        await self._task.wait_outcome()
        return self._read_outcome()

    def updates(self) -> AsyncIterator[Update]:
        """Iterate over the task's status updates and artifacts. The last item is `Ended`.

        It begins with the latest updates that have arrived already. Status updates are advisory:
        some may be missing, or repeated after an outage, and a slow reader misses the oldest
        beyond 100. Artifacts arrive with the outcome. An iterator that is dropped leaves nothing
        behind.

        Raises:
            MeshClosed: The connection was closed before the task ended.
        """
        return _Updates(self._task, self._read_outcome)

    async def cancel(self, *, reason: str = "") -> None:
        """Ask the agent to end the task, and its peers' tasks, as cancelled.

        Returns when the broker has the request; `outcome` says how the task ended. The outcome's
        message repeats the first 500 characters of `reason`. Without effect on an ended task.

        Raises:
            UnknownAgent: No replica has ever served the agent in this namespace.
            BrokerUnavailable: The broker did not confirm it. Repeating it is safe.
        """
        if not self._task.is_answered:
            await self._transport.cancel(self.agent, self._task.id, reason)

    def _read_outcome(self) -> Ok[T_co] | Failed:
        if self._outcome is None:
            outcome = self._task.outcome
            if outcome is None:
                raise RuntimeError("the task has not ended")
            self._outcome = self._peer.read(outcome)
        return self._outcome


def _error_class(failed: Failed) -> type[TaskFailed]:
    match failed.kind:
        case FailureKind.TIMEOUT:
            return TaskTimeout
        case FailureKind.CANCELLED:
            return TaskCancelled
        case _:
            return TaskFailed


class _Updates(AsyncIterator[Update]):
    """The updates of one task, from a position of its own.

    A class and not a generator: a generator that is dropped is closed by the event loop later.
    """

    def __init__(self, task: OpenTask, read_outcome: Callable[[], Ok[Any] | Failed]) -> None:
        self._task, self._read_outcome = task, read_outcome
        self._position = 0
        self._final_updates: Iterator[ArtifactUpdate | Ended] | None = None
        task.add_reader(self)

    async def __anext__(self) -> Update:
        while self._final_updates is None:
            if (found := self._task.find_update(self._position)) is not None:
                update, self._position = found
                return update
            if self._task.outcome is None:
                await self._task.wait_news()
            else:
                self._final_updates = _final_updates(self._read_outcome())
        if (final := next(self._final_updates, None)) is None:
            raise StopAsyncIteration
        return final


def _final_updates(outcome: Ok[Any] | Failed) -> Iterator[ArtifactUpdate | Ended]:
    now = datetime.now(UTC)
    if isinstance(outcome, Ok):
        for artifact in outcome.artifacts:
            yield ArtifactUpdate(at=now, artifact=artifact)
    yield Ended(at=now, outcome=outcome)
