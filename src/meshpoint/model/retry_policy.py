"""When failed work is tried again, and durations as users write them."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from random import random
from typing import TypeAlias

from meshpoint.errors import AgentMisbehaved
from meshpoint.model.error_text import escape_unprintable
from meshpoint.model.outcomes import FailureKind

Duration: TypeAlias = timedelta | float
"""A `timedelta`, or a number of seconds."""

_YEAR = 365.25 * 86_400
_MAX_PRINTED_YEARS = 1e9
"""More years are printed as a power of ten."""
_MAX_QUOTED_LENGTH = 100
_MAX_ATTEMPTS, _MAX_FACTOR = 1_000_000, 1000
_MAX_SECONDS = 3650 * 86_400
_UNIT = "durations are in seconds: timedelta(days=1)"


def duration_seconds(duration: Duration, name: str) -> float:
    """Convert `duration` to seconds. `name` is what the error calls it.

    Raises:
        AgentMisbehaved: it is negative, not a duration, or a number above a year, which is most
            likely meant as milliseconds.
    """
    if (problem := duration_problem(duration, name)) is not None:
        raise AgentMisbehaved("; ".join(problem))
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


def duration_problem(duration: object, name: str) -> tuple[str, str] | None:
    """What is wrong with `duration`, and what to write instead; `None` if it is valid."""
    if isinstance(duration, timedelta):
        too_small = duration < timedelta()
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        if isinstance(duration, float) and math.isnan(duration):
            return f"{name} is not a number", _UNIT
        if duration > _YEAR:
            seconds = min(duration, sys.float_info.max)  # larger integers cannot be divided
            years = seconds / _YEAR
            decimals = ".1f" if years < _MAX_PRINTED_YEARS else ".1e"
            return f"{name}: {seconds:.15g} s is {years:{decimals}} years", _UNIT
        too_small = duration < 0
    else:
        kind = type(duration).__name__
        return f"{name} must be a timedelta or a number of seconds, not {kind}", _UNIT
    return (f"{name} is {quote_value(duration)}", "it must not be negative") if too_small else None


def quote_value(value: object) -> str:
    """An invalid value for an error message: one short line, for any object."""
    try:
        text = str(value) if isinstance(value, int | float | timedelta) else repr(value)
    except Exception:  # integers of over 4,300 digits, and any code of a user's class
        text = f"a value of type {type(value).__name__}"
    text = escape_unprintable(text)
    return text if len(text) <= _MAX_QUOTED_LENGTH else f"{text[: _MAX_QUOTED_LENGTH - 1]}…"


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
        attempts, factor = self.max_attempts, self.backoff_factor
        if not (_is_number(attempts, int) and 1 <= attempts <= _MAX_ATTEMPTS):
            limits = f"an integer between 1 and {_MAX_ATTEMPTS:,}"
            raise AgentMisbehaved(f"max_attempts is {quote_value(attempts)}; it must be {limits}")
        if not (_is_number(factor, int, float) and 1 <= factor <= _MAX_FACTOR):
            limits = f"a number between 1 and {_MAX_FACTOR:,}"
            raise AgentMisbehaved(f"backoff_factor is {quote_value(factor)}; it must be {limits}")
        for name in ("initial_interval", "max_interval", "max_elapsed"):
            duration = getattr(self, name)
            if duration is None and name == "max_elapsed":
                continue
            if duration_seconds(duration, name) > _MAX_SECONDS:
                raise AgentMisbehaved(f"{name} is {duration}; it must be at most ten years")
        kinds = self.retry_on
        if isinstance(kinds, str) or not isinstance(kinds, Collection):
            problem = f"retry_on must be a list, such as ['error'], not {quote_value(kinds)}"
            raise AgentMisbehaved(problem)
        known = sorted(kind.value for kind in FailureKind)
        if unknown := [kind for kind in kinds if kind not in known]:
            problem = f"retry_on has {quote_value(unknown[0])}; the kinds are {known}"
            raise AgentMisbehaved(problem)

    def wait_before(
        self, attempt: int, kind: str, elapsed: float, *, at_least: float = 0.0
    ) -> float | None:
        """Seconds to wait before `attempt`, which is 2 or more; `None` after the last attempt.

        `kind` is how the last attempt failed, `elapsed` the seconds since the first one began. The
        wait is `at_least` this long, even if that is longer than `max_interval`.
        """
        if attempt > self.max_attempts or kind not in self.retry_on:
            return None
        first = duration_seconds(self.initial_interval, "initial_interval")
        longest = duration_seconds(self.max_interval, "max_interval")
        exponent = min(attempt - 2, 1000)
        try:
            wait = min(first * self.backoff_factor**exponent, longest) if first else 0.0
        except OverflowError:
            wait = longest
        if self.jitter:
            wait *= 1 - random() / 2
        wait = max(wait, at_least)
        if self.max_elapsed is not None:
            limit = duration_seconds(self.max_elapsed, "max_elapsed")
            return wait if elapsed + wait <= limit else None
        return wait


def _is_number(value: object, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def call_policy_problem(policy: object) -> tuple[str, str] | None:
    """The problem with the policy of a peer call, and its fix."""
    if not isinstance(policy, RetryPolicy):
        problem = f"retry must be a RetryPolicy, not {type(policy).__name__}"
        return problem, "retry=RetryPolicy(max_attempts=3)"
    if FailureKind.CANCELLED in policy.retry_on:
        return "retry_on has 'cancelled'", "leave it out: a cancelled call is never retried"
    return None
