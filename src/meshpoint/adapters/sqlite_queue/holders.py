"""Who holds messages, and who is dead.

Each open broker has a row whose `beat` rises while its process lives. Another is taken for dead when its beat
has stood still for a lease *of the observer's own clock*: no two processes need to agree on the time, and a
host that was suspended as a whole declares nobody dead.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass


@dataclass(slots=True)
class _LastHeartbeat:
    beat: int
    age: float = 0.0


class HeartbeatMonitor:
    """How long each holder's beat has stood still, as far as this process saw.

    Times are seconds. One look adds at most two intervals of age, so that an observer that was stopped itself
    first gives the others time to beat.
    """

    def __init__(self, lease: float, interval: float, now: float) -> None:
        self._lease, self._max_step, self._checked_at = lease, 2 * interval, now
        self._last_heartbeats: dict[int, _LastHeartbeat] = {}

    def find_dead(self, beats: dict[int, int], now: float) -> list[int]:
        """The holders among `beats` that have been still for a lease."""
        elapsed, self._checked_at = min(now - self._checked_at, self._max_step), now
        before, self._last_heartbeats = self._last_heartbeats, {}
        for holder, beat in beats.items():
            known = before.get(holder)
            still = known is not None and known.beat == beat
            self._last_heartbeats[holder] = _LastHeartbeat(beat, known.age + elapsed if known and still else 0.0)
        return [holder for holder, last in self._last_heartbeats.items() if last.age >= self._lease]


class Holders:
    """The rows of `meshpoint_queue_holder`. Each method runs inside the caller's transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def register(self) -> int:
        """A new holder."""
        holder = self._db.execute("INSERT INTO meshpoint_queue_holder DEFAULT VALUES").lastrowid
        assert holder is not None
        return holder

    def exists(self, holder: int) -> bool:
        """Whether nobody took it for dead."""
        query = "SELECT 1 FROM meshpoint_queue_holder WHERE id = ?"
        return self._db.execute(query, (holder,)).fetchone() is not None

    def record_heartbeat(self, holder: int) -> None:
        """Show that it lives."""
        self._db.execute("UPDATE meshpoint_queue_holder SET beat = beat + 1 WHERE id = ?", (holder,))

    def heartbeats(self) -> dict[int, int]:
        """The beat of every holder."""
        # A beat may be anything, even a text that cannot be read.
        return dict(self._db.execute("SELECT id, CAST(beat AS INTEGER) FROM meshpoint_queue_holder").fetchall())
