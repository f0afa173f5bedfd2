"""Isolated runs in this process: each is a worker next to its replica, and tests can kill it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.engine.runtime import build_runtime
from meshpoint.engine.worker import Worker
from meshpoint.errors import Unavailable
from meshpoint.model.options import Options, StoreTimings
from meshpoint.model.tasks import Run
from meshpoint.ports.isolation import Exit, ExitKind, StopSignal

from .faults import FaultyBroker, FaultyStore
from .mesh import Mesh

KILLED = "was killed by SIGKILL"


class IsolatedRun:
    """One isolated run. With `exit_as`, it exits that way without running anything."""

    def __init__(
        self, worker: Worker, run: Run, on_started: Callable[[], None], exit_as: Exit | None
    ) -> None:
        self.run, self.worker, self._exit_as = run, worker, exit_as
        self.signals: list[StopSignal] = []
        self._stop, self._cancel = asyncio.Event(), asyncio.Event()
        self._ignores_signals = False
        self._running = asyncio.create_task(self._run(on_started))

    async def _run(self, on_started: Callable[[], None]) -> Exit:
        if self._exit_as is not None:
            return self._exit_as
        try:
            is_settled = await self.worker.run_one(
                self.run, on_started=on_started, stop=self._stop, cancel=self._cancel
            )
        except Unavailable as error:  # as `meshpoint.isolated` reports it
            return Exit(ExitKind.NOT_STARTED, f"could not start: {error}")
        return (
            Exit(ExitKind.SETTLED) if is_settled else Exit(ExitKind.DIED, "ended with exit code 0")
        )

    async def wait(self) -> Exit:
        await asyncio.wait({self._running})
        return Exit(ExitKind.DIED, KILLED) if self._running.cancelled() else self._running.result()

    def signal(self, stop_signal: StopSignal) -> None:
        self.signals.append(stop_signal)
        if not self._ignores_signals:
            {StopSignal.CANCEL: self._cancel, StopSignal.DRAIN: self._stop}[stop_signal].set()

    def kill(self) -> None:
        self._running.cancel()

    def ignore_signals(self) -> None:
        """Ignore further cancel and drain requests."""
        self._ignores_signals = True

    @property
    def is_done(self) -> bool:
        return self._running.done()


class IsolatedRuns:
    """Starts isolated runs of `agent`.

    The first runs exit as listed in `exits`; `None` runs normally.
    """

    def __init__(self, mesh: Mesh, agent: Any, *exits: Exit | OSError | None) -> None:
        self._mesh, self._agent, self._exits = mesh, agent, list(exits)
        self.all: list[IsolatedRun] = []
        self._changed = asyncio.Event()

    async def start(self, run: Run, on_started: Callable[[], None]) -> IsolatedRun:
        exit_as = self._exits.pop(0) if self._exits else None
        if isinstance(exit_as, OSError):
            raise exit_as
        worker = _worker(self._mesh, self._agent)
        await worker.runtime.broker.open()
        self.all.append(IsolatedRun(worker, run, on_started, exit_as))
        self._changed.set()
        return self.all[-1]

    async def close(self) -> None:
        pass

    async def wait_for_run(self, count: int = 1) -> IsolatedRun:
        """The `count`-th run started, waiting until it has been."""
        while len(self.all) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.all[count - 1]


def _worker(mesh: Mesh, agent: Any) -> Worker:
    broker = FaultyBroker(mesh.exchange)
    return Worker(
        agent,
        build_runtime(
            agent,
            broker=broker,
            memory=FaultyStore(InProcessStore(mesh.clock, timings=StoreTimings())),
            durable=FaultyStore(mesh.store),
            lease_store=None,
            clock=mesh.clock,
            observer=mesh.events,
            options=replace(Options(stateless_checkpointing=True), max_concurrency=0),
            local=InProcessWorkingMemory(mesh.clock),
        ),
    )
