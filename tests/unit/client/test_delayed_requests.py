"""The options that delay the start of a task."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from meshpoint.client.requests import build_message, check_request
from meshpoint.errors import InvalidOption
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Address, Message

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def message(**options: Any) -> Message:
    request = check_request(AgentName("agent"), 1, options)
    return build_message(request, AgentName("client"), Address("client.resp"), NOW)


def test_a_delay_counts_from_now_and_the_timeout_from_the_start() -> None:
    headers = message(delay=timedelta(minutes=1), timeout=10).headers
    assert headers["x-start-at"] == NOW.timestamp() + 60
    assert headers["x-deadline"] == NOW.timestamp() + 70


def test_a_start_may_be_an_instant() -> None:
    start_at = NOW + timedelta(days=1)
    assert message(start_at=start_at).headers["x-start-at"] == start_at.timestamp()
    assert "x-start-at" not in message().headers
    assert "x-start-at" not in message(delay=0).headers


def test_a_past_start_does_not_shorten_the_timeout() -> None:
    headers = message(start_at=NOW - timedelta(days=1), timeout=10).headers
    assert headers["x-deadline"] == NOW.timestamp() + 10


@pytest.mark.parametrize("year", [1, 1960, 1970])
def test_a_start_before_all_clocks_is_at_once(year: int) -> None:
    assert "x-start-at" not in message(start_at=datetime(year, 1, 1, tzinfo=UTC)).headers


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"start_at": datetime(2030, 1, 1)},  # noqa: DTZ001
            "start_at has no time zone: datetime.now(UTC), or delay=",
        ),
        ({"start_at": 12}, "start_at: must be a datetime, not int"),
        ({"start_at": NOW, "delay": 1}, "give either start_at or delay"),
        ({"start_at": NOW.replace(year=8000)}, "it must be before the year 7000"),
        (
            {"start_at": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))},
            "it must be after the year 0",
        ),
        ({"delay": 86_400_000}, "durations are in seconds: timedelta(days=1)"),
        ({"delay": -1}, "delay is -1; it must not be negative"),
        ({"delay": timedelta(days=4000)}, "it must be at most ten years"),
    ],
)
def test_starts_that_make_no_sense_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        message(**options)
    assert problem in str(refused.value)
