"""Keep a number of replicas running as child processes."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from meshpoint.cli.exits import ExitCode
from meshpoint.ports.clock import Clock

log = logging.getLogger("meshpoint.supervisor")

MIN_BACKOFF = timedelta(milliseconds=500)
MAX_BACKOFF = timedelta(seconds=30)
STABLE_UPTIME = timedelta(minutes=1)
"""Uptime after which the back-off of a replica starts again at its minimum."""


class Process(Protocol):
    """The methods of `asyncio.subprocess.Process` that the supervisor uses."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...


@dataclass
class Supervisor:
    """Runs `replicas` processes, restarts each that ends by itself, and stops them on request.

    `spawn` starts the replica of a number, counted from 1.
    """

    spawn: Callable[[int], Awaitable[Process]]
    replicas: int
    clock: Clock
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _running: set[Process] = field(default_factory=set)
    _forced: bool = False

    def stop(self) -> None:
        """Drain all replicas. A second call ends the replicas that are still draining at once."""
        self._forced = self._stop.is_set()
        self._stop.set()
        for process in self._running:
            _terminate(process)

    async def run(self) -> ExitCode:
        """Run until all replicas have ended after `stop`.

        Returns `OK` if all have drained, `ABANDONED` if one took too long. A replica that rejects
        its configuration on its first start stops the others, since none of them could serve.
        """
        codes = await asyncio.gather(
            *(self._keep_running(number) for number in range(1, self.replicas + 1))
        )
        if ExitCode.CONFIGURATION in codes:
            return ExitCode.CONFIGURATION
        if all(map(self._has_drained, codes)):
            return ExitCode.OK
        abandoned = all(code == ExitCode.ABANDONED or self._has_drained(code) for code in codes)
        return ExitCode.ABANDONED if abandoned else ExitCode.ERROR

    async def _keep_running(self, number: int) -> int:
        backoff, first_start, code = MIN_BACKOFF, True, 0
        while not self._stop.is_set():
            started = self.clock.now()
            code = await self._run_once(number)
            if self._stop.is_set():
                break
            if code == ExitCode.CONFIGURATION and first_start:
                self.stop()
                break
            backoff = MIN_BACKOFF if self.clock.now() - started >= STABLE_UPTIME else backoff
            log.warning(
                "replica %d ended with exit code %d; restarting it in %g s",
                number,
                code,
                backoff.total_seconds(),
            )
            await self._wait_backoff(backoff)
            backoff, first_start, code = min(backoff * 2, MAX_BACKOFF), False, 0
        return code

    async def _run_once(self, number: int) -> int:
        try:
            process = await self.spawn(number)
        except OSError as error:  # out of memory or processes: may work later
            log.warning("replica %d cannot be started: %s", number, error)
            return ExitCode.ERROR
        self._running.add(process)
        if self._stop.is_set():
            _terminate(process)  # `stop` was called while the process was being started
        log.info("replica %d is running as process %d", number, process.pid)
        try:
            return await process.wait()
        finally:
            self._running.discard(process)

    async def _wait_backoff(self, backoff: timedelta) -> None:
        waits = {
            asyncio.ensure_future(self._stop.wait()),
            asyncio.ensure_future(self.clock.sleep(backoff)),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _has_drained(self, code: int) -> bool:
        # Killed by the first SIGTERM: it had no signal handler yet, so it was not serving yet.
        return code == 0 or (code == -signal.SIGTERM and not self._forced)


def _terminate(process: Process) -> None:
    try:
        process.terminate()
    except ProcessLookupError:
        log.debug("process %d had already ended", process.pid)
