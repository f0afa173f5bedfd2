"""Waits that no peer answers. They are calls of a pause, with a reserved name in place of a peer.

An older release stores, counts and closes them like calls. It cannot resume a task that uses them,
because the stored format of its state says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from pydantic import JsonValue

from meshpoint.errors import AgentMisbehaved
from meshpoint.model.calls import MAX_DURATION, Call
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.retry_policy import Duration, RetryPolicy, duration_seconds

WAIT_PREFIX = "~"
"""Prefix of the reserved names. No agent can have such a name."""
SLEEP_PEER = f"{WAIT_PREFIX}sleep"
QUESTION_PREFIX = f"{WAIT_PREFIX}?"
"""Prefix of the names of questions (`meshpoint.model.questions`)."""
SIGNAL_PREFIX = f"{WAIT_PREFIX}!"
"""Prefix of the names of signals (`meshpoint.model.signals`)."""

_SLEEP_SECONDS = "x-sleep-seconds"
_SLEEP_UNTIL = "x-sleep-until"

_EXPIRED_BY_OLDER_RELEASE = Failed(FailureKind.TIMEOUT, "the peer did not answer in time")
INTERRUPTED = Failed(FailureKind.TIMEOUT, "the sleep was cut short by a deadline")
"""The outcome of a sleep when the deadline of its join or its task passes first."""

_UNANSWERED = Failed(FailureKind.TIMEOUT, "nobody answered in time")
_NO_SIGNAL = Failed(FailureKind.TIMEOUT, "no signal arrived in time")


def is_wait(peer: str) -> bool:
    """Whether a call to `peer` is a wait that no peer answers."""
    return peer.startswith(WAIT_PREFIX)


def is_question(peer: str) -> bool:
    """Whether a call to `peer` is a question, which can be answered."""
    return peer.startswith(QUESTION_PREFIX)


def is_signal(peer: str) -> bool:
    """Whether a call to `peer` waits for a signal."""
    return peer.startswith(SIGNAL_PREFIX)


def wait_kind(peer: str) -> str:
    """What a call to `peer` waits for: "peer", "question", "signal" or "sleep"."""
    if not is_wait(peer):
        return "peer"
    if is_question(peer):
        return "question"
    return "signal" if is_signal(peer) else "sleep"


def display_name(peer: str) -> str:
    """The name of a call's peer or wait, for people: "flights" or "sleep"."""
    plain = peer.removeprefix(QUESTION_PREFIX).removeprefix(SIGNAL_PREFIX)
    return plain.removeprefix(WAIT_PREFIX)


@dataclass(frozen=True, slots=True)
class Sleep(Call):
    """A wait for time: `Sleep("nap", timedelta(hours=1))` or `Sleep("nap", until=instant)`.

    Its outcome is `Ok(None)`. A duration counts from the checkpoint's commit, on the clock of the
    database.

    Attributes:
        duration: a `timedelta` or a number of seconds.
        until: the instant at which it ends, with a time zone.

    Raises:
        AgentMisbehaved: the duration is negative or too long, the instant has no time zone, or
            both or neither of them are given.
    """

    peer: str = field(default=SLEEP_PEER, init=False)
    input: JsonValue = field(default=None, init=False)
    timeout: timedelta | None = field(default=None, init=False)
    idle_timeout: timedelta | None = field(default=None, init=False)
    retry: RetryPolicy | None = field(default=None, init=False)
    duration: Duration | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        if (self.duration is None) == (self.until is None):
            raise AgentMisbehaved(f"sleep {self.id!r} needs either a duration or until=")
        if self.duration is not None:
            check_sleep(self.duration)
        if self.until is not None:
            check_instant(self.until, "until")

    def has_passed(self, now: datetime) -> bool:
        """Whether it ends at once."""
        if self.until is not None:
            return self.until <= now
        return self.duration is None or not duration_seconds(self.duration, "sleep")

    def to_headers(self) -> dict[str, str | int | float]:
        """The description of the sleep that is stored with its call."""
        if self.until is not None:
            return {_SLEEP_UNTIL: self.until.timestamp()}
        return {_SLEEP_SECONDS: duration_seconds(self.duration or 0.0, "sleep")}


def sleep_end(headers: Mapping[str, str | int | float], now: float) -> float:
    """When a sleep with these stored headers ends if it begins at `now`, in epoch seconds."""
    until = headers.get(_SLEEP_UNTIL)
    return now + float(headers.get(_SLEEP_SECONDS, 0.0)) if until is None else float(until)


def check_sleep(duration: Duration) -> None:
    """Check the duration of a sleep.

    Raises:
        AgentMisbehaved: it is negative, too long, or not a duration.
    """
    if duration_seconds(duration, "sleep") > MAX_DURATION.total_seconds():
        raise AgentMisbehaved(f"sleep: {duration} is too long; it must be at most ten years")


def check_instant(instant: datetime, name: str) -> datetime:
    """Return `instant` in UTC.

    Raises:
        AgentMisbehaved: it is not a datetime with a time zone, or too far away.
    """
    if not isinstance(instant, datetime):
        raise AgentMisbehaved(f"{name} must be a datetime, not {type(instant).__name__}")
    if instant.utcoffset() is None:
        raise AgentMisbehaved(f"{name} has no time zone: datetime.now(UTC), or ctx.sleep")
    if instant.year >= _MAX_YEAR:
        raise AgentMisbehaved(f"{name} is {instant}; it must be before the year {_MAX_YEAR}")
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        raise AgentMisbehaved(f"{name} is {instant}; it must be after the year 0") from None


_MAX_YEAR = 7000
"""Before `NO_DEADLINE`, which is how a missing deadline is stored."""


def overdue_outcome(peer: str) -> Failed:
    """The outcome of a wait whose deadline has passed."""
    if peer == SLEEP_PEER:
        return INTERRUPTED
    return _NO_SIGNAL if is_signal(peer) else _UNANSWERED


def received_outcome(peer: str, outcome: Outcome) -> Outcome:
    """The outcome of a call as agents receive it.

    The sweeper of an older release treats the end of a sleep as the timeout of a peer. The record
    of who answered a question is for people only.
    """
    if peer.startswith(QUESTION_PREFIX) and outcome.artifacts:
        return Ok(outcome.value) if isinstance(outcome, Ok) else replace(outcome, artifacts=())
    if peer == SLEEP_PEER and outcome == _EXPIRED_BY_OLDER_RELEASE:
        return Ok(None)
    return outcome
