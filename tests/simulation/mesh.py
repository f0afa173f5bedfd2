"""The mesh of a simulation: database, exchange, replicas, and a check for leftovers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from random import Random
from typing import Any

from meshpoint.model.events import Event, Step
from meshpoint.model.messages import dead_letters_of
from meshpoint.model.options import AckPolicy, OnCheckpointFailure, Options

from .agents import Leaf, Nested, Root
from .boss import OPERATOR, Boss
from .broker import SimulatedBroker, SimulatedExchange
from .ledger import DATABASE, Ledger
from .loop import SimulatedLoop
from .replicas import Process, VirtualClock
from .store import RemoteStore, WatchedStore
from .weather import Weather

AGENTS = (Root, Nested, Leaf)


@dataclass
class _Timings:
    dispatch_lease: timedelta = timedelta(seconds=1)
    tombstone_ttl: timedelta = timedelta(days=1)
    incompatible_limit: timedelta = timedelta(hours=1)
    checkpoint_ttl: timedelta = timedelta(days=30)
    checkpoint_history: int = 5
    checkpoint_archive: bool = False


@dataclass(frozen=True)
class Variant:
    """Configuration of the mesh, derived from the seed."""

    durable: bool
    options: Options


def draw_variant(dice: Random) -> Variant:
    """Mostly with a database; sometimes tasks may fall back to the in-process backend, sometimes
    it is the only one.
    """
    degrades = dice.random() < 0.3
    lease = timedelta(seconds=dice.choice([2, 2, 15]))  # short leases are lost more often
    options = Options(
        max_concurrency=dice.choice([1, 3, 10]),
        max_attempts=1000,
        operator_logins=(OPERATOR,),
        lease=lease,
        renew_interval=lease / 3,
        max_in_memory=dice.choice([5, 100]),
        peer_timeout=timedelta(days=1),
        drain_timeout=timedelta(seconds=dice.choice([0.1, 3, 20])),
        release_timeout=timedelta(seconds=2),
        startup_timeout=timedelta(days=1),
        response_prefetch=dice.choice([1, 10, 100]),
        checkpoint_retry_time=timedelta(seconds=dice.choice([0, 1, 5])),
        ack_policy=dice.choice([AckPolicy.AT_CHECKPOINT, AckPolicy.AT_CHECKPOINT, AckPolicy.ON_RECEIPT]),
        on_checkpoint_failure=OnCheckpointFailure.KEEP_IN_MEMORY if degrades else OnCheckpointFailure.WAIT,
    )
    return Variant(dice.random() < 0.85, options)


class Mesh:
    """Two to three replicas of each agent, and one client."""

    def __init__(self, seed: int, loop: SimulatedLoop, tell: Callable[[str], None]) -> None:
        self.loop, self.tell = loop, tell
        self.dice = Random(f"{seed}/mesh")
        self._thoughts = Random(f"{seed}/agents")
        self._pace = self._thoughts.choice([0.05, 0.05, 1.0, 8.0])
        self.variant = draw_variant(self.dice)
        self.weather = Weather(Random(f"{seed}/weather"), tell)
        self.exchange = SimulatedExchange(self.weather)
        self.ledger = Ledger()
        self.clock = VirtualClock(loop)
        self.store = WatchedStore(
            self.clock, _Timings(), partial(self.ledger.written, DATABASE), self.ledger.must, durable=True
        )
        self.processes: list[Process] = []
        self.living: list[Process] = []
        self.memories: dict[str, WatchedStore] = {}
        self._numbers = count(1)
        self.boss = Boss(self._broker("boss"))

    @property
    def strict(self) -> bool:
        """Whether every task is kept in the database."""
        return self.variant.durable and self.variant.options.on_checkpoint_failure is OnCheckpointFailure.WAIT

    def emit(self, event: Event) -> None:
        """Trace a worker's event; report replies dropped for lack of room to the ledger."""
        if event.step is Step.REPLY_DROPPED and str(event.detail["reason"]).startswith("max_in_memory"):
            self.ledger.dropped(event.task_ids)
        detail = " ".join(f"{key}={value}" for key, value in event.detail.items())
        ids = ",".join(event.task_ids)
        self.tell(f"{event.replica} {event.step.value} {event.phase.value} {ids} {detail}".rstrip())

    def launch(self, agent: Any) -> Process:
        """Start a replica of `agent`."""
        name = f"{agent.name}-{next(self._numbers)}"
        clock = VirtualClock(self.loop, self.dice.uniform(-0.2, 0.2))
        memory = WatchedStore(clock, _Timings(), partial(self.ledger.written, name), self.ledger.must, durable=False)
        process = Process(
            name,
            agent,
            broker=self._broker(name),
            memory=memory,
            durable=self._open_store if self.variant.durable else None,
            clock=clock,
            observer=self,
            options=replace(self.variant.options),
        )
        self.processes.append(process)
        self.living.append(process)
        self.memories[name] = memory
        self.tell(f"launch {name}")
        return process

    async def open(self) -> None:
        """Start everything without faults, so that every queue exists."""
        await self.boss.open()
        for agent in AGENTS:
            for _ in range(self.dice.randint(2, 3)):
                self.launch(agent(self._think, self.ledger.returned))
        await asyncio.sleep(1)

    def left_over(self) -> list[str]:
        """Unfinished work, except tasks that wait for a dropped reply."""
        excused = self.ledger.excused()
        expected = [each for each in self.boss.asked if each.task_id not in excused]
        left = [f"{address}: {found} messages" for address, found in self.exchange.left_over(excused).items()]
        left += [f"unanswered: {each}" for each in expected if each.task_id not in self.boss.answered]
        left += self._rows(DATABASE, self.store, excused)
        for process in self.living:
            worker = process.worker
            if worker.site.slots.free != self.variant.options.max_concurrency:
                left.append(f"{process.name}: {worker.site.slots.free} slots are free")
            left += [f"{process.name} runs {task}" for task in worker.segments.live]
            left += [f"{process.name} holds {task}" for task in worker.segments.held if task not in excused]
            left += self._rows(process.name, self.memories[process.name], excused)
        return left

    def dead_letters(self) -> list[str]:
        """All messages in the dead-letter queues."""
        queues = [self.exchange.queue(dead_letters_of(agent.name)) for agent in AGENTS]  # type: ignore[arg-type]
        return [str(item.message) for queue in queues if queue is not None for item in queue.ready]

    async def tear_down(self) -> None:
        """End every process, dead ones included, so that no task is left to the garbage collector."""
        self.weather.clear()
        tasks = [process.task for process in self.processes if not process.task.done()]
        for process in self.processes:
            process.thaw()
            process.task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=60)
        for process in self.processes:
            await process.broker.close()

    def _rows(self, home: str, store: WatchedStore, excused: Container[str]) -> list[str]:
        rows = {**store.tables.live, **store.tables.sending}
        return [
            f"{home}: {row.task_id} of {row.agent} is {row.state}, unsent {row.unsent}"
            for row in rows.values()
            if row.task_id not in excused
        ]

    def _broker(self, process: str) -> SimulatedBroker:
        return SimulatedBroker(self.exchange, self.weather, process, self.ledger.heard)

    def _open_store(self) -> Any:
        return RemoteStore(self.store, self.weather)

    async def _think(self) -> None:
        dice = self._thoughts
        draw = dice.random()
        seconds = dice.uniform(0, self._pace) if draw < 0.9 else dice.uniform(0.5, 5) if draw < 0.98 else 20.0
        await asyncio.sleep(seconds)
