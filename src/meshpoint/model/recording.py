"""`ctx.call` and `ctx.gather`: how a function agent asks its peers.

The context only checks and types them; a `Recorder` decides whether an answer is known from an earlier run of
the function, or the task has to pause for it.
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
    """A typed request that was not sent yet: what calling a `Peer` gives."""

    @property
    def peer(self) -> str: ...

    def as_call(self, call_id: str) -> Call:
        """The request as a pause carries it."""

    def read(self, outcome: Outcome) -> Ok[T_co] | Failed:
        """`outcome` with its value as the declared type; one that does not fit is `Failed(INVALID)`."""


class Recorder(Protocol):
    """Answers calls from what was recorded, or ends the segment with a pause."""

    @property
    def replaying(self) -> bool: ...

    @property
    def position(self) -> int:
        """How many recorded pauses the run has passed, but for those within subtasks."""

    async def ask(self, calls: Sequence[UnsentCall[Any]], join: Join) -> list[Ok[Any] | Failed]:
        """One outcome per call, in call order. Does not return when there is none yet: the task pauses."""

    def skip(self, subtask: str) -> None:
        """Pass the calls that were recorded in a subtask, whose deliverable is known."""


class Recording:
    """The part of a context that only function agents use."""

    _recorder: Recorder | None

    def record_with(self, recorder: Recorder) -> None:
        """Answer this context's calls with `recorder`. For the code that runs function agents."""
        self._recorder = recorder

    @property
    def replaying(self) -> bool:
        """Whether the function runs again through a part it has finished before."""
        return self._recorder is not None and self._recorder.replaying

    @property
    def calls_are_not_recorded(self) -> bool:
        """Whether this is no function agent, so that nothing runs again but what a crash interrupted."""
        return self._recorder is None

    def pauses_passed(self, generation: int) -> int:
        """How many pauses of the task lie before the code that runs now. For the code that runs subtasks.

        Those within subtasks of a function agent do not count: when it is resumed, a subtask that is recorded does
        not pause again.
        """
        return generation if self._recorder is None else self._recorder.position

    def skip_calls_of(self, subtask: str) -> None:
        """Pass what a subtask asked its peers, as it does not run again. For the code that runs subtasks."""
        if self._recorder is not None:
            self._recorder.skip(subtask)

    @overload
    async def call(self, call: UnsentCall[T], /, *, return_errors: Literal[False] = False) -> T: ...
    @overload
    async def call(self, call: UnsentCall[T], /, *, return_errors: bool) -> T | Failed: ...
    async def call(self, call: UnsentCall[Any], /, *, return_errors: bool = False) -> Any:
        """The peer's answer; the task pauses until it is there.

        Args:
            call: what calling a `Peer` gave: `await ctx.call(flights(trip))`.
            return_errors: return a `Failed` instead of raising it.

        Raises:
            PeerFailed: the call has no result.
            ReplayMismatch: at this place, an earlier run of the function called something else.
        """
        [answer] = await self._gather((call,), ALL, return_errors, "ctx.call")
        return answer

    # Plain calls give values. With a join of its own, or with `return_errors`, a place may hold a `Failed`.
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
        """The peers' answers in the order of the calls, which run side by side; the task pauses once.

        Without `return_errors`, `gather` returns only what the join asks for, and else raises: with `ALL` every
        place holds a value; with `FIRST` or `AT_LEAST(k)` that many do, and the places of calls that failed, or
        that the join closed, hold a `Failed`. A join deadline that passes before raises as well.
        With `return_errors`, every call without a result is a `Failed` in its place, and nothing raises.

        Raises:
            PeerFailed: fewer results than the join asks for; names one call without a result.
            ReplayMismatch: at this place, an earlier run of the function called something else.
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
    # A call that was closed because of the others says least about what went wrong.
    failures.sort(key=lambda failure: failure[1].kind is FailureKind.CANCELLED)
    call, failed = failures[0]
    raise PeerFailed(call.peer, failed)
