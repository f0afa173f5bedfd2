"""The course of the demonstration: start, ask, kill, kill, wait, account."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from datetime import timedelta

from pydantic import JsonValue

from meshpoint.client import Client, Reply
from meshpoint.demo.agents import Trip
from meshpoint.demo.ledger import Ledger
from meshpoint.demo.plot import Kill, Plot
from meshpoint.demo.processes import ReplicaFailed, ReplicaProcess
from meshpoint.demo.screen import Screen, print_ledger, screen
from meshpoint.demo.stage import CLIENT, Stage, stage
from meshpoint.demo.story import ROOT, State, Story
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Failed
from meshpoint.wiring import make_broker

REPLICAS = ("A", "B", "C")
LIMIT = timedelta(seconds=60)
"""From the first request; what is not answered by then counts as lost."""

_STARTING_TIME = 30.0
_BETWEEN_REQUESTS = 0.06
_FRAME = 0.1
_CITIES = ("Rome", "Oslo", "Lima", "Kyoto", "Accra", "Porto", "Quito", "Turku", "Bern", "Hanoi", "Perth", "Cork")


def show(*, broker_url: str | None, db_url: str | None, requests: int, seed: int | None, as_json: bool) -> int:
    """Run it all; the exit code. See `meshpoint.demo.run`."""
    seed = random.randrange(1_000_000) if seed is None else seed
    with stage(broker_url, db_url, _tell) as place:
        live = sys.stdout.isatty() and not as_json
        with screen(place.place, live=live) as view:
            try:
                ledger = asyncio.run(Show(place, view, requests, seed).run())
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
    if as_json:
        print(json.dumps(ledger.to_dict()))
    else:
        print_ledger(ledger)
    return 0 if ledger.ok else 1


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Show:
    """One run."""

    def __init__(self, stage: Stage, view: Screen, requests: int, seed: int) -> None:
        self._stage, self._view, self._requests, self._seed = stage, view, requests, seed
        self.story = Story(REPLICAS, requests, time.monotonic())
        self._plot = Plot(self.story)
        self._processes: dict[str, ReplicaProcess] = {}
        self._hearing: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._over = False
        self._running_in_killed = self._paused_in_killed = 0

    async def run(self) -> Ledger:
        """Play it to its end; no process is left, however it ends."""
        # SIGTERM ends it as Ctrl-C does, with every process and file gone, even where SIGINT is ignored.
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        drawing = asyncio.create_task(self._draw())
        try:
            async with Client(make_broker(self._stage.replicas.mesh), CLIENT) as client:
                await self._start()
                try:
                    async with asyncio.timeout(LIMIT.total_seconds()):
                        await self._ask(client)
                except TimeoutError:
                    self.story.note(f"no answer within {LIMIT.total_seconds():.0f} s: those requests are lost", "!")
                repeated = client.duplicates
        finally:
            self._over = True
            await asyncio.gather(*(process.close() for process in self._processes.values()))
            await asyncio.gather(*self._hearing, return_exceptions=True)
            drawing.cancel()
        self._show()
        return self._ledger(repeated)

    # ── replicas ───────────────────────────────────────────────────────────────────────────────────

    async def _start(self) -> None:
        for each in self.story.processes:
            settings = self._stage.peers if each is self.story.peers else self._stage.replicas
            process = self._processes[each.name] = await ReplicaProcess.start(each.name, settings)
            each.pid = process.pid
            self._hearing.append(asyncio.create_task(self._hear(process)))
        try:
            async with asyncio.timeout(_STARTING_TIME):
                await self._all_serving()
        except TimeoutError:
            raise ReplicaFailed(f"no replica served within {_STARTING_TIME:.0f} s") from None
        names = ", ".join(self.story.replicas)
        self.story.note(f"replicas {names} serve {ROOT}; one more process serves its peers")

    async def _all_serving(self) -> None:
        while any(each.state is not State.SERVING for each in self.story.processes):
            self._changed.clear()
            for each in self.story.processes:
                if each.state is State.ENDED:
                    raise self._processes[each.name].failed()
            await self._changed.wait()

    async def _hear(self, process: ReplicaProcess) -> None:
        name = process.name
        async for told in process.events():
            self.story.now = time.monotonic()
            self.story.hear(name, told)
            if kill := self._plot.next_kill(time.monotonic()):
                self._kill(kill)
            self._changed.set()
        self._ended(name)

    def _kill(self, kill: Kill) -> None:
        self._processes[kill.replica].kill()
        self.story.killed(kill.replica, kill.why, kill.remark)

    def _ended(self, name: str) -> None:
        """Everything a replica ever told was heard: what it held when it died is certain now."""
        replica, first, second = self.story.process(name), self._plot.first, self._plot.second
        if first and first.replica == name:
            self._paused_in_killed = len(replica.paused)
        if second and second.replica == name:
            self._running_in_killed = len(replica.running)
        if replica.state is State.SERVING and not self._over:
            self.story.note(f"{name} ended by itself", "!")
        self.story.ended(name)
        self._changed.set()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────

    async def _ask(self, client: Client) -> None:
        self.story.note(f"{self._requests} requests go out; each task pauses twice")
        waiting = []
        for number in range(1, self._requests + 1):
            task_id = TaskId(new_id())
            self.story.asked(task_id, number)
            reply = await client.send(ROOT, self._trip(number), task_id=task_id)
            reply.add_done_callback(self._answered)
            waiting.append(reply)
            await asyncio.sleep(_BETWEEN_REQUESTS)
        await asyncio.wait(waiting)

    def _trip(self, number: int) -> JsonValue:
        trip: JsonValue = Trip(number=number, city=_CITIES[number % len(_CITIES)], seed=self._seed).model_dump()
        return trip

    def _answered(self, reply: asyncio.Future[Reply]) -> None:
        if reply.cancelled():
            return
        self.story.now = time.monotonic()
        self.story.answered(failed=reply.exception() is not None or isinstance(reply.result().outcome, Failed))
        if self.story.answers == self._requests:
            self.story.note(f"all {self._requests} requests are answered", "✓")

    # ── picture and account ────────────────────────────────────────────────────────────────────────

    async def _draw(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(_FRAME)

    def _show(self) -> None:
        self.story.now = time.monotonic()
        self._view.show(self.story)

    def _ledger(self, repeated: int) -> Ledger:
        return Ledger(
            requests=self._requests,
            answers=self.story.answers,
            failed=self.story.failed,
            duplicated=self.story.duplicated,
            repeated=repeated,
            paused_in_killed=self._paused_in_killed,
            running_in_killed=self._running_in_killed,
            resumed_elsewhere=self.story.resumed_elsewhere,
            taken_over=self.story.taken_over,
            seconds=round(self.story.now - self.story.began, 1),
        )
