"""Attempts at a call, as the database keeps them."""

from __future__ import annotations

from datetime import timedelta

from meshpoint import RetryPolicy
from meshpoint.model.call_attempts import CallAttempt
from meshpoint.model.outcomes import FailureKind


def test_a_policy_for_more_than_a_year_is_kept() -> None:
    policy = RetryPolicy(max_attempts=9, max_elapsed=timedelta(days=730), jitter=False)
    attempt = CallAttempt.decode(CallAttempt(policy, None, 0.0).encode())
    assert attempt is not None
    following = attempt.next(FailureKind.ERROR, 700 * 86_400.0, ())
    assert following is not None
    assert following.attempt.next(FailureKind.ERROR, 731 * 86_400.0, ()) is None
