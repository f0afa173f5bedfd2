"""Isolated runs in this process: each is a worker next to its replica, and tests can kill it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.engine.worker import Worker
from meshpoint.model.checkpoint import Run
from meshpoint.model.options import Options
from meshpoint.ports.isolation import Ending, Exit, Word

from .faults import FaultyBroker, FaultyStore
from .mesh import Mesh, Timings

KILLED = "was killed by SIGKILL"


class Cell:
    """One isolated run. With `exit_as`, it exits that way without running anything."""

    def __init__(self, worker: Worker, run: Run, on_started: Callable[[], None], exit_as: Exit | None) -> None:
        self.run, self.worker, self._exit_as = run, worker, exit_as
        self.words: list[Word] = []
        self._stop, self._cancel = asyncio.Event(), asyncio.Event()
        self._deaf = False
        self._running = asyncio.create_task(self._run(on_started))

    async def _run(self, on_started: Callable[[], None]) -> Exit:
        if self._exit_as is not None:
            return self._exit_as
        settled = await self.worker.run_one(self.run, started=on_started, stop=self._stop, cancel=self._cancel)
        return Exit(Ending.SETTLED) if settled else Exit(Ending.DIED, "ended with exit code 0")

    async def exit(self) -> Exit:
        await asyncio.wait({self._running})
        return Exit(Ending.DIED, KILLED) if self._running.cancelled() else self._running.result()

    def tell(self, word: Word) -> None:
        self.words.append(word)
        if not self._deaf:
            {Word.CANCEL: self._cancel, Word.DRAIN: self._stop}[word].set()

    def kill(self) -> None:
        self._running.cancel()

    def hang(self) -> None:
        """Ignore further cancel and drain requests."""
        self._deaf = True

    @property
    def ended(self) -> bool:
        return self._running.done()


class Cells:
    """Starts isolated runs of `agent`.

    The first runs exit as listed in `exits`; `None` runs normally.
    """

    def __init__(self, mesh: Mesh, agent: Any, *exits: Exit | OSError | None) -> None:
        self._mesh, self._agent, self._exits = mesh, agent, list(exits)
        self.all: list[Cell] = []
        self._changed = asyncio.Event()

    async def start(self, run: Run, on_started: Callable[[], None]) -> Cell:
        exit_as = self._exits.pop(0) if self._exits else None
        if isinstance(exit_as, OSError):
            raise exit_as
        worker = _worker(self._mesh, self._agent)
        await worker.site.broker.open()
        self.all.append(Cell(worker, run, on_started, exit_as))
        self._changed.set()
        return self.all[-1]

    async def close(self) -> None:
        pass

    async def cell(self, count: int = 1) -> Cell:
        """The `count`-th run started, waiting until it has been."""
        while len(self.all) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.all[count - 1]


def _worker(mesh: Mesh, agent: Any) -> Worker:
    broker = FaultyBroker(mesh.exchange)
    return Worker(
        agent,
        broker=broker,
        memory=FaultyStore(InProcessStore(mesh.clock, timings=Timings())),  # type: ignore[arg-type]
        durable=FaultyStore(mesh.store),  # type: ignore[arg-type]
        lease_store=None,
        clock=mesh.clock,
        observer=mesh.events,
        options=replace(Options(), max_concurrency=0),
        local=InProcessWorkingMemory(mesh.clock),
    )
