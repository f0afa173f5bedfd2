"""Checks of retried calls: how many attempts there are, why, when, and which outcome counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from meshpoint.adapters.inprocess.rows import CallRow, TaskRow
from meshpoint.model.call_attempts import CallAttempt, superseded
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome, decode_outcome
from meshpoint.model.retry_policy import duration_seconds

from .retrying_agents import FINAL, RETRYABLE
from .values import DATABASE, CheckInvariant

_MAX_SKEW = timedelta(seconds=0.5)
"""Maximum difference between a replica's clock, which is the clock of its own store, and `now`."""
_ROUNDING = timedelta(milliseconds=1)


class AttemptLedger:
    """Checks the attempts in every written row, and the requests that are sent for them."""

    def __init__(self, check: CheckInvariant, now: Callable[[], datetime]) -> None:
        self._check, self._now = check, now
        self._attempts: dict[tuple[str, str, int, str], list[str]] = defaultdict(list)
        self._outcomes: dict[tuple[str, str, int, str], bytes] = {}
        self._due: dict[str, datetime] = {}

    def check_row(self, store_name: str, row: TaskRow) -> None:
        """Check the attempts at the calls of `row`."""
        if row.state.is_final:
            return
        current = [call.call_id for call in row.current_calls]
        self._check(
            len(current) == len(set(current)), f"{row.task_id}: two open attempts: {current}"
        )
        done = sum(call.outcome is not None for call in row.current_calls)
        self._check(
            row.generation == 0 or (row.completed, row.expected) == (done, len(current)),
            f"{row.task_id}: counted {row.completed} of {row.expected} outcomes, "
            f"but has {done} of {len(current)}",
        )
        calls = [call for call in row.calls.values() if call.attempt is not None]
        for call in sorted(calls, key=lambda call: call.attempt.number if call.attempt else 0):
            assert call.attempt is not None
            self._check_attempt(store_name, row, call, call.attempt)

    def check_sent(self, sub_task_id: str) -> None:
        """Check that the request of an attempt is not sent before it is due."""
        due = self._due.get(sub_task_id)
        early = due is not None and self._now() < due
        self._check(not early, f"attempt {sub_task_id} was sent before {due}")

    def _check_attempt(
        self, store_name: str, row: TaskRow, call: CallRow, attempt: CallAttempt
    ) -> None:
        is_current = call.generation >= 0
        generation = call.generation if is_current else superseded(call.generation)
        key = store_name, row.task_id, generation, call.call_id
        attempts = self._attempts[key]
        if call.sub_task_id not in attempts:
            attempts.append(call.sub_task_id)
            self._check(
                attempt.number == len(attempts) <= attempt.policy.max_attempts,
                f"attempt {attempt.number} at call {key} is number {len(attempts)} of its rows",
            )
            if attempt.number > 1:
                previous = row.calls.get(attempts[-2])  # type: ignore[call-overload]
                self._check_follows(store_name, key, call, attempt, previous)
        if not is_current or call.outcome is None:
            return
        first = self._outcomes.setdefault(key, call.outcome)
        self._check(
            first == call.outcome, f"call {key} has two outcomes: {first!r}, {call.outcome!r}"
        )
        self._check(
            not _must_be_retried(row, attempt, decode_outcome(call.outcome)),
            f"call {key} failed for good after attempt {attempt.number}: {call.outcome!r}",
        )

    def _check_follows(
        self,
        store_name: str,
        key: Sequence[object],
        call: CallRow,
        attempt: CallAttempt,
        previous: CallRow | None,
    ) -> None:
        """Check that an attempt follows a failure that allows it, after its wait."""
        policy, began_at = attempt.policy, attempt.began_at
        outcome = None if previous is None or not previous.outcome else previous.outcome
        failed = None if outcome is None else decode_outcome(outcome)
        self._check(
            isinstance(failed, Failed)
            and failed.kind in policy.retry_on
            and failed.kind is not FailureKind.CANCELLED
            and failed.message != FINAL,
            f"attempt {attempt.number} at call {key} follows {failed}",
        )
        assert call.created_at is not None
        first = duration_seconds(policy.initial_interval, "initial_interval")
        longest = duration_seconds(policy.max_interval, "max_interval")
        wait = min(first * policy.backoff_factor ** (attempt.number - 2), longest)
        least = timedelta(seconds=wait / 2 if policy.jitter else wait) - _ROUNDING
        self._check(
            call.send_at - call.created_at >= least,
            f"attempt {attempt.number} at call {key} waits only until {call.send_at}",
        )
        if policy.max_elapsed is not None:
            limit = duration_seconds(policy.max_elapsed, "max_elapsed")
            self._check(
                call.send_at.timestamp() - began_at <= limit + _ROUNDING.total_seconds(),
                f"attempt {attempt.number} at call {key} begins after {limit} s",
            )
        skew = timedelta() if store_name == DATABASE else _MAX_SKEW
        self._due[call.sub_task_id] = call.send_at - _ROUNDING - skew


def _must_be_retried(row: TaskRow, attempt: CallAttempt, outcome: Outcome) -> bool:
    """Whether nothing but the number of attempts could make this failure final."""
    if isinstance(outcome, Ok) or attempt.number >= attempt.policy.max_attempts:
        return False
    is_limited = row.requester.deadline or row.join_deadline or attempt.policy.max_elapsed
    is_retryable = outcome.kind is FailureKind.TIMEOUT or outcome.message == RETRYABLE
    return not is_limited and is_retryable and outcome.kind in attempt.policy.retry_on
