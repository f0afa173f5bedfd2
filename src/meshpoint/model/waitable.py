"""What a function agent can wait for, by `await` or, for several at once, `ctx.gather`."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import JsonValue

from meshpoint.errors import AgentMisbehaved
from meshpoint.model.calls import ALL, Call, Join
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.current_context import running_context
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Waitable(Generic[_T_co]):
    """Something a task can wait for, such as a call of a `Peer`.

        quote = await flights(trip)
        quote, weather = await ctx.gather(flights(trip), forecast(trip))

    In a function agent the task pauses until the result is there. A class agent passes it to
    `self.ask`. Nothing happens before that: an unused wait emits a `RuntimeWarning`.

    A subclass is an `UnsentCall`: it has `peer` and `input`, and defines the methods below.
    """

    _is_used = False

    if TYPE_CHECKING:  # subclasses may have attributes instead

        @property
        def peer(self) -> str: ...
        @property
        def input(self) -> JsonValue: ...

    def as_call(self, call_id: str) -> Call:
        """The request as a `Call` of a pause."""
        raise NotImplementedError

    def read(self, outcome: Outcome, /) -> Ok[_T_co] | Failed:
        """Convert the outcome's value to the declared type, or `Failed(INVALID)` on mismatch."""
        raise NotImplementedError

    def _error(self, failed: Failed) -> Exception:
        """The exception that a failed outcome raises."""
        raise NotImplementedError

    def _describe_unused(self) -> str:
        """The text of the warning that it was never used."""
        raise NotImplementedError

    def _describe_misuse(self, *, in_agent: bool) -> str:
        """What to write instead of `await` in other agents and outside agents."""
        raise NotImplementedError

    def __await__(self) -> Generator[Any, Any, _T_co]:
        """Wait for the result. The task pauses until it arrives.

        Raises:
            PeerFailed: A call has no result.
            ReplayMismatch: An earlier run of the function waited for something else here.
            AgentMisbehaved: This is not the function of a function agent, or not its own asyncio
                task.
        """
        self.__dict__["_is_used"] = True
        context = running_context.get()
        recorder = None if context is None else context._runtime.recorder
        if recorder is None:
            hint = None if context is None else context._runtime.wait_hint
            raise AgentMisbehaved(hint or self._describe_misuse(in_agent=context is not None))
        [outcome] = recorder.ask((self,), ALL)
        if isinstance(outcome, Failed):
            raise self._error(outcome)
        value: _T_co = outcome.value
        return value
        yield  # never reached: a generator costs less than a coroutine

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if not self._is_used and not _is_unwinding():
            _warn(self._describe_unused(), RuntimeWarning, stacklevel=2, source=self)


def _is_unwinding() -> bool:
    """Whether the code here is being stopped, so that only its next run may await the wait."""
    if (context := running_context.get()) is None:
        return False
    recorder = context._runtime.recorder
    return context.is_cancelled or (recorder is not None and recorder.is_pausing)


def mark_used(wait: Waitable[Any]) -> None:
    """Do not warn that `wait` was never awaited."""
    wait.__dict__["_is_used"] = True


async def wait_for_outcomes(
    runtime: ContextRuntime, waits: Sequence[Waitable[Any]], join: Join, caller: str
) -> list[Ok[Any] | Failed]:
    """Return one outcome per wait, in order. The task pauses if any is missing.

    `caller` is the method of the context that errors name.

    Raises:
        AgentMisbehaved: The agent is not a function agent, or an argument is not a `Waitable`.
        ReplayMismatch: An earlier run of the function waited for something else here.
    """
    for wait in waits:
        if isinstance(wait, Waitable):
            wait.__dict__["_is_used"] = True
        else:
            raise AgentMisbehaved(f"{caller}: {_describe_unfit(wait, caller)}")
    recorder = runtime.recorder
    if recorder is None:
        raise AgentMisbehaved(
            runtime.wait_hint
            or f"{caller} is for function agents (@agent), whose calls are recorded; "
            "in a StatefulAgent return self.ask(...), in any other agent return Paused(...)"
        )
    return recorder.ask(waits, join) if waits else []


def _describe_unfit(given: object, caller: str) -> str:
    if isinstance(given, list | tuple | set | frozenset):
        for each in given:
            if isinstance(each, Waitable):
                mark_used(each)
        return f"write {caller}(*calls)"
    problem = f"{type(given).__name__} is not a call"
    return f"{problem}; call a Peer with its input, as in flights(trip)"


def results(
    waits: Sequence[Waitable[Any]], outcomes: Sequence[Ok[Any] | Failed]
) -> tuple[Any, ...]:
    """The values of `outcomes`.

    Raises:
        PeerFailed: a wait failed. Cancelled waits say least about the cause, so they come last.
    """
    values = tuple([outcome.value for outcome in outcomes if isinstance(outcome, Ok)])
    if len(values) == len(waits):
        return values
    raise first_failure(waits, outcomes)


def first_failure(
    waits: Sequence[Waitable[Any]], outcomes: Sequence[Ok[Any] | Failed]
) -> Exception:
    """The exception of the first failed wait. Cancelled waits come last."""
    failures = [
        (wait, outcome)
        for wait, outcome in zip(waits, outcomes, strict=True)
        if isinstance(outcome, Failed)
    ]
    failures.sort(key=lambda failure: failure[1].kind is FailureKind.CANCELLED)
    wait, failed = failures[0]
    return wait._error(failed)
