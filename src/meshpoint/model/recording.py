"""`ctx.call` and `ctx.gather`: peer calls of function agents.

The context checks arguments and converts types. A `Recorder` decides whether an answer was
recorded in an earlier run of the function or the task must pause for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeVar, overload

from meshpoint.errors import AgentMisbehaved, PeerFailed
from meshpoint.model.calls import ALL, Call, Join
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")


class UnsentCall(Protocol[T_co]):
    """A typed request that has not been sent yet, created by calling a `Peer`."""

    @property
    def peer(self) -> str: ...

    def as_call(self, call_id: str) -> Call:
        """The request as a `Call` of a pause."""

    def read(self, outcome: Outcome) -> Ok[T_co] | Failed:
        """Convert the outcome's value to the declared type, or `Failed(INVALID)` on mismatch."""


class Recorder(Protocol):
    """Answers calls from the journal, or ends the segment with a pause."""

    @property
    def replaying(self) -> bool: ...

    @property
    def position(self) -> int:
        """Number of recorded pauses the run has passed, not counting pauses inside subtasks."""

    async def ask(self, calls: Sequence[UnsentCall[Any]], join: Join) -> list[Ok[Any] | Failed]:
        """Return one outcome per call, in call order.

        Does not return if outcomes are missing: the task pauses.
        """

    def skip(self, subtask: str) -> None:
        """Skip the calls recorded inside a subtask whose deliverable is known."""


