"""The thread between a broker's event loop and its file.

It puts whatever the loop asked for while the last transaction was in flight into the next one, and tells the
loop after the commit. It also keeps the broker alive as a holder: agent code that blocks the loop loses nothing.
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

from meshpoint.adapters.sqlite_queue.jobs import Consumer, Control, Failure, Job, Turn
from meshpoint.adapters.sqlite_queue.session import Session, Tuning
from meshpoint.errors import BrokerUnavailable

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MAX_BATCH = 1000
_FIRST_POLL = 0.001
_RETRY = 0.1


class QueueThread:
    """Runs jobs and the claims of consumers. Public methods are for the event loop."""

    def __init__(self, path: Path, namespace: str, tuning: Tuning) -> None:
        self._path, self._namespace, self._tuning = path, namespace, tuning
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._main, name="meshpoint-sqlite-queue", daemon=True)
        self._started: asyncio.Future[Session] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._inbox: SimpleQueue[Job[Any] | Control] = SimpleQueue()
        self.connected = False
        self.closing = False
        # From here on the thread's own.
        self._stopping = False
        self._consumers: list[Consumer] = []
        self._kept: list[Job[Any]] = []
        self._look = False  # something may be ready for a consumer
        self._poll = _FIRST_POLL
        self._next_beat = 0.0

    async def start(self) -> Session:
        """Open the file.

        Raises:
            ConfigurationError: it can never be used.
            BrokerUnavailable: it cannot be used now.
        """
        self._thread.start()
        try:
            return await self._started
        except asyncio.CancelledError:
            self._submit(Control(self._stop, self._loop.create_future()))
            raise

    async def do(self, job: Job[T]) -> T:
        """The result of `job`, once committed. It is done even if the caller is cancelled meanwhile."""
        self._submit(job)
        return await job.future

    def control(self, run: Callable[[], object]) -> asyncio.Future[None]:
        """Schedule `run` in the thread, between transactions. It runs even if the future is never awaited."""
        control = Control(run, self._loop.create_future())
        self._submit(control)
        return control.future

    async def attach(self, consumer: Consumer) -> None:
        """Begin to claim for `consumer`."""
        await self.control(lambda: self._consumers.append(consumer))

    def detach(self, consumer: Consumer) -> asyncio.Future[None]:
        """Claim no more for `consumer`."""
        return self.control(lambda: self._forget(consumer))

    async def resize(self, consumer: Consumer, prefetch: int) -> None:
        """Let `consumer` hold up to `prefetch`."""
        await self.control(lambda: setattr(consumer, "prefetch", prefetch))

    async def stop(self) -> None:
        """Finish what was asked, give everything back, close the file."""
        self.closing = True
        await self.control(self._stop)
        await asyncio.shield(self._ended)
        self._thread.join()

    def _submit(self, item: Job[Any] | Control) -> None:
        if self._ended.done():
            self._refuse(item)
        else:
            self._inbox.put(item)

    def _refuse(self, item: Job[Any] | Control) -> None:
        """Answer what comes too late. Runs on the event loop."""
        if item.future.done():
            return
        if isinstance(item, Control):
            item.future.set_result(None)
        elif item.settles:
            item.future.set_result(False)
        else:
            item.future.set_exception(BrokerUnavailable(f"{self._path}: the broker is closed"))

    # From here on: runs in the thread.

    def _main(self) -> None:
        try:
            self._session = Session(self._path, self._namespace, self._tuning)
        except Exception as error:
            failure = self._unavailable(error) if isinstance(error, sqlite3.Error) else error
            self._tell(Turn(failures=[(self._started, failure)]).arrive)
            self._tell(self._end)
            return
        self.connected = True
        self._next_beat = time.monotonic() + self._tuning.beat_interval
        self._tell(Turn(results=[(self._started, self._session)]).arrive)
        try:
            while not self._stopping and not self._loop.is_closed():
                self._step()
        finally:
            self._close()

    def _step(self) -> None:
        jobs = self._collect()
        beat = time.monotonic() >= self._next_beat
        if jobs or beat or not self.connected or self._news():
            self._transact(jobs, beat=beat)

    def _collect(self) -> list[Job[Any]]:
        """Wait for something to do; perform controls, return jobs."""
        wait = self._patience()
        jobs, self._kept = self._kept, []
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
                self._look = True
                self._tell(Turn(results=[(item.future, None)]).arrive)
        return jobs

    def _patience(self) -> float:
        """Seconds to wait for the event loop before looking elsewhere."""
        if not self.connected:
            return _RETRY
        if self._look:
            return 0.0
        until_beat = max(0.0, self._next_beat - time.monotonic())
        hungry = any(consumer.room for consumer in self._consumers)
        return min(self._poll, until_beat) if hungry else until_beat

    def _news(self) -> bool:
        """Whether there is something to claim. Polls less often as nothing happens."""
        try:
            if not self._session.changed() and not self._look:
                self._poll = min(self._poll * 2, self._tuning.poll_interval)
                return False
            self._poll = _FIRST_POLL
            self._look = self._session.has_ready(self._consumers)
        except sqlite3.Error as error:
            self._lose(error)
        return self._look

    def _transact(self, jobs: Sequence[Job[Any]], *, beat: bool) -> None:
        try:
            turn = self._session.transact(jobs, self._consumers, beat=beat)
        except Exception as error:
            self._recover(jobs, error)
        else:
            if beat:
                self._next_beat = time.monotonic() + self._tuning.beat_interval
            self.connected, self._look, self._poll = True, turn.look_again, _FIRST_POLL
            self._tell(turn.arrive)

    def _recover(self, jobs: Sequence[Job[Any]], error: Exception) -> None:
        """Settling waits for the database; the rest fails. One unfit message must not fail its neighbours."""
        if type(error) in {sqlite3.OperationalError, sqlite3.DatabaseError} or not jobs:
            self._lose(error)
            self._kept += [job for job in jobs if job.settles]
            failures: list[Failure] = [(job.future, self._unavailable(error)) for job in jobs if not job.settles]
            self._tell(Turn(failures=failures).arrive)
        elif len(jobs) == 1:
            self._tell(Turn(failures=[(jobs[0].future, error)]).arrive)
        else:
            for job in jobs:
                self._transact([job], beat=False)

    def _lose(self, error: Exception) -> None:
        if self.connected:
            _log.warning("the queues in %s are away: %s", self._path, error)
        self.connected, self._look = False, True

    def _close(self) -> None:
        self.connected = False
        try:
            self._session.close()
        except sqlite3.Error as error:
            _log.warning("%s: what was unsettled is given back when the lease ends: %s", self._path, error)
        self._tell(self._end)

    def _tell(self, what: Callable[[], None]) -> None:
        """Run `what` on the event loop, if there still is one."""
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            self._stopping = True

    def _end(self) -> None:
        """Let nobody wait for a thread that is gone. Runs on the event loop."""
        for job in self._kept:
            self._refuse(job)
        while not self._inbox.empty():
            self._refuse(self._inbox.get())
        self._ended.set_result(None)

    def _stop(self) -> None:
        self._consumers.clear()
        self._stopping = True

    def _forget(self, consumer: Consumer) -> None:
        self._consumers = [each for each in self._consumers if each is not consumer]

    def _unavailable(self, error: Exception) -> BrokerUnavailable:
        unavailable = BrokerUnavailable(f"{self._path}: {error}")
        unavailable.__cause__ = error
        return unavailable
