"""A process's estimate of its database's clock."""

from __future__ import annotations

from datetime import UTC, datetime

from meshpoint.adapters.sql.sessions import DatabaseTime


class FakeMonotonic:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def time_at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def test_the_time_is_unknown_before_the_first_response() -> None:
    assert DatabaseTime().current_time is None


def test_time_advances_between_responses() -> None:
    clock = FakeMonotonic()
    time = DatabaseTime(clock)
    time.observe(5000.0, sent_at=100.0)
    clock.seconds += 30
    assert time.current_time == time_at(5030.0)


def test_a_slow_response_does_not_worsen_the_estimate() -> None:
    clock = FakeMonotonic()
    time = DatabaseTime(clock)
    time.observe(5000.0, sent_at=100.0)
    clock.seconds = 110.0
    # sent between 101 and 110 on the local clock, so 5000 + (102 - 100) is possible
    time.observe(5002.0, sent_at=101.0)
    assert time.current_time == time_at(5010.0)


def test_a_faster_response_improves_the_estimate() -> None:
    clock = FakeMonotonic()
    clock.seconds = 110.0
    time = DatabaseTime(clock)
    time.observe(5000.0, sent_at=100.0)  # up to ten seconds may have passed since
    time.observe(5008.0, sent_at=110.0)
    assert time.current_time == time_at(5008.0)


def test_a_step_of_the_databases_clock_is_followed() -> None:
    clock = FakeMonotonic()
    time = DatabaseTime(clock)
    time.observe(5000.0, sent_at=100.0)
    for now in (8600.0, 1400.0):
        time.observe(now, sent_at=100.0)
        assert time.current_time == time_at(now)