class Recording:
    """The part of a context that only function agents use."""

    _recorder: Recorder | None

    def record_with(self, recorder: Recorder) -> None:
        """Answer this context's calls with `recorder`. Called by the function agents' runtime."""
        self._recorder = recorder

    @property
    def replaying(self) -> bool:
        """Whether the function is re-running a part that finished in an earlier run."""
        return self._recorder is not None and self._recorder.replaying

    @property
    def calls_are_not_recorded(self) -> bool:
        """Whether this is not a function agent, so that code is repeated only after a crash."""
        return self._recorder is None

    def pauses_passed(self, generation: int) -> int:
        """Number of the task's pauses before the current code. Called by the subtask runner.

        Pauses inside subtasks of a function agent do not count, because a recorded subtask does
        not pause again after a resume.
        """
        return generation if self._recorder is None else self._recorder.position

    def skip_calls_of(self, subtask: str) -> None:
        """Skip the peer calls of a subtask that is not run again. For the subtask runner."""
        if self._recorder is not None:
            self._recorder.skip(subtask)

    @overload
    async def call(self, call: UnsentCall[T], /, *, return_errors: Literal[False] = False) -> T: ...
    @overload
    async def call(self, call: UnsentCall[T], /, *, return_errors: bool) -> T | Failed: ...
    async def call(self, call: UnsentCall[Any], /, *, return_errors: bool = False) -> Any:
        """The peer's answer. The task pauses until it arrives.

        Args:
            call: created by calling a `Peer`: `await ctx.call(flights(trip))`.
            return_errors: return a `Failed` instead of raising it.

        Raises:
            PeerFailed: the call has no result.
            ReplayMismatch: an earlier run of the function made a different call at this point.
        """
        [answer] = await self._gather((call,), ALL, return_errors, "ctx.call")
        return answer

    # Without `join` and `return_errors` all results are values; with either, some may be `Failed`.
    @overload
    async def gather(self, a: UnsentCall[A], /, *, return_errors: Literal[False] = False) -> tuple[A]: ...
    @overload
    async def gather(
        self, a: UnsentCall[A], b: UnsentCall[B], /, *, return_errors: Literal[False] = False
    ) -> tuple[A, B]: ...
    @overload
    async def gather(
        self, a: UnsentCall[A], b: UnsentCall[B], c: UnsentCall[C], /, *, return_errors: Literal[False] = False
    ) -> tuple[A, B, C]: ...
    @overload
    async def gather(
        self,
        a: UnsentCall[A],
        b: UnsentCall[B],
        c: UnsentCall[C],
        d: UnsentCall[D],
        /,
        *,
        return_errors: Literal[False] = False,
    ) -> tuple[A, B, C, D]: ...
    @overload
    async def gather(
        self,
        a: UnsentCall[A],
        b: UnsentCall[B],
        c: UnsentCall[C],
        d: UnsentCall[D],
        e: UnsentCall[E],
        /,
        *,
        return_errors: Literal[False] = False,
    ) -> tuple[A, B, C, D, E]: ...
    @overload
    async def gather(
        self,
        a: UnsentCall[A],
        b: UnsentCall[B],
        c: UnsentCall[C],
        d: UnsentCall[D],
        e: UnsentCall[E],
        f: UnsentCall[F],
        /,
        *,
        return_errors: Literal[False] = False,
    ) -> tuple[A, B, C, D, E, F]: ...
    @overload
    async def gather(  # type: ignore[overload-overlap]  # up to six calls, the signatures above come first
        self, *calls: UnsentCall[T], return_errors: Literal[False] = False
    ) -> tuple[T, ...]: ...
    @overload
    async def gather(
        self, a: UnsentCall[A], /, *, join: Join = ALL, return_errors: bool = False
    ) -> tuple[A | Failed]: ...
    @overload
    async def gather(
        self, a: UnsentCall[A], b: UnsentCall[B], /, *, join: Join = ALL, return_errors: bool = False
    ) -> tuple[A | Failed, B | Failed]: ...
    @overload
    async def gather(
        self,
        a: UnsentCall[A],
        b: UnsentCall[B],
        c: UnsentCall[C],
        /,
        *,
        join: Join = ALL,
        return_errors: bool = False,
    ) -> tuple[A | Failed, B | Failed, C | Failed]: ...
    @overload
    async def gather(
        self,
        a: UnsentCall[A],
        b: UnsentCall[B],
        c: UnsentCall[C],
        d: UnsentCall[D],
        /,
        *,
        join: Join = ALL,
        return_errors: bool = False,
    ) -> tuple[A | Failed, B | Failed, C | Failed, D | Failed]: ...
    @overload
    async def gather(
        self,
        a: UnsentCall[A],
        b: UnsentCall[B],
        c: UnsentCall[C],
        d: UnsentCall[D],
        e: UnsentCall[E],
        /,
        *,
        join: Join = ALL,
        return_errors: bool = False,
    ) -> tuple[A | Failed, B | Failed, C | Failed, D | Failed, E | Failed]: ...
    @overload
    async def gather(
        self,
        a: UnsentCall[A],
        b: UnsentCall[B],
        c: UnsentCall[C],
        d: UnsentCall[D],
        e: UnsentCall[E],
        f: UnsentCall[F],
        /,
        *,
        join: Join = ALL,
        return_errors: bool = False,
    ) -> tuple[A | Failed, B | Failed, C | Failed, D | Failed, E | Failed, F | Failed]: ...
    @overload
    async def gather(
        self, *calls: UnsentCall[T], join: Join = ALL, return_errors: bool = False
    ) -> tuple[T | Failed, ...]: ...
    async def gather(self, *calls: UnsentCall[Any], join: Join = ALL, return_errors: bool = False) -> tuple[Any, ...]:
        """The peers' answers in call order. The calls run concurrently and the task pauses once.

        Without `return_errors`, `gather` raises unless the join is satisfied. With `ALL`, every
        position then holds a value. With `FIRST` or `AT_LEAST(k)`, at least that many do, and
        calls that failed or were closed by the join hold a `Failed`. A join deadline that passes
        first raises as well. With `return_errors`, every call without a result holds a `Failed`,
        and nothing is raised.

        Raises:
            PeerFailed: there are fewer results than the join needs; names one call without a
                result.
            ReplayMismatch: an earlier run of the function made a different call at this point.
        """
        return await self._gather(calls, join, return_errors, "ctx.gather")

    async def _gather(
        self, calls: Sequence[UnsentCall[Any]], join: Join, return_errors: bool, asked_by: str
    ) -> tuple[Any, ...]:
        if self._recorder is None:
            raise AgentMisbehaved(
                f"{asked_by} is for function agents (@agent), whose calls are recorded; "
                "in a StatefulAgent return self.ask(...), in any other agent return Paused(...)"
            )
        for call in calls:
            if not hasattr(call, "as_call"):
                given = f"{type(call).__name__} is not a call"
                raise AgentMisbehaved(f"{asked_by}: {given}; call a Peer with its input, as in flights(trip)")
        if not calls:
            return ()
        outcomes = await self._recorder.ask(calls, join)
        if not return_errors:
            _insist(calls, outcomes, join)
        return tuple(outcome.value if isinstance(outcome, Ok) else outcome for outcome in outcomes)


def _insist(calls: Sequence[UnsentCall[Any]], outcomes: Sequence[Ok[Any] | Failed], join: Join) -> None:
    failures = [(call, outcome) for call, outcome in zip(calls, outcomes, strict=True) if isinstance(outcome, Failed)]
    needed = len(calls) if join.needed is None else join.needed
    if len(calls) - len(failures) >= needed:
        return
    # A call closed because of others says least about the cause, so it comes last.
    failures.sort(key=lambda failure: failure[1].kind is FailureKind.CANCELLED)
    call, failed = failures[0]
    raise PeerFailed(call.peer, failed)
