"""When failed work is tried again, and durations as users write them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from random import random
from typing import TypeAlias

from meshpoint.errors import AgentMisbehaved
from meshpoint.model.outcomes import FailureKind

Duration: TypeAlias = timedelta | float
"""A `timedelta`, or a number of seconds."""

_YEAR = 365.25 * 86_400


def duration_seconds(duration: Duration, name: str) -> float:
    """Convert `duration` to seconds. `name` is what the error calls it.

    Raises:
        AgentMisbehaved: it is negative, not a duration, or a number above a year, which is most
            likely meant as milliseconds.
    """
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        seconds = float(duration)
        if seconds > _YEAR:
            raise AgentMisbehaved(
                f"{name}: {duration} s is {seconds / _YEAR:.1f} years; "
                "durations are in seconds: timedelta(days=1)"
            )
    else:
        raise AgentMisbehaved(
            f"{name} must be a timedelta or a number of seconds, not {type(duration).__name__}"
        )
    if not seconds >= 0:
        raise AgentMisbehaved(f"{name} is {duration}; it must not be negative")
    return seconds


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When to try failed work again.

    Attributes:
        max_attempts: number of attempts, with the first.
        initial_interval: wait before the second attempt.
        backoff_factor: how much longer each further wait is.
        max_interval: longest wait.
        jitter: shorten each wait at random, to half at most.
        retry_on: kinds of failures to try again after.
        max_elapsed: limit for all attempts and waits together; no attempt starts after it.

    Raises:
        AgentMisbehaved: a value makes no sense. The message names it.
    """

    max_attempts: int = 3
    initial_interval: Duration = 1.0
    backoff_factor: float = 2.0
    max_interval: Duration = 100.0
    jitter: bool = True
    retry_on: Collection[FailureKind | str] = ("error", "timeout")
    max_elapsed: Duration | None = None

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise AgentMisbehaved(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if not self.backoff_factor >= 1:
            raise AgentMisbehaved(f"backoff_factor is {self.backoff_factor}; it must be 1 or more")
        for name in ("initial_interval", "max_interval", "max_elapsed"):
            if (duration := getattr(self, name)) is not None:
                duration_seconds(duration, name)
        known = {kind.value for kind in FailureKind}
        if unknown := sorted({str(kind) for kind in self.retry_on} - known):
            raise AgentMisbehaved(f"retry_on has {unknown[0]!r}; the kinds are {sorted(known)}")

    def wait_before(self, attempt: int, kind: str, elapsed: float) -> float | None:
        """Seconds to wait before `attempt`, which is 2 or more; `None` after the last attempt.

        `kind` is how the last attempt failed, `elapsed` the seconds since the first one began.
        """
        if attempt > self.max_attempts or kind not in self.retry_on:
            return None
        first = duration_seconds(self.initial_interval, "initial_interval")
        longest = duration_seconds(self.max_interval, "max_interval")
        exponent = min(attempt - 2, 1000)
        try:
            wait = min(first * self.backoff_factor**exponent, longest)
        except OverflowError:
            wait = longest
        if self.jitter:
            wait *= 1 - random() / 2
        if self.max_elapsed is not None:
            limit = duration_seconds(self.max_elapsed, "max_elapsed")
            return wait if elapsed + wait <= limit else None
        return wait
