"""A broker's transactions on its file: their jobs, consumers and results. Used by one thread."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from meshpoint.adapters.sqlite_queue.queues import ClaimedMessage, Queues
from meshpoint.adapters.sqlite_queue.schema import connect, remove_out_of_range_ids, transaction
from meshpoint.adapters.stored_messages import QueueLimits
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address, Topic

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
Failure: TypeAlias = tuple[asyncio.Future[Any], Exception]


@dataclass(frozen=True, slots=True)
class Job(Generic[_T]):
    """One step of the next transaction.

    `future` gets the result of `run(queues, holder)` after the commit. With `durable`, the commit
    also survives a power failure. With `settles`, the job does not fail while the database is
    unavailable, but is retried until it is committed.
    """

    run: Callable[[Queues, int], _T]
    future: asyncio.Future[_T]
    durable: bool = False
    settles: bool = False


@dataclass(frozen=True, slots=True)
class ThreadCommand:
    """A change of the thread's own state, which needs no transaction."""

    run: Callable[[], object]
    future: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class Consumer:
    """A subscription as seen by the database thread. `deliver` is called on the event loop."""

    address: Address
    prefetch: int
    deliver: Callable[[ClaimedMessage], None]
    unacked: set[tuple[int, int, int]] = field(default_factory=set)

    @property
    def room(self) -> int:
        """Number of further messages it can hold unacked."""
        return max(0, self.prefetch - len(self.unacked))


