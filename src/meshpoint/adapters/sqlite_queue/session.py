"""One broker's connection to the file, and its existence as a holder. Used by one thread."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshpoint.adapters.sqlite_queue.holders import Holders, Pulse
from meshpoint.adapters.sqlite_queue.jobs import Consumer, Job, Turn
from meshpoint.adapters.sqlite_queue.queues import Limits, Queues
from meshpoint.adapters.sqlite_queue.schema import connect, remove_impossible_ids, transaction
from meshpoint.model.ids import AgentName, ReplicaId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Durations in seconds, and limits; see `SqliteBroker`."""

    lease: float
    private_ttl: float
    poll_interval: float
    busy_timeout: float
    delivery_limit: int
    limits: Limits

    @property
    def beat_interval(self) -> float:
        """How often a holder shows that it lives."""
        return self.lease / 5


class Session:
    """Transactions on the file as one holder.

    A broker that was stopped for longer than its lease finds its holder gone, and what it held given back. It
    then goes on as a new holder; settling what it held before finds nothing and changes nothing.

    Raises, here and in `transact`:
        sqlite3.Error: nothing was written; or, from COMMIT, perhaps everything was, and the next transaction
            gives up this holder.
    """

    def __init__(self, path: Path, namespace: str, tuning: Tuning) -> None:
        self._private_ttl = tuning.private_ttl
        self._db = connect(path, tuning.busy_timeout)
        self._holders = Holders(self._db)
        self._queues = Queues(self._db, namespace, tuning.delivery_limit, tuning.limits)
        self._pulse = Pulse(tuning.lease, tuning.beat_interval, time.monotonic())
        self._private: set[tuple[AgentName, ReplicaId]] = set()
        self._version = -1
        self._in_doubt = False
        self._untidy = ""
        try:
            with transaction(self._db):
                remove_impossible_ids(self._db)
                self._holder = self._holders.register()
        except BaseException:
            self._db.close()
            raise

    def own(self, agent: AgentName, replica: ReplicaId) -> None:
        """Keep this private queue for as long as the broker is open."""
        self._private.add((agent, replica))

    def changed(self) -> bool:
        """Whether another connection committed something since the last look. Costs microseconds."""
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        changed, self._version = version != self._version, version
        return bool(changed)

    def has_ready(self, consumers: Sequence[Consumer]) -> bool:
        """Whether a consumer with room has something to claim."""
        return any(each.room and self._queues.has_ready(each.address) for each in consumers)

    def transact(self, jobs: Sequence[Job[Any]], consumers: Sequence[Consumer], *, beat: bool) -> Turn:
        """Run `jobs` and claim what `consumers` have room for, in one transaction."""
        try:
            return self._transact(jobs, consumers, beat=beat)
        except sqlite3.OperationalError as error:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            if not full or not self._has_ids_again():
                raise
        return self._transact(jobs, consumers, beat=beat)

    def _has_ids_again(self) -> bool:
        """Whether ids, and not the disk, were used up, and are no longer."""
        with transaction(self._db):
            return remove_impossible_ids(self._db)

    def _transact(self, jobs: Sequence[Job[Any]], consumers: Sequence[Consumer], *, beat: bool) -> Turn:
        self._sync(power_safe=any(job.durable for job in jobs))
        set_aside = self._queues.set_aside
        self._db.execute("BEGIN IMMEDIATE")
        try:
            holder = self._still_holder(consumers)
            if beat:
                self._beat(holder)
            results = [(job.future, job.run(self._queues, holder)) for job in jobs]
            deliveries = [
                (consumer, claimed)
                for consumer in consumers
                if consumer.room
                for claimed in self._queues.claim(consumer.address, holder, consumer.room)
            ]
        except BaseException:
            self._roll_back()
            raise
        self._commit()
        self._holder = holder
        for consumer, claimed in deliveries:
            consumer.held.add(claimed.key)
        return Turn(results, [], deliveries, look_again=self._queues.set_aside > set_aside)

    def close(self) -> None:
        """Give everything back and close the file."""
        try:
            with transaction(self._db):
                self._queues.dissolve(self._holder)
        finally:
            self._db.close()

    def _sync(self, *, power_safe: bool) -> None:
        # A lost claim, ack or beat only delivers again; what was published and confirmed must be on the disk.
        self._db.execute(f"PRAGMA synchronous = {'FULL' if power_safe else 'NORMAL'}")

    def _still_holder(self, consumers: Sequence[Consumer]) -> int:
        if not self._in_doubt and self._holders.is_there(self._holder):
            return self._holder
        self._queues.dissolve(self._holder)
        for consumer in consumers:
            consumer.held.clear()
        holder = self._holders.register()
        for agent, replica in self._private:
            self._queues.declare_private(agent, replica, holder)
        return holder

    def _beat(self, holder: int) -> None:
        self._holders.beat(holder)
        self._tidy(lambda: self._dissolve_dead(holder))
        self._tidy(self._queues.give_back_orphans)
        self._tidy(lambda: self._queues.drop_unused(self._private_ttl))
        self._tidy(self._queues.trim_dead_letters)

    def _dissolve_dead(self, holder: int) -> None:
        for dead in self._pulse.dead(self._holders.beats(), time.monotonic()):
            if dead != holder:
                self._queues.dissolve(dead)

    def _tidy(self, chore: Callable[[], None]) -> None:
        """Run `chore`. If a row makes it fail, skip it: the beat and the pending jobs must not fail with it."""
        self._db.execute("SAVEPOINT chore")
        try:
            chore()
        except Exception as error:
            if not self._db.in_transaction:  # SQLite has given up the whole transaction
                raise
            self._db.execute("ROLLBACK TO chore")
            if str(error) != self._untidy:  # not at every beat
                self._untidy = str(error)
                _log.warning("the queues cannot be tidied: %s", error)
        self._db.execute("RELEASE chore")

    def _commit(self) -> None:
        try:
            self._db.execute("COMMIT")
        except BaseException:
            self._in_doubt = True
            self._roll_back()
            raise
        self._in_doubt = False

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
