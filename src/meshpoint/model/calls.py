"""Return values of a segment: `Paused` with its peer calls, or `Done` with a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Generic, TypeVar

from pydantic import JsonValue

from meshpoint.errors import AgentMisbehaved
from meshpoint.model.error_text import quantity
from meshpoint.model.retry_policy import (
    Duration,
    RetryPolicy,
    call_policy_problem,
    duration_seconds,
)

_T_co = TypeVar("_T_co", covariant=True)


MAX_DURATION = timedelta(days=3650)
"""Maximum timeout or deadline. The resulting instant can still be stored and read back."""


def to_timedelta(duration: Duration, name: str) -> timedelta:
    """Convert a `timedelta` or a number of seconds. Errors call it `name`.

    Raises:
        AgentMisbehaved: it is not a duration, or a number above a year.
    """
    if isinstance(duration, timedelta):
        return duration
    return timedelta(seconds=duration_seconds(duration, name))


def _check_duration(duration: object, name: str) -> None:
    """Check that `duration` can be stored.

    Raises:
        AgentMisbehaved: it is not a timedelta, not positive, or longer than ten years.
    """
    if not isinstance(duration, timedelta):
        raise AgentMisbehaved(f"{name} must be a timedelta, not {type(duration).__name__}")
    if not timedelta() < duration <= MAX_DURATION:
        raise AgentMisbehaved(f"{name} is {duration}; it must be positive and at most ten years")


@dataclass(frozen=True, slots=True)
class Join:
    """The condition that ends a pause.

    `needed=None` waits for an outcome of any kind from every call. A number counts successful
    results (`Ok`) only; the join also completes when every call has an outcome, so that the number
    can no longer be reached. `deadline` is measured from the checkpoint's commit; when it passes,
    the task resumes with the outcomes received so far.
    """

    needed: int | None = None
    deadline: timedelta | None = None

    def __post_init__(self) -> None:
        if self.needed is not None and self.needed < 1:
            raise AgentMisbehaved(f"a join needs at least one result, not {self.needed}")
        if self.deadline is not None:
            _check_duration(self.deadline, "a join deadline")

    def within(self, deadline: Duration) -> Join:
        """The same join with a deadline, after which the task resumes with partial results."""
        return replace(self, deadline=to_timedelta(deadline, "a join deadline"))

    def met(self, *, total: int, completed: int, succeeded: int) -> bool:
        """Whether a task that waits for `total` calls can resume."""
        return completed >= total or (self.needed is not None and succeeded >= self.needed)


ALL = Join()
"""Completes when every call has an outcome of any kind."""
FIRST = Join(needed=1)
"""Completes at the first result."""


def AT_LEAST(k: int) -> Join:
    """A join that completes after `k` results."""
    return Join(needed=k)


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a peer.

    Attributes:
        id: chosen by the agent and unique within the pause.
        peer: name of the called agent.
        input: the peer's input.
        timeout: absolute, measured from the checkpoint's commit. `None` is no limit.
        idle_timeout: fail the call if the peer gives no sign of life for this long. `None` without
            a `timeout` is the agent's `peer_timeout`, else no limit.
        retry: how to retry after a failure. Each attempt is a separate task of the peer, with the
            full timeouts. `None` is one attempt.
    """

    id: str
    peer: str
    input: JsonValue
    timeout: timedelta | None = None
    idle_timeout: timedelta | None = None
    retry: RetryPolicy | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "idle_timeout"):
            if (duration := getattr(self, name)) is not None:
                _check_duration(duration, f"call {self.id!r}: {name}")
        if self.retry is not None and (problem := call_policy_problem(self.retry)) is not None:
            raise AgentMisbehaved(f"call {self.id!r}: {'; '.join(problem)}")


@dataclass(frozen=True, slots=True)
class Paused:
    """Ends a segment until `join` is complete over `calls`; then the task resumes with `state`.

    `append` is added to the task's log, which the agent receives with `state` on resume. A pause
    writes only the new bytes, and `state` only if it has changed. A pause without `append` ends
    the log, so its `state` must stand alone. The agent must be a `meshpoint.ports.agent.ReadsLog`.

    Raises:
        AgentMisbehaved: there are no calls, two calls have the same id, or the join needs more
            results than there are calls.
    """

    calls: Sequence[Call]
    state: bytes
    join: Join = ALL
    append: bytes | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))
        ids = [call.id for call in self.calls]
        if not ids:
            raise AgentMisbehaved("Paused needs at least one call")
        if len(set(ids)) != len(ids):
            duplicate = sorted(i for i in ids if ids.count(i) > 1)[0]
            raise AgentMisbehaved(f"Paused has two calls with the same id: {duplicate!r}")
        if self.join.needed is not None and self.join.needed > len(ids):
            raise AgentMisbehaved(
                f"the join needs {quantity(self.join.needed, 'result')} but there "
                f"{'is' if len(ids) == 1 else 'are'} only {quantity(len(ids), 'call')}"
            )
        if not isinstance(self.state, bytes):
            raise AgentMisbehaved(f"Paused.state must be bytes, not {type(self.state).__name__}")
        if not isinstance(self.append, bytes | None):
            raise AgentMisbehaved(f"Paused.append must be bytes, not {type(self.append).__name__}")


@dataclass(frozen=True)  # no slots: typing sets __orig_class__, so Done[int](...) would raise
class Done(Generic[_T_co]):
    """Ends the task successfully with `output`."""

    output: _T_co
    artifacts: tuple[dict[str, JsonValue], ...] = field(default=())
