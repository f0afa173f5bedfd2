"""Run the demo: start replicas, send requests, kill twice, wait, report."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from meshpoint.client.mesh import Mesh
from meshpoint.client.reply_counter import ReplyCounter
from meshpoint.client.task_handle import TaskHandle
from meshpoint.client.transport import Transport
from meshpoint.demo.agents import Trip
from meshpoint.demo.environment import CLIENT, DemoEnvironment, demo_environment
from meshpoint.demo.replica import ReplicaFailed, ReplicaProcess
from meshpoint.demo.screen import open_screen, print_ledger
from meshpoint.demo.tracker import ROOT, Kill, KillPlanner, Ledger, ReplicaState, TaskTracker
from meshpoint.model.error_text import quantity
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Failed
from meshpoint.wiring import make_broker

_REPLICAS = ("A", "B", "C")
_ANSWER_TIMEOUT = 60.0
"""Seconds from the first request after which missing answers count as lost."""

_STARTUP_TIMEOUT = 30.0
_REQUEST_INTERVAL = 0.06
_FRAME_INTERVAL = 0.1
_CITIES = ("Rome", "Oslo", "Lima", "Kyoto", "Accra", "Porto", "Quito", "Turku", "Perth")


def run_demo(
    *, broker_url: str | None, db_url: str | None, requests: int, seed: int | None, as_json: bool
) -> int:
    """Run the demo; return 0 if every number of its ledger is as expected, else 1.

    Args:
        broker_url: RabbitMQ or PostgreSQL; `None` for `db_url`, or else a temporary SQLite file.
        db_url: PostgreSQL, whose tables are created if missing; `None` for a temporary SQLite
            file.
        requests: Number of tasks to start.
        seed: Determines the response times and answers of the peers; `None` for a random seed.
        as_json: Print only the ledger, as JSON on standard output.

    Raises:
        MeshpointError: A server cannot be used, or a replica did not start.
    """
    seed = random.randrange(1_000_000) if seed is None else seed
    with demo_environment(broker_url, db_url) as environment:
        live = sys.stdout.isatty() and not as_json
        with open_screen(environment.location, live=live) as display:
            try:
                ledger = asyncio.run(DemoRun(environment, display, requests, seed).run())
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
    if as_json:
        print(json.dumps(ledger.to_dict()))
    else:
        print_ledger(ledger)
    return 0 if ledger.ok else 1


class DemoRun:
    """One run of the demo."""

    def __init__(
        self,
        environment: DemoEnvironment,
        display: Callable[[TaskTracker], None],
        requests: int,
        seed: int,
    ) -> None:
        self._environment, self._display = environment, display
        self._requests, self._seed = requests, seed
        self.tracker = TaskTracker(_REPLICAS, requests, time.monotonic())
        self._kill_planner = KillPlanner(self.tracker)
        self._processes: dict[str, ReplicaProcess] = {}
        self._event_readers: list[asyncio.Task[None]] = []
        self._state_changed = asyncio.Event()
        self._finished = False
        self._running_in_killed = self._paused_in_killed = 0

    async def run(self) -> Ledger:
        """Run to the end. No process is left afterwards, even after an error."""
        run = asyncio.create_task(self._run())
        # SIGTERM ends the run like Ctrl-C, removing processes and files, even if it ignores
        # SIGINT.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, run.cancel)
        return await run

    async def _run(self) -> Ledger:
        drawing = asyncio.create_task(self._redraw_loop())
        try:
            broker, counter = make_broker(self._environment.replicas.mesh), ReplyCounter()
            async with Transport(broker, CLIENT, counter) as transport:
                await self._start_processes()
                try:
                    async with asyncio.timeout(_ANSWER_TIMEOUT):
                        await self._send_requests(Mesh(transport))
                except TimeoutError:
                    self.tracker.add_log_line(
                        f"answers missing after {_ANSWER_TIMEOUT:.0f} s count as lost", "!"
                    )
                duplicates = counter.duplicates
        finally:
            self._finished = True
            await asyncio.gather(*(process.close() for process in self._processes.values()))
            await asyncio.gather(*self._event_readers, return_exceptions=True)
            drawing.cancel()
        self._redraw()
        return self._build_ledger(duplicates)

    async def _start_processes(self) -> None:
        for each in self.tracker.processes:
            settings = (
                self._environment.peers
                if each is self.tracker.peers
                else self._environment.replicas
            )
            process = self._processes[each.name] = await ReplicaProcess.start(each.name, settings)
            each.pid = process.pid
            self._event_readers.append(asyncio.create_task(self._read_events(process)))
        try:
            async with asyncio.timeout(_STARTUP_TIMEOUT):
                await self._wait_until_serving()
        except TimeoutError:
            raise ReplicaFailed(
                f"the replicas did not start within {_STARTUP_TIMEOUT:.0f} s"
            ) from None
        names = ", ".join(self.tracker.replicas)
        self.tracker.add_log_line(
            f"replicas {names} serve {ROOT}; one more process serves its peers"
        )

    async def _wait_until_serving(self) -> None:
        while any(each.state is not ReplicaState.SERVING for each in self.tracker.processes):
            self._state_changed.clear()
            for each in self.tracker.processes:
                if each.state is ReplicaState.DRAINED:
                    raise self._processes[each.name].startup_error()
            await self._state_changed.wait()

    async def _read_events(self, process: ReplicaProcess) -> None:
        name = process.name
        async for event, timestamp in process.read_events():
            self.tracker.now = time.monotonic()
            self.tracker.handle_event(name, event, timestamp)
            if kill := self._kill_planner.next_kill(time.monotonic()):
                self._kill_replica(kill)
            self._state_changed.set()
        self._process_exited(name)

    def _kill_replica(self, kill: Kill) -> None:
        self._processes[kill.replica].kill()
        self.tracker.replica_killed(kill.replica, kill.reason, kill.state_note)

    def _process_exited(self, name: str) -> None:
        """Record what the replica was doing when it died. All its events have been read by now."""
        replica, first, second = (
            self.tracker.get_process(name),
            self._kill_planner.first_kill,
            self._kill_planner.second_kill,
        )
        if first and first.replica == name:
            self._paused_in_killed = len(replica.paused)
        if second and second.replica == name:
            self._running_in_killed = len(replica.running)
        if replica.state is ReplicaState.SERVING and not self._finished:
            self.tracker.add_log_line(f"{name} ended unexpectedly", "!")
        self.tracker.process_ended(name)
        self._state_changed.set()

    async def _send_requests(self, mesh: Mesh) -> None:
        self.tracker.add_log_line(
            f"{quantity(self._requests, 'request')} to send; each task pauses twice"
        )
        waits: list[asyncio.Task[None]] = []
        try:
            for number in range(1, self._requests + 1):
                task_id = TaskId(new_id())
                self.tracker.request_sent(task_id, number)
                city = _CITIES[number % len(_CITIES)]
                trip = Trip(number=number, city=city, seed=self._seed)
                task = await mesh.send(ROOT, trip, task_id=task_id)
                waits.append(asyncio.create_task(self._await_answer(task)))
                await asyncio.sleep(_REQUEST_INTERVAL)
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    async def _await_answer(self, task: TaskHandle[Any]) -> None:
        outcome = await task.outcome()
        self.tracker.now = time.monotonic()
        self.tracker.answer_received(failed=isinstance(outcome, Failed))
        if self.tracker.answers == self._requests:
            subject = (
                "the request is" if self._requests == 1 else f"all {self._requests} requests are"
            )
            self.tracker.add_log_line(f"{subject} answered", "✓")

    async def _redraw_loop(self) -> None:
        while True:
            self._redraw()
            await asyncio.sleep(_FRAME_INTERVAL)

    def _redraw(self) -> None:
        self.tracker.now = time.monotonic()
        self._display(self.tracker)

    def _build_ledger(self, repeated: int) -> Ledger:
        return Ledger(
            requests=self._requests,
            answers=self.tracker.answers,
            failed=self.tracker.failed,
            duplicated=self.tracker.duplicated,
            repeated=repeated,
            paused_in_killed=self._paused_in_killed,
            running_in_killed=self._running_in_killed,
            resumed_elsewhere=self.tracker.resumed_elsewhere,
            rescued=self.tracker.rescued,
            seconds=round(self.tracker.now - self.tracker.started_at, 1),
        )
