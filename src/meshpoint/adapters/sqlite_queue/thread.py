"""The thread between a broker's event loop and its file.

Jobs that the loop submits during a transaction form the next one; their results are returned to
the loop after the commit. The thread also writes the broker's heartbeats, so that it keeps its
messages while agent code blocks the loop.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from meshpoint.adapters.sqlite_queue.session import (
    Consumer,
    Failure,
    Job,
    QueueOptions,
    QueueSession,
    ThreadCommand,
    TransactionResult,
)
from meshpoint.errors import BrokerUnavailable

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_MAX_BATCH = 1000
_MIN_POLL_DELAY = 0.001
_RETRY_DELAY = 0.1


class QueueThread:
    """Runs jobs and claims messages for consumers. Public methods are called on the event loop."""

    def __init__(self, path: Path, namespace: str, options: QueueOptions) -> None:
        self._path, self._namespace, self._options = path, namespace, options
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._main, name="meshpoint-sqlite-queue", daemon=True
        )
        self._started: asyncio.Future[QueueSession] = self._loop.create_future()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._inbox: SimpleQueue[Job[Any] | ThreadCommand] = SimpleQueue()
        self.connected = False
        self.closing = False
        # The attributes below are used only by the thread.
        self._stopping = False
        self._consumers: list[Consumer] = []
        self._retry_jobs: list[Job[Any]] = []
        self._may_be_ready = False  # whether a message may be ready for a consumer
        self._poll_delay = _MIN_POLL_DELAY
        self._next_heartbeat = 0.0

    async def start(self) -> QueueSession:
        """Start the thread and open the file.

        Raises:
            ConfigurationError: The file can never be used.
            BrokerUnavailable: The file cannot be used now.
        """
        self._thread.start()
        try:
            return await self._started
        except asyncio.CancelledError:
            self._submit(ThreadCommand(self._stop, self._loop.create_future()))
            raise

    async def execute(self, job: Job[_T]) -> _T:
        """Run `job` in the next transaction, and return its result after the commit.

        The job runs even if the caller is cancelled.
        """
        self._submit(job)
        return await job.future

    def run_in_thread(self, run: Callable[[], object]) -> asyncio.Future[None]:
        """Schedule `run` in the thread, between transactions.

        It runs even if the future is never awaited.
        """
        command = ThreadCommand(run, self._loop.create_future())
        self._submit(command)
        return command.future

    async def attach(self, consumer: Consumer) -> None:
        """Start claiming messages for `consumer`."""
        await self.run_in_thread(lambda: self._consumers.append(consumer))

    def detach(self, consumer: Consumer) -> asyncio.Future[None]:
        """Stop claiming messages for `consumer`. The future is set after the last claim."""
        return self.run_in_thread(lambda: self._remove_consumer(consumer))

    async def resize(self, consumer: Consumer, prefetch: int) -> None:
        """Let `consumer` hold up to `prefetch` unacked messages."""
        await self.run_in_thread(lambda: setattr(consumer, "prefetch", prefetch))

    async def stop(self) -> None:
        """Finish jobs submitted before, requeue all unacked messages, and close the file."""
        self.closing = True
        await self.run_in_thread(self._stop)
        await asyncio.shield(self._finished)
        self._thread.join()

    def _submit(self, item: Job[Any] | ThreadCommand) -> None:
        if self._finished.done():
            self._reject(item)
        else:
            self._inbox.put(item)

    def _reject(self, item: Job[Any] | ThreadCommand) -> None:
        """Answer an item submitted after the thread finished. Runs on the event loop."""
        if item.future.done():
            return
        if isinstance(item, ThreadCommand):
            item.future.set_result(None)
        elif item.settles:
            item.future.set_result(False)
        else:
            item.future.set_exception(BrokerUnavailable(f"{self._path}: the broker is closed"))

    # The methods below run in the thread.

    def _main(self) -> None:
        try:
            self._session = QueueSession(self._path, self._namespace, self._options)
        except Exception as error:
            failure = self._to_unavailable(error) if isinstance(error, sqlite3.Error) else error
            self._call_in_loop(TransactionResult(failures=[(self._started, failure)]).deliver)
            self._call_in_loop(self._finish)
            return
        self.connected = True
        self._next_heartbeat = time.monotonic() + self._options.heartbeat_interval
        self._call_in_loop(TransactionResult(results=[(self._started, self._session)]).deliver)
        try:
            while not self._stopping and not self._loop.is_closed():
                self._run_once()
        finally:
            self._close()

    def _run_once(self) -> None:
        jobs = self._collect()
        heartbeat = time.monotonic() >= self._next_heartbeat
        if jobs or heartbeat or not self.connected or self._has_claimable():
            self._transact(jobs, heartbeat=heartbeat)

    def _collect(self) -> list[Job[Any]]:
        """Wait for work. Runs the commands that arrive, and returns the jobs."""
        wait = self._wait_seconds()
        jobs, self._retry_jobs = self._retry_jobs, []
        while len(jobs) < _MAX_BATCH and not self._stopping:
            try:
                item = self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
            except Empty:
                break
            wait = 0.0
            if isinstance(item, Job):
                jobs.append(item)
            else:
                item.run()
                self._may_be_ready = True
                self._call_in_loop(TransactionResult(results=[(item.future, None)]).deliver)
        return jobs

    def _wait_seconds(self) -> float:
        """Seconds to wait for jobs before the next heartbeat or poll of the file."""
        if not self.connected:
            return _RETRY_DELAY
        if self._may_be_ready:
            return 0.0
        until_heartbeat = max(0.0, self._next_heartbeat - time.monotonic())
        has_room = any(consumer.room for consumer in self._consumers)
        return min(self._poll_delay, until_heartbeat) if has_room else until_heartbeat

    def _has_claimable(self) -> bool:
        """Whether a consumer can claim a message. Doubles the poll delay if nothing changed."""
        try:
            if not self._session.has_changes() and not self._may_be_ready:
                self._poll_delay = min(self._poll_delay * 2, self._options.poll_interval)
                return False
            self._poll_delay = _MIN_POLL_DELAY
            self._may_be_ready = self._session.has_ready(self._consumers)
        except sqlite3.Error as error:
            self._record_unavailable(error)
        return self._may_be_ready

    def _transact(self, jobs: Sequence[Job[Any]], *, heartbeat: bool) -> None:
        try:
            result = self._session.transact(jobs, self._consumers, heartbeat=heartbeat)
        except Exception as error:
            self._recover(jobs, error)
        else:
            if heartbeat:
                self._next_heartbeat = time.monotonic() + self._options.heartbeat_interval
            self.connected, self._may_be_ready, self._poll_delay = (
                True,
                result.more_ready,
                _MIN_POLL_DELAY,
            )
            self._call_in_loop(result.deliver)

    def _recover(self, jobs: Sequence[Job[Any]], error: Exception) -> None:
        """Handle a failed transaction.

        If the database is unavailable, settling jobs are retried and other jobs fail. After any
        other error, the jobs are run one by one, so that a message that cannot be stored fails no
        others.
        """
        if type(error) in {sqlite3.OperationalError, sqlite3.DatabaseError} or not jobs:
            self._record_unavailable(error)
            self._retry_jobs += [job for job in jobs if job.settles]
            failures: list[Failure] = [
                (job.future, self._to_unavailable(error)) for job in jobs if not job.settles
            ]
            self._call_in_loop(TransactionResult(failures=failures).deliver)
        elif len(jobs) == 1:
            self._call_in_loop(TransactionResult(failures=[(jobs[0].future, error)]).deliver)
        else:
            for job in jobs:
                self._transact([job], heartbeat=False)

    def _record_unavailable(self, error: Exception) -> None:
        if self.connected:
            _log.warning("the queues in %s are unavailable: %s", self._path, error)
        self.connected, self._may_be_ready = False, True

    def _close(self) -> None:
        self.connected = False
        try:
            self._session.close()
        except sqlite3.Error as error:
            _log.warning(
                "%s: unacked messages are requeued only when the lease expires: %s",
                self._path,
                error,
            )
        self._call_in_loop(self._finish)

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the event loop. If the loop is closed, stop the thread."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            self._stopping = True

    def _finish(self) -> None:
        """Answer the remaining items of a finished thread. Runs on the event loop."""
        for job in self._retry_jobs:
            self._reject(job)
        while not self._inbox.empty():
            self._reject(self._inbox.get())
        self._finished.set_result(None)

    def _stop(self) -> None:
        self._consumers.clear()
        self._stopping = True

    def _remove_consumer(self, consumer: Consumer) -> None:
        self._consumers = [each for each in self._consumers if each is not consumer]

    def _to_unavailable(self, error: Exception) -> BrokerUnavailable:
        unavailable = BrokerUnavailable(f"{self._path}: {error}")
        unavailable.__cause__ = error
        return unavailable
