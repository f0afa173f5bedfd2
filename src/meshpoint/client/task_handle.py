"""One task, as its caller sees it."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from pydantic import JsonValue, TypeAdapter
from pydantic_core import to_json

from meshpoint.agents.peer import Peer
from meshpoint.client.open_task import OpenTask
from meshpoint.client.transport import (
    COMPLETION_RETRY_SECONDS,
    COMPLETION_SECONDS,
    Transport,
)
from meshpoint.client.updates import ArtifactUpdate, Ended, LiveUpdate, Update
from meshpoint.errors import (
    AnswerRefused,
    InvalidInput,
    InvalidOption,
    InvalidOutput,
    QuestionNotOpen,
    TaskCancelled,
    TaskFailed,
    TaskTimeout,
    TooManyFollowers,
)
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.model.ids import AgentName, new_id
from meshpoint.model.json_schema import find_mismatch
from meshpoint.model.mailbox import MAX_SIGNAL_BYTES
from meshpoint.model.messages import is_valid_name
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.questions import Question, QuestionKey
from meshpoint.model.signals import Signal
from meshpoint.model.task_status import ENDED_STATES, TaskStatus

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class TaskHandle(Generic[T_co]):
    """A task that `Mesh.send` started, or that `Mesh.task` attached to.

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
            TaskNotFound: The task exists nowhere: it was never sent, or its result is no longer
                kept. Raised after a few seconds, or once each replica has said so.
            OutcomeUnknown: This connection has sent the task, which exists nowhere any more. Its
                reply was lost.
            OtherRequester: It was sent under another name.
            UnknownAgent: No replica has ever served the agent in this namespace.
            MeshClosed: The connection was closed before. The task is not affected.
        """
        outcome = await self.outcome()
        if isinstance(outcome, Failed):
            raise _error_class(outcome)(self.agent, self.id, outcome)
        return outcome.value

    async def outcome(self) -> Ok[T_co] | Failed:
        """Wait for the task to end, and return its outcome; a failure is a value.

        Raises:
            MeshpointError: As for `result`, apart from `TaskFailed`.
        """
        await self._task.wait_outcome()
        return self._read_outcome()

    def updates(self, *, after: str | None = None) -> AsyncIterator[Update]:
        """Iterate over the task's status, text, artifacts and questions. The last item is `Ended`.

        It begins with the latest updates that have arrived already. For a task that was sent
        elsewhere, these are its latest status while its code runs, or its open questions while it
        waits. All except the end are advisory: some may be missing, but none is repeated. If the
        agent's code runs again after a crash, the next update has `reset`. A slow reader sees only
        the latest 100, at most 1 MiB. Artifacts arrive with the outcome at the latest.

        An iterator may be dropped at any time. The connection keeps the last 1,000 tasks whose
        iterators were dropped before the end, up to 16 MiB in all, so that another can continue.

        Args:
            after: The `id` of an update that another iterator of this task has returned: this
                iterator continues after it. If that update is no longer kept here, the first
                update has `reset`.

        Raises:
            TooManyFollowers: Four newer connections follow the task. Another iterator raises it
                too until a minute later, and then takes the place of the oldest of them.
            MeshpointError: As for `outcome`.
        """
        self._task.attachment.restart_if_failed()
        self._transport.keep_followed(self._task)
        forget = partial(self._transport.forget_followed, self._task)
        return _Updates(self._task, self._read_outcome, after, forget)

    async def status(self) -> TaskStatus:
        """Return what the task is doing: its state, its open waits, and whether it is served.

        Takes up to five seconds if no replica of the agent is running. Has no effect on the task.

        Raises:
            TaskNotFound: The task exists nowhere. Raised after a few seconds.
            OtherRequester: It was sent under another name.
            UnknownAgent: No replica has ever served the agent in this namespace.
            BrokerUnavailable: The broker did not confirm the query.
            MeshClosed: The connection was closed.
        """
        outcome = self._task.outcome
        if outcome is not None and self._task.is_answered:
            return TaskStatus(state=_final_state(outcome))
        name, is_requested = AgentName(self.agent), self._task.is_requested
        return await self._transport.query_status(name, self._task.id, requested=is_requested)

    async def complete(
        self, question: Question[T], value: T, /, *, question_id: str | None = None
    ) -> None:
        """Answer a question of the task, by id or as the only open question of its name.

        Retries for ten seconds while no such question is open.

        Raises:
            QuestionNotOpen: No such question is open, or several are: the message lists their ids.
            AnswerRefused: It was answered before, or the value does not fit.
            MeshpointError: As for `status` and `Mesh.complete`.
        """
        if not isinstance(question, Question):
            raise InvalidOption(f"complete needs a Question, not {type(question).__name__}")
        try:
            answer = question.write(value)
        except TypeMismatch as error:
            raise AnswerRefused(_describe_mismatch(question, value, error)) from error
        if question_id is None:
            question_id = await self._find_question(question.name)
        elif not self._has_question(question_id, question.name):
            problem = f"{question_id!r} is not the id of a {question.name!r} question"
            raise QuestionNotOpen(f"{problem} of task {self.id!r}")
        await self._transport.complete(question_id, answer)

    async def _find_question(self, name: str) -> str:
        """The id of the only open question with this name."""
        now = asyncio.get_running_loop().time
        until = now() + COMPLETION_SECONDS
        while True:
            status = await self.status()
            ids = [
                wait.question_id
                for wait in status.waits
                if wait.question_id is not None and wait.name == name
            ]
            if len(ids) == 1:
                return ids[0]
            if ids:
                listed = ", ".join(ids)
                raise QuestionNotOpen(
                    f"task {self.id!r} asks {name!r} more than once: give question_id, one of "
                    f"{listed}"
                )
            if not status.is_served:
                raise QuestionNotOpen(f"no replica of {self.agent!r} has replied")
            has_ended = status.state in ENDED_STATES
            if has_ended or now() >= until:
                state = f"it {'has ended as' if has_ended else 'is'} {status.state}"
                raise QuestionNotOpen(f"task {self.id!r} does not ask {name!r} now: {state}")
            await asyncio.sleep(COMPLETION_RETRY_SECONDS)

    def _has_question(self, question_id: str, name: str) -> bool:
        key = QuestionKey.from_id(question_id)
        return (key.agent, key.task_id, key.name) == (self.agent, self.id, name)

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

    async def signal(
        self, signal: Signal[T], value: T, /, *, signal_id: str | None = None
    ) -> None:
        """Send a value that the task receives with `ctx.receive(signal)`.

            await task.signal(chat, Line("make it two"))

        The task receives signals of the same name in the order in which they were accepted. They
        are kept until then, even while it runs. Returns once the signal is stored. Retries for ten
        seconds while no replica knows the task, for example while its request is in the queue.

        Args:
            signal: The signal.
            value: The value, validated before it is sent, at most 256 KiB of JSON.
            signal_id: The task receives the signal once, even if it is sent again under the same
                id. Default: a new id.

        Raises:
            InvalidInput: The value does not fit the declared type, or is too large.
            InvalidOption: `signal_id` is not printable, or longer than 248 bytes.
            SignalRefused: The task has ended, has too many unreceived signals, or belongs to
                another requester, or another value was sent under this id.
            SignalNotKept: No replica knows the task.
            UnknownAgent: No replica has ever served the agent in this namespace.
            BrokerUnavailable: The broker did not confirm it. Repeating it with its id is safe.
            MeshClosed: The connection was closed.
        """
        if not isinstance(signal, Signal):
            raise InvalidOption(f"signal needs a Signal, not {type(signal).__name__}")
        try:
            json = signal.write(value)
        except TypeMismatch as error:
            raise InvalidInput(f"signal {signal.name!r}: {error}") from error
        if (size := len(to_json(json))) > MAX_SIGNAL_BYTES:
            raise InvalidInput(
                f"signal {signal.name!r} has {size} bytes; {MAX_SIGNAL_BYTES} is the maximum"
            )
        id_ = new_id() if signal_id is None else signal_id
        if not (isinstance(id_, str) and id_ and is_valid_name(id_)):
            raise InvalidOption(f"signal_id: {id_!r} is not printable, or longer than 248 bytes")
        agent = AgentName(self.agent)
        await self._transport.signal(agent, self._task.id, signal.name, id_, json)

    async def value(self, key: str, type: type[T] | TypeAdapter[T], /) -> T | None:
        """The latest value that the task has set with `ctx.set_value(key, …)`.

        `None` if it has not set any, or if no replica that has the task replies. Values are kept
        as long as the row of the task, which includes 7 days after the end of a task that
        `Mesh.send` started.

        Raises:
            InvalidOutput: The value does not fit `type`.
            InvalidOption: `key` is not printable, or longer than 248 bytes.
            TaskNotFound: The task exists nowhere. Raised after about 15 seconds.
            OtherRequester: It was sent under another name.
            UnknownAgent: No replica has ever served the agent in this namespace.
            BrokerUnavailable: The broker did not confirm the message.
            MeshClosed: The connection was closed.
        """
        if not (isinstance(key, str) and key and is_valid_name(key)):
            raise InvalidOption(f"key: {key!r} is not printable, or longer than 248 bytes")
        declared: DeclaredType[T] = DeclaredType(type, f"value {key!r}")
        agent = AgentName(self.agent)
        is_set, value = await self._transport.read(agent, self._task.id, key)
        if not is_set:
            return None
        try:
            return declared.read(value)
        except TypeMismatch as error:
            raise InvalidOutput(f"value {key!r}: {error}") from error

    def _read_outcome(self) -> Ok[T_co] | Failed:
        if self._outcome is None:
            outcome = self._task.outcome
            if outcome is None:
                raise RuntimeError("the task has not ended")
            self._outcome = self._peer.read(outcome)
        return self._outcome


def _final_state(outcome: Outcome) -> Literal["completed", "failed", "cancelled"]:
    if isinstance(outcome, Ok):
        return "completed"
    return "cancelled" if outcome.kind is FailureKind.CANCELLED else "failed"


_ANY_JSON: DeclaredType[Any] = DeclaredType(Any, "answer")


def _describe_mismatch(question: Question[Any], value: object, error: TypeMismatch) -> str:
    """Why a value is no answer, in the words that a replica uses."""
    try:
        json = _ANY_JSON.write(value)
    except TypeMismatch:
        return f"{question.name}: {type(value).__name__} cannot become JSON"
    return find_mismatch(question.answer_schema, json, question.name) or " ".join(
        f"{question.name}: {error}".split()
    )


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

    def __init__(
        self,
        task: OpenTask,
        read_outcome: Callable[[], Ok[Any] | Failed],
        after: str | None,
        on_end: Callable[[], None],
    ) -> None:
        self._task, self._read_outcome, self._on_end = task, read_outcome, on_end
        position = 0 if after is None else task.position_after(after)
        self._position = position or 0
        # How many updates of the outcome were shown; `None` while live updates may still come.
        self._final_shown = None if after is None else _count_final(after)
        self._is_lost = position is None and self._final_shown is None
        self._shown_artifacts: deque[bytes] = deque(maxlen=_MAX_SHOWN_ARTIFACTS)
        self._final_updates: Iterator[ArtifactUpdate | Ended] | None = None
        may_follow = task.add_reader(self)
        self._detach_count = task.detach_count if may_follow else -1

    async def __anext__(self) -> Update:
        while self._final_updates is None:
            if (update := self._next_live()) is not None:
                return update
            if self._task.outcome is None:
                if self._task.detach_count > self._detach_count:
                    raise TooManyFollowers(self._task.agent, self._task.id)
                await self._task.wait_news()
            else:
                self._final_updates = self._list_final()
        final = next(self._final_updates, None)
        if final is None or isinstance(final, Ended):
            self._on_end()
        if final is None:
            raise StopAsyncIteration
        return final

    def _next_live(self) -> LiveUpdate | None:
        found = self._task.find_update(self._position)
        while found is not None and self._final_shown is not None:  # shown to the end of them
            found = self._task.find_update(found[1])
        if found is None:
            return None
        update, self._position = found
        if self._is_lost:
            self._is_lost = False
            update = update.model_copy(update={"reset": True})
        if isinstance(update, ArtifactUpdate):
            self._shown_artifacts.append(_digest(update.artifact))
        return update

    def _list_final(self) -> Iterator[ArtifactUpdate | Ended]:
        """The artifacts that were not shown yet, and the end."""
        outcome, now, shown = self._read_outcome(), datetime.now(UTC), self._final_shown or 0
        artifacts = outcome.artifacts if isinstance(outcome, Ok) else ()
        shown_before = set(self._shown_artifacts)
        for number, artifact in enumerate(artifacts[shown:], shown + 1):
            if _digest(artifact) not in shown_before:
                yield ArtifactUpdate(id=f"artifact.{number}", at=now, artifact=artifact)
        if shown != _ALL:
            yield Ended(id=_END, at=now, outcome=outcome)


_END, _ALL = "end", 1_000_000_000
_MAX_SHOWN_ARTIFACTS = 10_000
"""Number of artifacts of which a stream remembers that it has shown them."""
_ARTIFACT_ID = re.compile(r"artifact[.]([0-9]{1,9})")


def _count_final(after: str) -> int | None:
    """How many updates of the outcome end with this id; `None` for the id of another update."""
    match = _ARTIFACT_ID.fullmatch(after)
    return int(match[1]) if match is not None else _ALL if after == _END else None


def _digest(artifact: dict[str, JsonValue]) -> bytes:
    return hashlib.blake2b(to_json(artifact), digest_size=16).digest()
