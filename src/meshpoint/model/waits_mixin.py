"""`ctx.sleep`, `ctx.wait_for` and `ctx.receive`: waits for something other than peers.

Also `ctx.set_value`, which sets values for callers to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pydantic import JsonValue, TypeAdapter
from pydantic_core import to_json, to_jsonable_python

from meshpoint.errors import AgentMisbehaved, NotJson, PeerFailed
from meshpoint.model.calls import MAX_DURATION, Call
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.json_values import check_json, copy_containers
from meshpoint.model.mailbox import MAX_VALUE_BYTES
from meshpoint.model.messages import is_valid_name
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.model.questions import (
    Question,
    QuestionKey,
    QuestionWait,
    check_logins,
    check_prompt,
)
from meshpoint.model.recorded_work import current_subtask
from meshpoint.model.retry_policy import Duration, duration_seconds
from meshpoint.model.signals import ReceiveWait, Signal
from meshpoint.model.waitable import Waitable, mark_used
from meshpoint.model.waits import SLEEP_PEER, Sleep, check_instant, check_sleep, display_name

T = TypeVar("T")


class SleepWait(Waitable[None]):
    """A sleep that has not begun. Await it, or pass it on like a peer call."""

    peer = SLEEP_PEER
    input: JsonValue = None

    def __init__(self, duration: Duration | None, until: datetime | None = None) -> None:
        self._duration, self._until = duration, until

    def as_call(self, call_id: str) -> Call:
        """The sleep as a `Call` of a pause."""
        mark_used(self)
        return Sleep(call_id, self._duration, self._until)

    def read(self, outcome: Outcome) -> Ok[None] | Failed:
        """Return the outcome. Its value is `None`."""
        return outcome if isinstance(outcome, Failed) else Ok(None)

    def _error(self, failed: Failed) -> Exception:
        return PeerFailed(display_name(self.peer), failed)

    def _describe_unused(self) -> str:
        return "a sleep was never awaited: the task did not sleep"

    def _describe_misuse(self, *, in_agent: bool) -> str:
        if in_agent:
            fix = 'return self.ask(state, {"nap": ctx.sleep(60)}, then=…)'
            return f"only function agents (@agent) await a sleep; in a StatefulAgent, {fix}"
        return "ctx.sleep pauses a task; in a script, await asyncio.sleep(60)"


def _check_timeout(timeout: Duration | None) -> timedelta | None:
    if timeout is None:
        return None
    seconds = duration_seconds(timeout, "timeout")
    if not 0 < seconds <= MAX_DURATION.total_seconds():
        raise AgentMisbehaved(f"timeout is {timeout}; it must be positive and at most ten years")
    return timedelta(seconds=seconds)


class WaitsMixin:
    """The part of a context that waits for time and for people."""

    _runtime: ContextRuntime

    if TYPE_CHECKING:  # the context has it

        @property
        def task_id(self) -> TaskId: ...

    @overload
    def wait_for(
        self,
        question: Question[T],
        /,
        *,
        prompt: str | None = None,
        timeout: Duration | None = None,
        allow: Sequence[str] = (),
    ) -> QuestionWait[T]: ...

    @overload
    def wait_for(
        self,
        question: str,
        answer: type[T] | TypeAdapter[T],
        /,
        *,
        prompt: str | None = None,
        timeout: Duration | None = None,
        allow: Sequence[str] = (),
    ) -> QuestionWait[T]: ...

    def wait_for(
        self,
        question: Question[Any] | str,
        answer: Any = None,
        /,
        *,
        prompt: str | None = None,
        timeout: Duration | None = None,
        allow: Sequence[str] = (),
    ) -> QuestionWait[Any]:
        """Ask a person or a webhook. The task pauses until the question is answered.

            wait = ctx.wait_for(approval, prompt="Buy it?", timeout=timedelta(days=1))
            await ctx.step("mail", mail, f"https://shop.example/decide/{wait.id}")
            decision = await wait

        The code above the wait runs again when the answer arrives, as after any other pause.

        Args:
            question: The question, or its name.
            answer: The type of the answer, if `question` is a name.
            prompt: What to ask, for people.
            timeout: Raise `TimeoutError` after this time; the question keeps its id and may be
                awaited again. By default, only the deadline of the task ends the wait.
            allow: Logins that may answer it. Default: the task's requester. Operators always may.

        Raises:
            AgentMisbehaved: an argument is invalid.
            TimeoutError: when awaited, if no answer came in time.
            PeerFailed: when awaited, if the answer does not fit the type.
        """
        if isinstance(question, str) and answer is None:
            raise AgentMisbehaved(f"question {question!r} needs the type of its answer")
        asked = Question(question, answer) if isinstance(question, str) else question
        if not isinstance(asked, Question):
            raise AgentMisbehaved(f"wait_for needs a Question, not {type(asked).__name__}")
        limit = _check_timeout(timeout)
        place = self._runtime.next_question(asked.name, current_subtask())
        key = QuestionKey(
            AgentName(self._runtime.agent), self.task_id, TaskId(f"{asked.peer}.{place}")
        )
        return QuestionWait(asked, key, check_prompt(prompt), limit, check_logins(allow))

    def receive(self, signal: Signal[T], /, *, timeout: Duration | None = None) -> ReceiveWait[T]:
        """Receive the oldest signal with this name. The task pauses until one arrives.

            line = await ctx.receive(chat)

        Callers send it with `TaskHandle.signal`. Each signal is received once, in the order in
        which they were accepted, and by the same wait in every run. In `ctx.gather`, several waits
        for one signal take signals in their order; a wait that loses a race takes none.

        Args:
            signal: The signal.
            timeout: Raise `TimeoutError` after this time. By default, only the deadline of the
                task ends the wait.

        Raises:
            AgentMisbehaved: an argument is invalid.
            TimeoutError: when awaited, if no signal arrived in time.
            PeerFailed: when awaited, if the value does not fit the type. The signal is received.
        """
        if not isinstance(signal, Signal):
            raise AgentMisbehaved(f"receive needs a Signal, not {type(signal).__name__}")
        return ReceiveWait(signal, _check_timeout(timeout))

    async def set_value(self, key: str, value: object, /) -> None:
        """Set the value that `TaskHandle.value` returns for `key`. Returns once it is stored.

            await ctx.set_value("progress", {"done": 3, "of": 10})

        A new value replaces the previous one, and is kept as long as the task's row, which may
        outlive the task. Replayed code sets nothing. A task in its first segment gets its row, as
        for `ctx.step`.

        Args:
            key: Up to 248 bytes; a task has at most 100 keys.
            value: JSON, or what pydantic can convert to it; at most 64 KiB.

        Raises:
            AgentMisbehaved: the key or the value cannot be stored, or there are too many keys.
        """
        if not (isinstance(key, str) and key and is_valid_name(key)):
            raise AgentMisbehaved(f"set_value: {key!r} is not printable, or longer than 248 bytes")
        try:
            json = check_json(to_jsonable_python(copy_containers(value)), f"value {key!r}")
        except (NotJson, ValueError) as error:
            problem = str(error) if isinstance(error, NotJson) else f"value {key!r}: {error}"
            raise AgentMisbehaved(f"set_value: {problem}") from error
        encoded = to_json(json)
        if len(encoded) > MAX_VALUE_BYTES:
            raise AgentMisbehaved(
                f"value {key!r} has {len(encoded)} bytes; {MAX_VALUE_BYTES} is the maximum"
            )
        runtime = self._runtime
        is_replaying = runtime.recorder is not None and runtime.recorder.replaying
        if runtime.tools is not None and not is_replaying:
            await runtime.tools.set_value(key, encoded)

    def sleep(self, duration: Duration, /) -> SleepWait:
        """Pause the task for `duration`: a `timedelta`, or a number of seconds.

            await ctx.sleep(timedelta(days=3))

        A sleeping task uses no memory and no slot, and any replica continues it. The duration
        counts from the checkpoint's commit. The task's own deadline still ends it. The result can
        also be gathered with peer calls, or passed to `StatefulAgent.ask`.

        Raises:
            AgentMisbehaved: the duration is negative, or longer than ten years, or a number above
                a year, which is most likely meant as milliseconds.
            ReplayMismatch: when awaited, if an earlier run did something else at this point.
        """
        check_sleep(duration)
        return SleepWait(duration)

    def sleep_until(self, instant: datetime, /) -> SleepWait:
        """Pause the task until `instant`, which must have a time zone. See `sleep`.

        An instant in the past ends the sleep at once.

        Raises:
            AgentMisbehaved: the instant has no time zone.
            ReplayMismatch: when awaited, if an earlier run did something else at this point.
        """
        return SleepWait(None, check_instant(instant, "sleep_until"))
