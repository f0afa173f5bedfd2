"""Renew leases from a separate thread, so agent code that blocks the event loop keeps its task."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta

from meshpoint.engine.presence import Presence
from meshpoint.errors import Unavailable
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import Replica, Run
from meshpoint.ports.clock import OutageTracker
from meshpoint.ports.observer import Steps
from meshpoint.ports.task_store import CheckpointStore

log = logging.getLogger("meshpoint.leases")


class LeaseRenewer:
    """Renews the leases of registered runs through its own store connection.

    `on_lost` is called on the worker's event loop with each run whose task another replica owns
    now.
    """

    def __init__(
        self,
        open_store: Callable[[], CheckpointStore],
        replica: Replica,
        interval: timedelta,
        steps: Steps,
    ) -> None:
        self._open_store = open_store
        self._replica = replica
        self._interval = interval.total_seconds()
        self._steps = steps
        self._outage = OutageTracker(time.monotonic)
        self._run_by_task_id: dict[TaskId, Run] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop, self._ended = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._presence: Presence | None = None

    def start(self, on_lost: Callable[[Run], None], presence: Presence | None = None) -> None:
        """Start renewing. Must be called on the worker's event loop, where `on_lost` is called.

        With a `presence`, the thread also keeps the replica registered until `close`.
        """
        worker_loop, self._presence = asyncio.get_running_loop(), presence
        self._loop = asyncio.new_event_loop()
        runner = asyncio.Runner(loop_factory=lambda: self._loop or asyncio.new_event_loop())

        def run_thread() -> None:
            with runner:
                runner.run(self._renew_until_stopped(worker_loop, on_lost))
            with suppress(RuntimeError):  # the loop is closed
                worker_loop.call_soon_threadsafe(self._ended.set)

        self._thread = threading.Thread(target=run_thread, name="meshpoint leases", daemon=True)
        self._thread.start()

    async def close(self, timeout: float = 5.0, running: Collection[Run] = ()) -> None:
        """Stop renewing, and wait at most `timeout` seconds for the thread to end.

        Leases of `running` runs are renewed until they are released or the process ends.
        """
        if self._thread is None:
            return
        with self._lock:
            self._run_by_task_id = {
                run.task_id: run for run in running if self._run_by_task_id.get(run.task_id) == run
            }
            self._closing, has_runs = True, bool(self._run_by_task_id)
        if not has_runs:
            self._stop_thread()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._ended.wait()

    def _stop_thread(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stop.set)

    def start_renewing(self, run: Run) -> None:
        """Renew the lease of `run` from now on."""
        with self._lock:
            self._run_by_task_id[run.task_id] = run

    def stop_renewing(self, run: Run) -> None:
        """Stop renewing the lease of `run`."""
        with self._lock:
            if self._run_by_task_id.get(run.task_id) == run:
                del self._run_by_task_id[run.task_id]
            is_last = self._closing and not self._run_by_task_id
        if is_last:
            self._stop_thread()

    async def _renew_until_stopped(
        self, worker_loop: asyncio.AbstractEventLoop, on_lost: Callable[[Run], None]
    ) -> None:
        renew_task = asyncio.create_task(self._keep_renewing(worker_loop, on_lost))
        await self._stop.wait()
        renew_task.cancel()  # do not wait for a silent database
        await asyncio.gather(renew_task, return_exceptions=True)

    async def _keep_renewing(
        self, worker_loop: asyncio.AbstractEventLoop, on_lost: Callable[[Run], None]
    ) -> None:
        while not self._stop.is_set():
            try:
                await self._renew_with(self._open_store(), worker_loop, on_lost)
            except Exception:  # otherwise every lease would expire
                if (seconds := self._outage.record_failure()) is not None:
                    log.exception(
                        "replica %s: its leases could not be renewed for %.0f s",
                        self._replica.id,
                        seconds,
                    )
                await asyncio.sleep(self._interval)

    async def _renew_with(
        self,
        store: CheckpointStore,
        worker_loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[Run], None],
    ) -> None:
        # An asyncio task of its own: a locked row must not delay the leases.
        registering = (
            None if self._presence is None else asyncio.create_task(self._presence.keep(store))
        )
        try:
            while True:
                await asyncio.sleep(self._interval)
                if worker_loop.is_closed():  # the worker's code no longer runs
                    self._stop.set()
                    return
                for run in await self._renew(store):
                    self.stop_renewing(run)
                    worker_loop.call_soon_threadsafe(on_lost, run)
        finally:
            try:
                if registering is not None:
                    registering.cancel()
                    await asyncio.gather(registering, return_exceptions=True)
                if self._presence is not None and self._stop.is_set():
                    await self._presence.leave(store)
            finally:
                await store.close()

    def drain(self) -> None:
        """Show others that the replica stops."""
        if self._presence is not None:
            self._presence.drain()

    async def _renew(self, store: CheckpointStore) -> list[Run]:
        with self._lock:
            runs = list(self._run_by_task_id.values())
        if not runs:
            return []
        try:
            with self._steps.step(Step.RENEW, [run.task_id for run in runs]):
                lost = await store.renew(runs, self._replica)
        except Unavailable as error:
            if (seconds := self._outage.record_failure()) is not None:
                log.warning(
                    "replica %s: leases not renewed for %.0f s: %s",
                    self._replica.id,
                    seconds,
                    error,
                )
            return []  # the next renewal tries again; the fence protects the task
        seconds, reported = self._outage.record_success()
        if reported:
            log.warning(
                "replica %s: leases are renewed again after %.0f s", self._replica.id, seconds
            )
        return lost
