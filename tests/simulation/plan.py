"""Faults applied to the mesh, derived from the seed; afterwards everything must end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from random import Random

from meshpoint.errors import MeshpointError
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

from .boss import Asked
from .broker import BROKER
from .mesh import Mesh
from .replicas import Process
from .store import STORE
from .weather import draw_climate

_HEALING = 600.0
"""Virtual seconds until everything must have ended: back-offs of up to a minute may add up."""


class Plan:
    """A time of faults, then a fault-free time."""

    def __init__(self, mesh: Mesh, dice: Random) -> None:
        self._mesh, self._dice = mesh, dice
        self._busy: set[asyncio.Task[None]] = set()
        self._wished: set[str] = set()
        self._actions: list[Callable[[], Awaitable[None]]] = [
            self._kill,
            self._abort,
            self._drain,
            self._freeze,
            self._lose_connection,
            self._outage,
            self._cancel,
            self._cancel_a_call,
            self._nothing,
        ]
        self._chosen = dice.sample(self._actions, dice.randint(1, len(self._actions)))

    async def run(self) -> None:
        """Run the whole plan; violations are recorded in the ledger."""
        mesh, dice = self._mesh, self._dice
        await mesh.open()
        mesh.weather.climate = draw_climate(dice)
        mesh.tell(f"{mesh.variant} {mesh.weather.climate}")
        asking = self._beside(self._ask())
        for _ in range(dice.randint(5, 40)):
            await asyncio.sleep(dice.choice([0.02, 0.2, 1, 3]) * dice.random())
            self._look_after()
            await dice.choice(self._chosen)()
            if mesh.ledger.broken:
                return
        await asyncio.wait({asking})
        await self._heal()
        if not mesh.ledger.broken:
            self._judge()

    async def _ask(self) -> None:
        mesh, dice = self._mesh, self._dice
        for number in dice.sample(range(1000), dice.randint(1, 10)):
            await asyncio.sleep(dice.choice([0, 0.1, 3]) * dice.random())
            in_time = mesh.clock.now() + timedelta(seconds=dice.choice([0.05, 2, 8, 30]))
            deadline = in_time.timestamp() if dice.random() < 0.15 else None
            await mesh.boss.ask(number, tight=dice.random() < 0.15, deadline=deadline)

    async def _heal(self) -> None:
        mesh = self._mesh
        mesh.tell("heal")
        mesh.weather.clear()
        for process in mesh.living:
            process.thaw()
        if self._busy:
            _, late = await asyncio.wait(self._busy, timeout=100)
            mesh.ledger.must(not late, f"drains did not end: {sorted(task.get_name() for task in late)}")
        until = mesh.loop.time() + _HEALING
        while (left := mesh.left_over()) and mesh.loop.time() < until and not mesh.ledger.broken:
            self._look_after()
            await asyncio.sleep(1)
        mesh.tell("healed")
        for each in left:
            mesh.ledger.must(False, f"left over: {each}")

    async def _kill(self) -> None:
        if process := self._pick():
            self._mesh.tell(f"kill {process.name}")
            self._mesh.living.remove(process)
            if self._dice.random() < 0.5:
                process.kill()
            else:  # its machine is gone: the broker learns of it later
                self._mesh.loop.freeze(process.name)
                self._mesh.loop.call_later(10 * self._dice.random(), process.kill)
            self._replace(process)

    async def _abort(self) -> None:
        if process := self._pick():
            self._mesh.tell(f"abort {process.name}")
            self._mesh.living.remove(process)
            self._beside(process.abort())
            self._replace(process)

    async def _drain(self) -> None:
        if process := self._pick():
            self._mesh.tell(f"drain {process.name}")
            self._mesh.living.remove(process)
            self._beside(self._drained(process))
            self._replace(process)

    async def _drained(self, process: Process) -> None:
        await process.drain()
        self._well(process)

    async def _freeze(self) -> None:
        if process := self._pick_busy():  # frozen past its lease, it becomes a zombie
            seconds = self._dice.choice([1, 10, 40, 60]) * self._dice.random()
            self._mesh.tell(f"freeze {process.name} for {seconds}")
            process.freeze(seconds)
            if seconds > 5 and self._dice.random() < 0.5:
                self._mesh.loop.call_later(seconds * self._dice.random(), process.broker.lose_connection)

    async def _lose_connection(self) -> None:
        if process := self._pick():
            self._mesh.tell(f"disconnect {process.name}")
            process.broker.lose_connection()

    async def _outage(self) -> None:
        process = self._pick_busy()
        who = process.name if process and self._dice.random() < 0.6 else ""
        server, seconds = self._dice.choice([STORE, BROKER]), self._dice.choice([1, 6, 20, 40]) * self._dice.random()
        self._mesh.tell(f"{server} is unavailable to {who or 'all'} for {seconds}")
        self._mesh.weather.cut(who, server, seconds)

    async def _cancel(self) -> None:
        if self._mesh.boss.asked:
            asked = self._dice.choice(self._mesh.boss.asked[-3:])
            asked.cancelled = True
            self._mesh.tell(f"cancel {asked.task_id}")
            self._beside(self._mesh.boss.cancel(AgentName("root"), asked.task_id))

    async def _cancel_a_call(self) -> None:
        if self._mesh.ledger.calls:
            sub_task_id = self._dice.choice(list(self._mesh.ledger.calls)[-20:])
            self._wished.add(sub_task_id)
            self._mesh.tell(f"cancel call {sub_task_id}")
            peer = AgentName(self._mesh.ledger.calls[sub_task_id])
            self._beside(self._mesh.boss.cancel(peer, TaskId(sub_task_id)))

    async def _nothing(self) -> None:
        pass

    def _pick(self) -> Process | None:
        upright = [each for each in self._mesh.living if not self._mesh.loop.is_frozen(each.name)]
        return self._dice.choice(upright) if upright else None

    def _pick_busy(self) -> Process | None:
        upright = [each for each in self._mesh.living if not self._mesh.loop.is_frozen(each.name)]
        busy = [each for each in upright if any(run.run.fence for run in each.worker.segments.live.values())]
        return self._dice.choice(busy) if busy else self._pick()

    def _replace(self, process: Process) -> None:
        async def later(seconds: float) -> None:
            await asyncio.sleep(seconds)
            self._mesh.launch(process.agent)

        self._beside(later(self._dice.choice([0, 3]) * self._dice.random()))

    def _beside(self, step: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(step)
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)
        return task

    def _look_after(self) -> None:
        for process in list(self._mesh.living):
            if process.task.done():
                self._mesh.living.remove(process)
                self._well(process)
                self._mesh.launch(process.agent)

    def _well(self, process: Process) -> None:
        """Check why a worker ended: it was stopped, or a server was unavailable at its start."""
        if not process.task.cancelled() and (error := process.task.exception()):
            away = isinstance(error, MeshpointError)
            self._mesh.ledger.must(away, f"{process.name} died: {error!r}")

    def _judge(self) -> None:
        mesh = self._mesh
        for letter in mesh.dead_letters():
            mesh.ledger.must(False, f"dead letter: {letter}")
        for asked in mesh.boss.asked:
            replies = mesh.ledger.replies[asked.task_id]
            for outcome in replies:
                mesh.ledger.must(self._may_be(asked, outcome), f"{asked} ended as {outcome}")
            if mesh.strict and not asked.deadline:
                mesh.ledger.must(all(each == replies[0] for each in replies), f"{asked} has replies {replies}")

    def _may_be(self, asked: Asked, outcome: Outcome) -> bool:
        match outcome:
            case Ok(value=dict() as value):
                may_be_late = asked.tight or asked.deadline or bool(self._wished)
                right = value["number"] == asked.number and value["pauses"] == 2 and value["wrong"] == []
                return right and (value["late"] == 0 or may_be_late)
            case Failed(kind=FailureKind.CANCELLED):
                return asked.cancelled
            case Failed(kind=FailureKind.TIMEOUT):
                return asked.deadline
            case _:
                return False