@dataclass(slots=True)
class TransactionResult:
    """The result of one transaction, for the event loop.

    `more_ready`: unreadable rows took up part of a claim, so more messages may be ready.
    """

    results: list[tuple[asyncio.Future[Any], object]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    deliveries: list[tuple[Consumer, ClaimedMessage]] = field(default_factory=list)
    more_ready: bool = False

    def deliver(self) -> None:
        """Set the futures, then hand over the deliveries. Runs on the event loop."""
        for future, result in self.results:
            if not future.done():
                future.set_result(result)
        for future, error in self.failures:
            if not future.done():
                future.set_exception(error)
        for consumer, claimed in self.deliveries:
            consumer.deliver(claimed)


class HeartbeatMonitor:
    """Finds the holders of unacked messages whose process has died.

    Each open broker is a holder, with a row whose `beat` increases while its process lives. A
    broker declares another one dead if that beat has not changed for a lease *by the observer's
    own clock*. So processes need not agree on the time, and after the whole host was suspended, no
    holder is declared dead.

    Times are in seconds. One observation adds at most two heartbeat intervals, so that an observer
    that was stopped itself gives the others time to beat first.
    """

    def __init__(self, lease: float, interval: float, now: float) -> None:
        self._lease, self._max_step, self._checked_at = lease, 2 * interval, now
        self._last_heartbeats: dict[int, tuple[int, float]] = {}  # beats, and their ages

    def find_dead(self, beats: dict[int, int], now: float) -> list[int]:
        """The holders among `beats` whose beat has not changed for a lease."""
        elapsed, self._checked_at = min(now - self._checked_at, self._max_step), now
        before, self._last_heartbeats = self._last_heartbeats, {}
        for holder, beat in beats.items():
            last_beat, age = before.get(holder, (None, 0.0))
            self._last_heartbeats[holder] = beat, age + elapsed if beat == last_beat else 0.0
        return [holder for holder, (_, age) in self._last_heartbeats.items() if age >= self._lease]


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Durations in seconds, and limits. See `SqliteBroker` for their meaning."""

    lease: float
    private_ttl: float
    poll_interval: float
    busy_timeout: float
    delivery_limit: int
    limits: QueueLimits

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between the heartbeats of a holder."""
        return self.lease / 5


class QueueSession:
    """Transactions on the file as one holder.

    If a broker is stopped for longer than its lease, its holder is removed and its unacked
    messages are requeued. It then continues as a new holder. Settling an old message finds nothing
    to change.

    Raises, on creation and in `transact`:
        sqlite3.Error: Nothing was written. If COMMIT failed, the transaction may have been
            written; the next transaction then registers a new holder.
    """

    def __init__(self, path: Path, namespace: str, options: QueueOptions) -> None:
        self._private_ttl = options.private_ttl
        self._db = connect(path, options.busy_timeout)
        self._queues = Queues(self._db, namespace, options.delivery_limit, options.limits)
        self._heartbeat_monitor = HeartbeatMonitor(
            options.lease, options.heartbeat_interval, time.monotonic()
        )
        self._private_queues: dict[tuple[AgentName, ReplicaId], frozenset[Topic]] = {}
        self._data_version = -1
        self._in_doubt = False
        self._last_maintenance_error = ""
        try:
            with transaction(self._db):
                remove_out_of_range_ids(self._db)
                self._holder = self._queues.register_holder()
        except BaseException:
            self._db.close()
            raise

    def register_private_queue(
        self, agent: AgentName, replica: ReplicaId, topics: Iterable[Topic] = ()
    ) -> None:
        """Keep this private queue while the broker is open, also under a new holder.

        It keeps the `topics` of earlier calls.
        """
        known = self._private_queues.get((agent, replica), frozenset())
        self._private_queues[agent, replica] = known.union(topics)

    def has_changes(self) -> bool:
        """Whether another connection has committed since the last call. Costs microseconds."""
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        changed, self._data_version = version != self._data_version, version
        return bool(changed)

    def has_ready(self, consumers: Sequence[Consumer]) -> bool:
        """Whether a message is ready for a consumer with room. Needs no transaction."""
        return any(each.room and self._queues.has_ready(each.address) for each in consumers)

    def transact(
        self, jobs: Sequence[Job[Any]], consumers: Sequence[Consumer], *, heartbeat: bool
    ) -> TransactionResult:
        """Run `jobs` and claim messages for `consumers` with room, in one transaction."""
        try:
            return self._transact(jobs, consumers, heartbeat=heartbeat)
        except sqlite3.OperationalError as error:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            if not full or not self._recover_ids():
                raise
        return self._transact(jobs, consumers, heartbeat=heartbeat)

    def _recover_ids(self) -> bool:
        """Repair exhausted ids. `False` if ids were not the problem, so the disk is full."""
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
        """Remove the holder, which requeues its unacked messages, and close the file."""
        try:
            with transaction(self._db):
                self._queues.remove_holder(self._holder)
        finally:
            self._db.close()

    def _set_synchronous(self, *, power_safe: bool) -> None:
        # A lost claim, ack or heartbeat only causes a redelivery. Confirmed messages must be on
        # disk.
        self._db.execute(f"PRAGMA synchronous = {'FULL' if power_safe else 'NORMAL'}")

    def _ensure_holder(self, consumers: Sequence[Consumer]) -> int:
        if not self._in_doubt and self._queues.has_holder(self._holder):
            return self._holder
        self._queues.remove_holder(self._holder)
        for consumer in consumers:
            consumer.unacked.clear()
        holder = self._queues.register_holder()
        for (agent, replica), topics in self._private_queues.items():
            self._queues.declare_private(agent, replica, holder)
            self._queues.subscribe(agent, replica, topics)
        return holder

    def _heartbeat(self, holder: int) -> None:
        self._queues.record_heartbeat(holder)
        self._run_maintenance(lambda: self._remove_dead_holders(holder))
        self._run_maintenance(self._queues.requeue_orphans)
        self._run_maintenance(lambda: self._queues.drop_unused(self._private_ttl))
        self._run_maintenance(self._queues.trim_dead_letters)

    def _remove_dead_holders(self, holder: int) -> None:
        for dead in self._heartbeat_monitor.find_dead(self._queues.heartbeats(), time.monotonic()):
            if dead != holder:
                self._queues.remove_holder(dead)

    def _run_maintenance(self, step: Callable[[], None]) -> None:
        """Run `step`, and skip it if it fails on a damaged row.

        The heartbeat and the jobs of the same transaction must not fail with it.
        """
        self._db.execute("SAVEPOINT chore")
        try:
            step()
        except Exception as error:
            if not self._db.in_transaction:  # SQLite has rolled back the whole transaction
                raise
            self._db.execute("ROLLBACK TO chore")
            if str(error) != self._last_maintenance_error:  # not at every heartbeat
                self._last_maintenance_error = str(error)
                _log.warning("queue maintenance failed: %s", error)
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
