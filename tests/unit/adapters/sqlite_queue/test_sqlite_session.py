"""When a broker considers another one dead."""

from __future__ import annotations

import pytest

from meshpoint.adapters.sqlite_queue.session import HeartbeatMonitor


@pytest.fixture
def pulse() -> HeartbeatMonitor:
    return HeartbeatMonitor(lease=5.0, interval=1.0, now=0.0)


def test_a_process_that_beats_is_alive(pulse: HeartbeatMonitor) -> None:
    for second in range(100):
        assert pulse.find_dead({7: second}, float(second)) == []


def test_a_process_without_a_beat_for_a_lease_is_dead(pulse: HeartbeatMonitor) -> None:
    assert pulse.find_dead({7: 3, 8: 0}, 1.0) == []
    for second in range(2, 6):
        assert pulse.find_dead({7: 3, 8: second}, float(second)) == []
    assert pulse.find_dead({7: 3, 8: 6}, 6.0) == [7]


def test_a_late_beat_counts(pulse: HeartbeatMonitor) -> None:
    for second in range(1, 6):
        assert pulse.find_dead({7: 3}, float(second)) == []
    assert pulse.find_dead({7: 4}, 6.0) == []
    assert pulse.find_dead({7: 4}, 7.0) == []


def test_a_stalled_observer_waits_for_a_beat(pulse: HeartbeatMonitor) -> None:
    assert pulse.find_dead({7: 3}, 1.0) == []
    assert pulse.find_dead({7: 3}, 1000.0) == []
    assert pulse.find_dead({7: 4}, 1001.0) == []


def test_a_process_that_left_is_forgotten(pulse: HeartbeatMonitor) -> None:
    for second in range(1, 6):
        assert pulse.find_dead({7: 3}, float(second)) == []
    assert pulse.find_dead({}, 6.0) == []
    assert pulse.find_dead({7: 3}, 7.0) == []
