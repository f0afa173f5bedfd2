"""Holders of unacked messages, and detection of holders whose process has died.

Each open broker is a holder, with a row whose `beat` increases while its process lives. A broker
declares another one dead if that beat has not changed for a lease *by the observer's own clock*.
So processes need not agree on the time, and after the whole host was suspended, no holder is
declared dead.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass


@dataclass(slots=True)
class _LastHeartbeat:
    beat: int
    age: float = 0.0


class HeartbeatMonitor:
    """Tracks for how long the beat of each holder has not changed, as observed by this process.

    Times are in seconds. One observation adds at most two heartbeat intervals, so that an observer
    that was stopped itself gives the others time to beat first.
    """

    def __init__(self, lease: float, interval: float, now: float) -> None:
        self._lease, self._max_step, self._checked_at = lease, 2 * interval, now
        self._last_heartbeats: dict[int, _LastHeartbeat] = {}

    def find_dead(self, beats: dict[int, int], now: float) -> list[int]:
        """The holders among `beats` whose beat has not changed for a lease."""
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
        """Insert a new holder and return its id, which is never reused."""
        holder = self._db.execute("INSERT INTO meshpoint_queue_holder DEFAULT VALUES").lastrowid
        assert holder is not None
        return holder

    def exists(self, holder: int) -> bool:
        """Whether the holder's row still exists; a broker that declares it dead deletes it."""
        query = "SELECT 1 FROM meshpoint_queue_holder WHERE id = ?"
        return self._db.execute(query, (holder,)).fetchone() is not None

    def record_heartbeat(self, holder: int) -> None:
        """Increase the holder's beat."""
        self._db.execute("UPDATE meshpoint_queue_holder SET beat = beat + 1 WHERE id = ?", (holder,))

    def heartbeats(self) -> dict[int, int]:
        """The beat of every holder."""
        # Another program may have written any value, even a text that cannot be decoded.
        return dict(self._db.execute("SELECT id, CAST(beat AS INTEGER) FROM meshpoint_queue_holder").fetchall())
