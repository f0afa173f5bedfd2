"""The mesh of a simulation: database, exchange, replicas, and a check for leftovers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from random import Random
from typing import Any

from meshpoint.model.events import Event, Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import dead_letter_queue
from meshpoint.model.options import Options, StoreTimings

from .agents import Impatient, Leaf, Nested, Patient, Root
from .broker import SimulatedBroker, SimulatedExchange
from .client import OPERATOR, SimulatedClient
from .ledger import Ledger
from .listener import Listener
from .loop import SimulatedLoop
from .network_faults import Network
from .replicas import Process, VirtualClock
from .retrying_agents import Flaky, Insistent
from .store import RemoteStore, WatchedStore
from .values import DATABASE

AGENTS = (Root, Nested, Impatient, Patient, Insistent, Listener, Flaky, Leaf)


_TIMINGS = StoreTimings(dispatch_lease=timedelta(seconds=1))


@dataclass(frozen=True)
class Variant:
    """Configuration of the mesh, derived from the seed.

    `checkpointing` is the probability that a replica starts with it switched on.
    """

    durable: bool
    checkpointing: float
    options: Options


def draw_variant(rng: Random) -> Variant:
    """Mostly with a database; sometimes tasks may fall back to the in-process backend, sometimes
    it is the only one, and sometimes checkpointing is switched between replicas and at restarts.
    """
    may_degrade = rng.random() < 0.3
    lease = timedelta(seconds=rng.choice([2, 2, 15]))  # short leases are lost more often
    options = Options(
        max_concurrency=rng.choice([1, 3, 10]),
        max_attempts=1000,
        operator_logins=(OPERATOR,),
        lease=lease,
        renew_interval=lease / 3,
        max_in_memory=rng.choice([5, 100]),
        peer_timeout=timedelta(days=1),
        drain_timeout=timedelta(seconds=rng.choice([0.1, 3, 20])),
        release_timeout=timedelta(seconds=2),
        startup_timeout=timedelta(days=1),
        response_prefetch=rng.choice([1, 10, 100]),
        checkpoint_retry_time=timedelta(seconds=rng.choice([0, 1, 5])),
        ack_policy=rng.choice(["at_checkpoint", "at_checkpoint", "on_receipt"]),
        on_checkpoint_failure="keep_in_memory" if may_degrade else "wait",
    )
    is_durable = rng.random() < 0.85
    return Variant(is_durable, rng.choice([1, 1, 1, 0.5, 0]) if is_durable else 0, options)


class Mesh:
    """Two to three replicas of each agent, and one client."""

    def __init__(self, seed: int, loop: SimulatedLoop, trace: Callable[[str], None]) -> None:
        self.loop, self.trace = loop, trace
        self.rng = Random(f"{seed}/mesh")
        self._pause_rng = Random(f"{seed}/agents")
        self._max_pause = self._pause_rng.choice([0.05, 0.05, 1.0, 8.0])
        self.variant = draw_variant(self.rng)
        self.network = Network(Random(f"{seed}/weather"), trace)
        self.exchange = SimulatedExchange(self.network)
        self.clock = VirtualClock(loop)
        self.ledger = Ledger(self.clock.now)
        self.ledger.signals.is_strict = self.is_strict
        self.store = WatchedStore(self.clock, _TIMINGS, DATABASE, self.ledger, durable=True)
        self.processes: list[Process] = []
        self.live_processes: list[Process] = []
        self.memories: dict[str, WatchedStore] = {}
        self._numbers = count(1)
        self.client = SimulatedClient(self.connect("client"))

    @property
    def is_strict(self) -> bool:
        """Whether every task is kept in the database."""
        may_degrade = self.variant.options.on_checkpoint_failure == "keep_in_memory"
        return self.variant.checkpointing == 1 and not may_degrade

    def emit(self, event: Event) -> None:
        """Trace a worker's event; report replies dropped for lack of room to the ledger."""
        if event.step is Step.REPLY_DROPPED and str(event.detail["reason"]).startswith(
            "max_in_memory"
        ):
            self.ledger.record_dropped(event.task_ids)
        detail = " ".join(f"{key}={value}" for key, value in event.detail.items())
        ids = ",".join(event.task_ids)
        self.trace(
            f"{event.replica} {event.step.value} {event.phase.value} {ids} {detail}".rstrip()
        )

    def launch(self, agent: Any) -> Process:
        """Start a replica of `agent`."""
        name = f"{agent.name}-{next(self._numbers)}"
        clock = VirtualClock(self.loop, self.rng.uniform(-0.2, 0.2))
        memory = WatchedStore(clock, _TIMINGS, name, self.ledger, durable=False)
        process = Process(
            name,
            agent,
            broker=self.connect(name),
            memory=memory,
            durable=self._open_store if self.variant.durable else None,
            clock=clock,
            observer=self,
            options=replace(
                self.variant.options,
                stateless_checkpointing=self.rng.random() < self.variant.checkpointing,
            ),
        )
        self.processes.append(process)
        self.live_processes.append(process)
        self.memories[name] = memory
        self.trace(f"launch {name}")
        return process

    async def open(self) -> None:
        """Start everything without faults, so that every queue exists."""
        await self.client.open()
        for agent in AGENTS:
            for _ in range(self.rng.randint(2, 3)):
                self.launch(self._create(agent))
        await asyncio.sleep(1)

    def _create(self, agent: type[Any]) -> Any:
        if agent is Listener:
            return Listener(self._random_pause, self.ledger.signals.check_received)
        return agent(self._random_pause, self.ledger.check_returned)

    def unfinished_work(self) -> list[str]:
        """Unfinished work, except tasks that wait for a dropped reply."""
        excused_ids = self.ledger.excused_task_ids()
        expected = [each for each in self.client.requests if each.task_id not in excused_ids]
        unfinished = [
            f"{address}: {count} messages"
            for address, count in self.exchange.remaining_messages(excused_ids).items()
        ]
        unfinished += [
            f"unanswered: {each}"
            for each in expected
            if each.task_id not in self.client.answered_ids
        ]
        unfinished += self._open_rows(DATABASE, self.store, excused_ids)
        for process in self.live_processes:
            worker = process.worker
            if worker.runtime.slots.free != self.variant.options.max_concurrency:
                unfinished.append(f"{process.name}: {worker.runtime.slots.free} slots are free")
            unfinished += [f"{process.name} runs {task}" for task in worker.tasks.segments]
            unfinished += [
                f"{process.name} holds {task}"
                for task in worker.tasks.unacked.by_task
                if task not in excused_ids
            ]
            unfinished += self._open_rows(process.name, self.memories[process.name], excused_ids)
        return unfinished

    def dead_letters(self) -> list[str]:
        """All messages in the dead-letter queues."""
        queues = [
            self.exchange.queues.get(dead_letter_queue(AgentName(agent.name))) for agent in AGENTS
        ]
        return [str(item.message) for queue in queues if queue is not None for item in queue.ready]

    async def tear_down(self) -> None:
        """End every process, dead ones included, so that none is left to the garbage collector."""
        self.network.stop_faults()
        worker_tasks = [process.task for process in self.processes if not process.task.done()]
        for process in self.processes:
            process.thaw()
            process.task.cancel()
        if worker_tasks:
            await asyncio.wait(worker_tasks, timeout=60)
        for process in self.processes:
            await process.broker.close()

    def _open_rows(
        self, store_name: str, store: WatchedStore, excused_ids: Container[str]
    ) -> list[str]:
        rows = {**store.tables.live, **store.tables.sending}
        return [
            f"{store_name}: {row.task_id} of {row.agent} is {row.state}, unsent {row.unsent}"
            for row in rows.values()
            if row.task_id not in excused_ids
        ]

    def connect(self, process: str) -> SimulatedBroker:
        """A connection of `process` to the broker. It is not open yet."""
        return SimulatedBroker(self.exchange, self.network, process, self.ledger.check_accepted)

    def _open_store(self) -> Any:
        return RemoteStore(self.store, self.network)

    async def _random_pause(self) -> None:
        rng = self._pause_rng
        draw = rng.random()
        seconds = (
            rng.uniform(0, self._max_pause)
            if draw < 0.9
            else rng.uniform(0.5, 5)
            if draw < 0.98
            else 20.0
        )
        await asyncio.sleep(seconds)
