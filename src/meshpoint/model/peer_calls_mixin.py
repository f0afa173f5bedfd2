"""`ctx.call`, `ctx.gather` and their variants with outcomes: peer calls of function agents.

A `CallRecorder` decides whether an answer was recorded in an earlier run of the function or the
task must pause for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast, overload

from meshpoint.errors import AgentMisbehaved, PeerFailed
from meshpoint.model.calls import ALL, Join
from meshpoint.model.context_runtime import ContextRuntime, UnsentCall
from meshpoint.model.outcomes import Failed, FailureKind, Ok

_T = TypeVar("_T")
_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")
_D = TypeVar("_D")
_E = TypeVar("_E")
_F = TypeVar("_F")


class PeerCallsMixin:
    """The part of a context that only function agents use."""

    _runtime: ContextRuntime

    @property
    def replaying(self) -> bool:
        """Whether the function is re-running a part that finished in an earlier run."""
        recorder = self._runtime.recorder
        return recorder is not None and recorder.replaying

    async def call(self, call: UnsentCall[_T], /) -> _T:
        """The peer's answer. The task pauses until it arrives.

        Args:
            call: created by calling a `Peer`: `await ctx.call(flights(trip))`.

        Raises:
            PeerFailed: the call has no result.
            ReplayMismatch: an earlier run of the function made a different call at this point.
        """
        [outcome] = await self._ask((call,), ALL, "ctx.call")
        if isinstance(outcome, Failed):
            raise PeerFailed(call.peer, outcome)
        return cast(_T, outcome.value)

    async def outcome(self, call: UnsentCall[_T], /) -> Ok[_T] | Failed:
        """The outcome of a call. Like `call`, but a failed call is a value, not an exception.

        Raises:
            ReplayMismatch: an earlier run of the function made a different call at this point.
        """
        [outcome] = await self._ask((call,), ALL, "ctx.outcome")
        return outcome

    @overload
    async def gather(self, a: UnsentCall[_A], b: UnsentCall[_B], /) -> tuple[_A, _B]: ...
    @overload
    async def gather(
        self, a: UnsentCall[_A], b: UnsentCall[_B], c: UnsentCall[_C], /
    ) -> tuple[_A, _B, _C]: ...
    @overload
    async def gather(
        self, a: UnsentCall[_A], b: UnsentCall[_B], c: UnsentCall[_C], d: UnsentCall[_D], /
    ) -> tuple[_A, _B, _C, _D]: ...
    @overload
    async def gather(
        self,
        a: UnsentCall[_A],
        b: UnsentCall[_B],
        c: UnsentCall[_C],
        d: UnsentCall[_D],
        e: UnsentCall[_E],
        /,
    ) -> tuple[_A, _B, _C, _D, _E]: ...
    @overload
    async def gather(
        self,
        a: UnsentCall[_A],
        b: UnsentCall[_B],
        c: UnsentCall[_C],
        d: UnsentCall[_D],
        e: UnsentCall[_E],
        f: UnsentCall[_F],
        /,
    ) -> tuple[_A, _B, _C, _D, _E, _F]: ...
    @overload
    async def gather(self, *calls: UnsentCall[_T]) -> tuple[_T, ...]: ...
    async def gather(self, *calls: UnsentCall[Any]) -> tuple[Any, ...]:
        """The peers' answers in call order. The calls run concurrently and the task pauses once.

        The task resumes when every call has an outcome.

        Raises:
            PeerFailed: a call has no result. Names the first failed call, and cancelled calls
                last. Use `gather_outcomes` to get the other results.
            ReplayMismatch: an earlier run of the function made a different call at this point.
        """
        return _results(calls, await self._ask(calls, ALL, "ctx.gather"))

    @overload
    async def gather_outcomes(
        self, a: UnsentCall[_A], b: UnsentCall[_B], /, *, join: Join = ALL
    ) -> tuple[Ok[_A] | Failed, Ok[_B] | Failed]: ...
    @overload
    async def gather_outcomes(
        self, a: UnsentCall[_A], b: UnsentCall[_B], c: UnsentCall[_C], /, *, join: Join = ALL
    ) -> tuple[Ok[_A] | Failed, Ok[_B] | Failed, Ok[_C] | Failed]: ...
    @overload
    async def gather_outcomes(
        self,
        a: UnsentCall[_A],
        b: UnsentCall[_B],
        c: UnsentCall[_C],
        d: UnsentCall[_D],
        /,
        *,
        join: Join = ALL,
    ) -> tuple[Ok[_A] | Failed, Ok[_B] | Failed, Ok[_C] | Failed, Ok[_D] | Failed]: ...
    @overload
    async def gather_outcomes(
        self,
        a: UnsentCall[_A],
        b: UnsentCall[_B],
        c: UnsentCall[_C],
        d: UnsentCall[_D],
        e: UnsentCall[_E],
        /,
        *,
        join: Join = ALL,
    ) -> tuple[
        Ok[_A] | Failed, Ok[_B] | Failed, Ok[_C] | Failed, Ok[_D] | Failed, Ok[_E] | Failed
    ]: ...
    @overload
    async def gather_outcomes(
        self,
        a: UnsentCall[_A],
        b: UnsentCall[_B],
        c: UnsentCall[_C],
        d: UnsentCall[_D],
        e: UnsentCall[_E],
        f: UnsentCall[_F],
        /,
        *,
        join: Join = ALL,
    ) -> tuple[
        Ok[_A] | Failed,
        Ok[_B] | Failed,
        Ok[_C] | Failed,
        Ok[_D] | Failed,
        Ok[_E] | Failed,
        Ok[_F] | Failed,
    ]: ...
    @overload
    async def gather_outcomes(
        self, *calls: UnsentCall[_T], join: Join = ALL
    ) -> tuple[Ok[_T] | Failed, ...]: ...
    async def gather_outcomes(
        self, *calls: UnsentCall[Any], join: Join = ALL
    ) -> tuple[Ok[Any] | Failed, ...]:
        """The outcomes of calls in call order. A failed call is a value, not an exception.

        The calls run concurrently and the task pauses once.

        Args:
            calls: created by calling a `Peer`.
            join: how many results end the pause. The other calls are then cancelled, and have a
                `Failed` of kind `CANCELLED`. There are fewer results if too many calls fail, or
                the join's deadline passes first.

        Raises:
            AgentMisbehaved: the join needs more results than there are calls.
            ReplayMismatch: an earlier run of the function made a different call at this point.
        """
        return tuple(await self._ask(calls, join, "ctx.gather_outcomes"))

    async def _ask(
        self, calls: Sequence[UnsentCall[Any]], join: Join, caller: str
    ) -> list[Ok[Any] | Failed]:
        recorder = self._runtime.recorder
        if recorder is None:
            raise AgentMisbehaved(
                f"{caller} is for function agents (@agent), whose calls are recorded; "
                "in a StatefulAgent return self.ask(...), in any other agent return Paused(...)"
            )
        for call in calls:
            if not hasattr(call, "as_call"):
                problem = f"{type(call).__name__} is not a call"
                raise AgentMisbehaved(
                    f"{caller}: {problem}; call a Peer with its input, as in flights(trip)"
                )
        return await recorder.ask(calls, join) if calls else []


def _results(
    calls: Sequence[UnsentCall[Any]], outcomes: Sequence[Ok[Any] | Failed]
) -> tuple[Any, ...]:
    """The values of `outcomes`.

    Raises:
        PeerFailed: a call failed. A cancelled call says least about the cause, so it comes last.
    """
    values = tuple([outcome.value for outcome in outcomes if isinstance(outcome, Ok)])
    if len(values) == len(calls):
        return values
    failures = [
        (call, outcome)
        for call, outcome in zip(calls, outcomes, strict=True)
        if isinstance(outcome, Failed)
    ]
    failures.sort(key=lambda failure: failure[1].kind is FailureKind.CANCELLED)
    call, failed = failures[0]
    raise PeerFailed(call.peer, failed)
