"""Faults applied to the mesh, derived from the seed; afterwards everything must end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from random import Random

from meshpoint.errors import MeshpointError
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

from .broker import BROKER
from .client import ClientRequest
from .mesh import Mesh
from .network_faults import draw_fault_rates
from .person import Person
from .replicas import Process
from .signal_sender import SignalSender
from .store import STORE

_SENDERS = ("ada", "bob")
_HEALING_SECONDS = 600.0
"""Virtual seconds until everything must have ended: back-offs of up to a minute may add up."""


class FaultPlan:
    """A time of faults, then a fault-free time."""

    def __init__(self, mesh: Mesh, rng: Random) -> None:
        self._mesh, self._rng = mesh, rng
        self._person = Person(mesh, Random(rng.random()))
        self._senders = [SignalSender(mesh, name, Random(rng.random())) for name in _SENDERS]
        self._background: set[asyncio.Task[None]] = set()
        self._cancelled_calls: set[str] = set()
        self._actions: list[Callable[[], Awaitable[None]]] = [
            self._kill,
            self._abort,
            self._drain,
            self._freeze,
            self._lose_connection,
            self._outage,
            self._cancel,
            self._cancel_a_call,
            self._suspend,
            self._unsuspend,
            self._do_nothing,
        ]
        self._chosen_actions = rng.sample(self._actions, rng.randint(1, len(self._actions)))

    async def run(self) -> None:
        """Run the whole plan; violations are recorded in the ledger."""
        mesh, rng = self._mesh, self._rng
        await mesh.open()
        for sender in self._senders:
            await sender.open()
        mesh.network.fault_rates = draw_fault_rates(rng)
        mesh.trace(f"{mesh.variant} {mesh.network.fault_rates}")
        others = [asyncio.ensure_future(self._person.run())]
        others += [asyncio.ensure_future(each.run()) for each in self._senders]
        try:
            await self._apply_faults()
        finally:
            for each in others:
                if each.done() and not each.cancelled():
                    mesh.ledger.check(False, f"a caller died: {each.exception()!r}")
                each.cancel()

    async def _apply_faults(self) -> None:
        mesh, rng = self._mesh, self._rng
        request_task = self._start_in_background(self._send_requests())
        for _ in range(rng.randint(5, 40)):
            await asyncio.sleep(rng.choice([0.02, 0.2, 1, 3]) * rng.random())
            self._replace_ended()
            await rng.choice(self._chosen_actions)()
            if mesh.ledger.violations:
                return
        await asyncio.wait({request_task})
        await self._heal()
        if not mesh.ledger.violations:
            self._check_replies()

    async def _send_requests(self) -> None:
        mesh, rng = self._mesh, self._rng
        for number in rng.sample(range(1000), rng.randint(1, 10)):
            await asyncio.sleep(rng.choice([0, 0.1, 3]) * rng.random())
            possible_deadline = mesh.clock.now() + timedelta(seconds=rng.choice([0.05, 2, 8, 30]))
            deadline = possible_deadline.timestamp() if rng.random() < 0.15 else None
            await mesh.client.send_request(number, tight=rng.random() < 0.15, deadline=deadline)

    async def _heal(self) -> None:
        mesh = self._mesh
        mesh.trace("heal")
        mesh.network.stop_faults()
        self._person.is_hurried = True
        for sender in self._senders:
            sender.is_hurried = True
        await mesh.store.unsuspend(self._suspended_ids())
        for process in mesh.live_processes:
            process.thaw()
        if self._background:
            _, unfinished = await asyncio.wait(self._background, timeout=100)
            mesh.ledger.check(
                not unfinished,
                f"drains did not end: {sorted(task.get_name() for task in unfinished)}",
            )
        deadline = mesh.loop.time() + _HEALING_SECONDS
        while (
            (unfinished_work := mesh.unfinished_work())
            and mesh.loop.time() < deadline
            and not mesh.ledger.violations
        ):
            self._replace_ended()
            await asyncio.sleep(1)
        mesh.trace("healed")
        for each in unfinished_work:
            mesh.ledger.check(False, f"left over: {each}")

    async def _kill(self) -> None:
        if process := self._pick_process():
            self._mesh.trace(f"kill {process.name}")
            self._mesh.live_processes.remove(process)
            if self._rng.random() < 0.5:
                process.kill()
            else:  # its machine is gone: the broker learns of it later
                self._mesh.loop.freeze(process.name)
                self._mesh.loop.call_later(10 * self._rng.random(), process.kill)
            self._replace(process)

    async def _abort(self) -> None:
        if process := self._pick_process():
            self._mesh.trace(f"abort {process.name}")
            self._mesh.live_processes.remove(process)
            self._start_in_background(process.abort())
            self._replace(process)

    async def _drain(self) -> None:
        if process := self._pick_process():
            self._mesh.trace(f"drain {process.name}")
            self._mesh.live_processes.remove(process)
            self._start_in_background(self._drain_and_check(process))
            self._replace(process)

    async def _drain_and_check(self, process: Process) -> None:
        await process.drain()
        self._check_end(process)

    async def _freeze(self) -> None:
        if process := self._pick_busy_process():  # frozen past its lease, it becomes a zombie
            seconds = self._rng.choice([1, 10, 40, 60]) * self._rng.random()
            self._mesh.trace(f"freeze {process.name} for {seconds}")
            process.freeze(seconds)
            if seconds > 5 and self._rng.random() < 0.5:
                self._mesh.loop.call_later(
                    seconds * self._rng.random(), process.broker.lose_connection
                )

    async def _lose_connection(self) -> None:
        if process := self._pick_process():
            self._mesh.trace(f"disconnect {process.name}")
            process.broker.lose_connection()

    async def _outage(self) -> None:
        process = self._pick_busy_process()
        affected = process.name if process and self._rng.random() < 0.6 else ""
        server, seconds = (
            self._rng.choice([STORE, BROKER]),
            self._rng.choice([1, 6, 20, 40]) * self._rng.random(),
        )
        self._mesh.trace(f"{server} is unavailable to {affected or 'all'} for {seconds}")
        self._mesh.network.start_outage(affected, server, seconds)

    async def _cancel(self) -> None:
        if self._mesh.client.requests:
            request = self._rng.choice(self._mesh.client.requests[-3:])
            request.is_cancelled = True
            self._mesh.trace(f"cancel {request.task_id}")
            self._start_in_background(self._mesh.client.cancel(AgentName("root"), request.task_id))

    async def _cancel_a_call(self) -> None:
        if self._mesh.ledger.calls:
            sub_task_id = self._rng.choice(list(self._mesh.ledger.calls)[-20:])
            self._cancelled_calls.add(sub_task_id)
            self._mesh.trace(f"cancel call {sub_task_id}")
            peer = AgentName(self._mesh.ledger.calls[sub_task_id])
            self._start_in_background(self._mesh.client.cancel(peer, TaskId(sub_task_id)))

    async def _suspend(self) -> None:
        if live := sorted(self._mesh.store.tables.live):
            task_ids = self._rng.sample(live, min(len(live), self._rng.choice([1, 3, 100])))
            self._mesh.trace(f"suspend {task_ids}")
            await self._mesh.store.suspend(task_ids)

    async def _unsuspend(self) -> None:
        task_ids = self._suspended_ids()
        self._mesh.trace(f"unsuspend {task_ids}")
        await self._mesh.store.unsuspend(task_ids)

    def _suspended_ids(self) -> list[TaskId]:
        live = self._mesh.store.tables.live.values()
        return [row.task_id for row in live if row.is_suspended]

    async def _do_nothing(self) -> None:
        pass

    def _pick_process(self) -> Process | None:
        running = [
            each for each in self._mesh.live_processes if not self._mesh.loop.is_frozen(each.name)
        ]
        return self._rng.choice(running) if running else None

    def _pick_busy_process(self) -> Process | None:
        running = [
            each for each in self._mesh.live_processes if not self._mesh.loop.is_frozen(each.name)
        ]
        busy = [
            each
            for each in running
            if any(run.run.fence for run in each.worker.tasks.segments.values())
        ]
        return self._rng.choice(busy) if busy else self._pick_process()

    def _replace(self, process: Process) -> None:
        async def launch_later(seconds: float) -> None:
            await asyncio.sleep(seconds)
            self._mesh.launch(process.agent)

        self._start_in_background(launch_later(self._rng.choice([0, 3]) * self._rng.random()))

    def _start_in_background(self, step: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(step)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _replace_ended(self) -> None:
        for process in list(self._mesh.live_processes):
            if process.task.done():
                self._mesh.live_processes.remove(process)
                self._check_end(process)
                self._mesh.launch(process.agent)

    def _check_end(self, process: Process) -> None:
        """Check why a worker ended: it was stopped, or a server was unavailable at its start."""
        if not process.task.cancelled() and (error := process.task.exception()):
            is_outage = isinstance(error, MeshpointError)
            self._mesh.ledger.check(is_outage, f"{process.name} died: {error!r}")

    def _check_replies(self) -> None:
        mesh = self._mesh
        for dead_letter in mesh.dead_letters():
            mesh.ledger.check(False, f"dead letter: {dead_letter}")
        mesh.ledger.signals.check_end(list(mesh.store.tables.tasks.values()))
        for request in mesh.client.requests:
            replies = mesh.ledger.replies[request.task_id]
            for outcome in replies:
                mesh.ledger.check(
                    self._is_allowed_outcome(request, outcome), f"{request} ended as {outcome}"
                )
            if mesh.is_strict and not request.has_deadline:
                mesh.ledger.check(
                    all(each == replies[0] for each in replies), f"{request} has replies {replies}"
                )

    def _is_allowed_outcome(self, request: ClientRequest, outcome: Outcome) -> bool:
        match outcome:
            case Ok(value=dict() as value):
                may_be_late = (
                    request.has_tight_timeouts
                    or request.has_deadline
                    or bool(self._cancelled_calls)
                )
                is_correct = (
                    value["number"] == request.number
                    and value["pauses"] == 2
                    and value["wrong"] == []
                )
                return is_correct and (value["late"] == 0 or may_be_late)
            case Failed(kind=FailureKind.CANCELLED):
                return request.is_cancelled
            case Failed(kind=FailureKind.TIMEOUT):
                return request.has_deadline
            case _:
                return False
