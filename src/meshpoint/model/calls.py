"""What a segment returns: `Paused` with the calls it waits for, or `Done` with its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Generic, TypeVar

from pydantic import JsonValue

from meshpoint.errors import AgentMisbehaved

T_co = TypeVar("T_co", covariant=True)


LONGEST = timedelta(days=3650)
"""Maximum timeout or deadline; an instant that far away can still be stored and read back."""


def check_duration(duration: object, name: str) -> None:
    """Check that `duration` can be stored.

    Raises:
        AgentMisbehaved: it is not a duration, not positive, or longer than ten years.
    """
    if not isinstance(duration, timedelta):
        raise AgentMisbehaved(f"{name} must be a timedelta, not {type(duration).__name__}")
    if not timedelta() < duration <= LONGEST:
        raise AgentMisbehaved(f"{name} is {duration}; it must be positive and at most ten years")


@dataclass(frozen=True, slots=True)
class Join:
    """How many outcomes end a pause.

    `needed=None` waits for an outcome of any kind from every call. A number counts results (`Ok`) only, and
    is also met when it no longer can be: when every call has an outcome. `deadline` runs from the
    checkpoint's commit and resumes with what is there.
    """

    needed: int | None = None
    deadline: timedelta | None = None

    def __post_init__(self) -> None:
        if self.needed is not None and self.needed < 1:
            raise AgentMisbehaved(f"a join needs at least one result, not {self.needed}")
        if self.deadline is not None:
            check_duration(self.deadline, "a join deadline")

    def within(self, deadline: timedelta) -> Join:
        """The same join, resumed after `deadline` with what is there."""
        return replace(self, deadline=deadline)

    def met(self, *, total: int, completed: int, succeeded: int) -> bool:
        """Whether a task that waits for `total` calls may go on."""
        return completed >= total or (self.needed is not None and succeeded >= self.needed)


ALL = Join()
"""A join that an outcome of any kind from every call meets."""
FIRST = Join(needed=1)
"""A join that one result meets."""


def AT_LEAST(k: int) -> Join:
    """A join that `k` results meet."""
    return Join(needed=k)


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a peer. `id` is the agent's own name for it, unique within its pause.

    `timeout` is absolute and runs from the checkpoint's commit; None means the agent's `peer_timeout`.
    `idle_timeout`, when given, fails the call earlier if the peer sends no status update for that long.
    """

    id: str
    peer: str
    input: JsonValue
    timeout: timedelta | None = None
    idle_timeout: timedelta | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "idle_timeout"):
            if (duration := getattr(self, name)) is not None:
                check_duration(duration, f"call {self.id!r}: {name}")


@dataclass(frozen=True, slots=True)
class Paused:
    """The segment ended: resume with `state` when `join` is met over `calls`.

    Raises:
        AgentMisbehaved: no calls, two calls with one id, or a join that needs more results than calls.
    """

    calls: Sequence[Call]
    state: bytes
    join: Join = ALL

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))
        ids = [call.id for call in self.calls]
        if not ids:
            raise AgentMisbehaved("Paused needs at least one call")
        if len(set(ids)) != len(ids):
            raise AgentMisbehaved(
                f"Paused has two calls with one id: {sorted(i for i in ids if ids.count(i) > 1)[0]!r}"
            )
        if self.join.needed is not None and self.join.needed > len(ids):
            raise AgentMisbehaved(f"the join needs {self.join.needed} results of {len(ids)} calls")
        if not isinstance(self.state, bytes):
            raise AgentMisbehaved(f"Paused.state must be bytes, not {type(self.state).__name__}")


@dataclass(frozen=True)  # with slots, Done[int](...) raises: typing cannot note the parameter
class Done(Generic[T_co]):
    """The task ended with `output`."""

    output: T_co
    artifacts: tuple[dict[str, JsonValue], ...] = field(default=())
