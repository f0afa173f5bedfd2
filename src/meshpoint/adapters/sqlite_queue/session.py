"""One broker's connection to the file, and its existence as a holder. Used by one thread."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshpoint.adapters.sqlite_queue.holders import HeartbeatMonitor, Holders
from meshpoint.adapters.sqlite_queue.jobs import Consumer, Job, TransactionResult
from meshpoint.adapters.sqlite_queue.queues import QueueLimits, Queues
from meshpoint.adapters.sqlite_queue.schema import connect, remove_out_of_range_ids, transaction
from meshpoint.model.ids import AgentName, ReplicaId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Durations in seconds, and limits; see `SqliteBroker`."""

    lease: float
    private_ttl: float
    poll_interval: float
    busy_timeout: float
    delivery_limit: int
    limits: QueueLimits

    @property
    def heartbeat_interval(self) -> float:
        """How often a holder shows that it lives."""
        return self.lease / 5


class QueueSession:
    """Transactions on the file as one holder.

    A broker that was stopped for longer than its lease finds its holder gone, and what it held given back. It
    then goes on as a new holder; settling what it held before finds nothing and changes nothing.

    Raises, here and in `transact`:
        sqlite3.Error: nothing was written; or, from COMMIT, perhaps everything was, and the next transaction
            gives up this holder.
    """

    def __init__(self, path: Path, namespace: str, options: QueueOptions) -> None:
        self._private_ttl = options.private_ttl
        self._db = connect(path, options.busy_timeout)
        self._holders = Holders(self._db)
        self._queues = Queues(self._db, namespace, options.delivery_limit, options.limits)
        self._heartbeat_monitor = HeartbeatMonitor(options.lease, options.heartbeat_interval, time.monotonic())
        self._private_queues: set[tuple[AgentName, ReplicaId]] = set()
        self._data_version = -1
        self._in_doubt = False
        self._last_maintenance_error = ""
        try:
            with transaction(self._db):
                remove_out_of_range_ids(self._db)
                self._holder = self._holders.register()
        except BaseException:
            self._db.close()
            raise

    def register_private_queue(self, agent: AgentName, replica: ReplicaId) -> None:
        """Keep this private queue for as long as the broker is open."""
        self._private_queues.add((agent, replica))

    def has_changes(self) -> bool:
        """Whether another connection committed something since the last look. Costs microseconds."""
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        changed, self._data_version = version != self._data_version, version
        return bool(changed)

    def has_ready(self, consumers: Sequence[Consumer]) -> bool:
        """Whether a consumer with room has something to claim."""
        return any(each.room and self._queues.has_ready(each.address) for each in consumers)

    def transact(
        self, jobs: Sequence[Job[Any]], consumers: Sequence[Consumer], *, heartbeat: bool
    ) -> TransactionResult:
        """Run `jobs` and claim what `consumers` have room for, in one transaction."""
        try:
            return self._transact(jobs, consumers, heartbeat=heartbeat)
        except sqlite3.OperationalError as error:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            if not full or not self._recover_ids():
                raise
        return self._transact(jobs, consumers, heartbeat=heartbeat)

    def _recover_ids(self) -> bool:
        """Whether ids, and not the disk, were used up, and are no longer."""
        with transaction(self._db):
            return remove_out_of_range_ids(self._db)

    def _transact(
        self, jobs: Sequence[Job[Any]], consumers: Sequence[Consumer], *, heartbeat: bool
    ) -> TransactionResult:
        self._set_synchronous(power_safe=any(job.durable for job in jobs))
        unreadable_before = self._queues.unreadable_count
        self._db.execute("BEGIN IMMEDIATE")
        try:
            holder = self._ensure_holder(consumers)
            if heartbeat:
                self._heartbeat(holder)
            results = [(job.future, job.run(self._queues, holder)) for job in jobs]
            deliveries = [
                (consumer, claimed)
                for consumer in consumers
                if consumer.room
                for claimed in self._queues.claim_messages(consumer.address, holder, consumer.room)
            ]
        except BaseException:
            self._roll_back()
            raise
        self._commit()
        self._holder = holder
        for consumer, claimed in deliveries:
            consumer.unacked.add(claimed.key)
        return TransactionResult(
            results, [], deliveries, more_ready=self._queues.unreadable_count > unreadable_before
        )

    def close(self) -> None:
        """Give everything back and close the file."""
        try:
            with transaction(self._db):
                self._queues.remove_holder(self._holder)
        finally:
            self._db.close()

    def _set_synchronous(self, *, power_safe: bool) -> None:
        # A lost claim, ack or beat only delivers again; what was published and confirmed must be on the disk.
        self._db.execute(f"PRAGMA synchronous = {'FULL' if power_safe else 'NORMAL'}")

    def _ensure_holder(self, consumers: Sequence[Consumer]) -> int:
        if not self._in_doubt and self._holders.exists(self._holder):
            return self._holder
        self._queues.remove_holder(self._holder)
        for consumer in consumers:
            consumer.unacked.clear()
        holder = self._holders.register()
        for agent, replica in self._private_queues:
            self._queues.declare_private(agent, replica, holder)
        return holder

    def _heartbeat(self, holder: int) -> None:
        self._holders.record_heartbeat(holder)
        self._run_maintenance(lambda: self._remove_dead_holders(holder))
        self._run_maintenance(self._queues.requeue_orphans)
        self._run_maintenance(lambda: self._queues.drop_unused(self._private_ttl))
        self._run_maintenance(self._queues.trim_dead_letters)

    def _remove_dead_holders(self, holder: int) -> None:
        for dead in self._heartbeat_monitor.find_dead(self._holders.heartbeats(), time.monotonic()):
            if dead != holder:
                self._queues.remove_holder(dead)

    def _run_maintenance(self, step: Callable[[], None]) -> None:
        """Run `step`. If a row makes it fail, skip it: the beat and the pending jobs must not fail with it."""
        self._db.execute("SAVEPOINT chore")
        try:
            step()
        except Exception as error:
            if not self._db.in_transaction:  # SQLite has given up the whole transaction
                raise
            self._db.execute("ROLLBACK TO chore")
            if str(error) != self._last_maintenance_error:  # not at every beat
                self._last_maintenance_error = str(error)
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
