"""`ctx.gather`, `ctx.first` and the variants that return outcomes, for function agents.

A `CallRecorder` decides whether an answer was recorded in an earlier run of the function or the
task must pause for it.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

from meshpoint.errors import AgentMisbehaved
from meshpoint.model.calls import ALL, FIRST, Join
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.waitable import (
    Waitable,
    first_failure,
    results,
    wait_for_outcomes,
)

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

    async def outcome(self, wait: Waitable[_T], /) -> Ok[_T] | Failed:
        """The outcome of `wait`. Like awaiting it, but a failure is a value, not an exception.

        Raises:
            ReplayMismatch: an earlier run of the function waited for something else here.
        """
        [outcome] = await wait_for_outcomes(self._runtime, (wait,), ALL, "ctx.outcome")
        return outcome

    @overload
    async def gather(self, a: Waitable[_A], b: Waitable[_B], /) -> tuple[_A, _B]: ...
    @overload
    async def gather(
        self, a: Waitable[_A], b: Waitable[_B], c: Waitable[_C], /
    ) -> tuple[_A, _B, _C]: ...
    @overload
    async def gather(
        self, a: Waitable[_A], b: Waitable[_B], c: Waitable[_C], d: Waitable[_D], /
    ) -> tuple[_A, _B, _C, _D]: ...
    @overload
    async def gather(
        self,
        a: Waitable[_A],
        b: Waitable[_B],
        c: Waitable[_C],
        d: Waitable[_D],
        e: Waitable[_E],
        /,
    ) -> tuple[_A, _B, _C, _D, _E]: ...
    @overload
    async def gather(
        self,
        a: Waitable[_A],
        b: Waitable[_B],
        c: Waitable[_C],
        d: Waitable[_D],
        e: Waitable[_E],
        f: Waitable[_F],
        /,
    ) -> tuple[_A, _B, _C, _D, _E, _F]: ...
    @overload
    async def gather(self, *waits: Waitable[_T]) -> tuple[_T, ...]: ...
    async def gather(self, *waits: Waitable[Any]) -> tuple[Any, ...]:
        """The results, in order. The task pauses once, until every wait has an outcome.

        Raises:
            PeerFailed: a call has no result. Names the first failed call, and cancelled calls
                last. Use `gather_outcomes` to get the other results.
            ReplayMismatch: an earlier run of the function waited for something else here.
        """
        return results(waits, await wait_for_outcomes(self._runtime, waits, ALL, "ctx.gather"))

    @overload
    async def gather_outcomes(
        self, a: Waitable[_A], b: Waitable[_B], /, *, join: Join = ALL
    ) -> tuple[Ok[_A] | Failed, Ok[_B] | Failed]: ...
    @overload
    async def gather_outcomes(
        self, a: Waitable[_A], b: Waitable[_B], c: Waitable[_C], /, *, join: Join = ALL
    ) -> tuple[Ok[_A] | Failed, Ok[_B] | Failed, Ok[_C] | Failed]: ...
    @overload
    async def gather_outcomes(
        self,
        a: Waitable[_A],
        b: Waitable[_B],
        c: Waitable[_C],
        d: Waitable[_D],
        /,
        *,
        join: Join = ALL,
    ) -> tuple[Ok[_A] | Failed, Ok[_B] | Failed, Ok[_C] | Failed, Ok[_D] | Failed]: ...
    @overload
    async def gather_outcomes(
        self,
        a: Waitable[_A],
        b: Waitable[_B],
        c: Waitable[_C],
        d: Waitable[_D],
        e: Waitable[_E],
        /,
        *,
        join: Join = ALL,
    ) -> tuple[
        Ok[_A] | Failed, Ok[_B] | Failed, Ok[_C] | Failed, Ok[_D] | Failed, Ok[_E] | Failed
    ]: ...
    @overload
    async def gather_outcomes(
        self,
        a: Waitable[_A],
        b: Waitable[_B],
        c: Waitable[_C],
        d: Waitable[_D],
        e: Waitable[_E],
        f: Waitable[_F],
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
        self, *waits: Waitable[_T], join: Join = ALL
    ) -> tuple[Ok[_T] | Failed, ...]: ...
    async def gather_outcomes(
        self, *waits: Waitable[Any], join: Join = ALL
    ) -> tuple[Ok[Any] | Failed, ...]:
        """The outcomes, in order. A failure is a value, not an exception. The task pauses once.

        Args:
            waits: peer calls, sleeps or questions.
            join: how many results end the pause. The others are then cancelled, and have a
                `Failed` of kind `CANCELLED`. There are fewer results if too many fail, or the
                join's deadline passes first.

        Raises:
            AgentMisbehaved: the join needs more results than there are waits.
            ReplayMismatch: an earlier run of the function waited for something else here.
        """
        return tuple(await wait_for_outcomes(self._runtime, waits, join, "ctx.gather_outcomes"))

    @overload
    async def first(self, a: Waitable[_A], b: Waitable[_B], /) -> _A | _B: ...
    @overload
    async def first(
        self, a: Waitable[_A], b: Waitable[_B], c: Waitable[_C], /
    ) -> _A | _B | _C: ...
    @overload
    async def first(
        self, a: Waitable[_A], b: Waitable[_B], c: Waitable[_C], d: Waitable[_D], /
    ) -> _A | _B | _C | _D: ...
    @overload
    async def first(self, *waits: Waitable[_T]) -> _T: ...
    async def first(self, *waits: Waitable[Any]) -> Any:
        """The first result. The task pauses once, and the other waits are cancelled.

        If the task resumes with several results, returns the first in the order of the arguments.

        Raises:
            PeerFailed: every call failed. Names the first one.
            AgentMisbehaved: there is nothing to wait for.
            ReplayMismatch: an earlier run of the function waited for something else here.
        """
        if not waits:
            raise AgentMisbehaved("ctx.first needs at least one call, as in ctx.first(a(x), b(x))")
        outcomes = await wait_for_outcomes(self._runtime, waits, FIRST, "ctx.first")
        for outcome in outcomes:
            if isinstance(outcome, Ok):
                return outcome.value
        raise first_failure(waits, outcomes)
