"""Senders of signals: one signal at a time, repeated until acknowledged, or given up."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from random import Random

from meshpoint.errors import BrokerUnavailable
from meshpoint.model.bodies import CompletedBody, parse_body
from meshpoint.model.envelopes import read_message, signal_message
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import (
    CompletionStatus,
    Header,
    Message,
    response_queue,
)
from meshpoint.ports.broker import Delivery, PublishResult

from .client import OPERATOR
from .listener import CHAT, RECEIVED, STOP, Line
from .mesh import Mesh

_LISTENER = AgentName("listener")
_DELAYS = (0.02, 0.3, 2)
_ENDED = ("has already ended", "ended before it received")


class SignalSender:
    """Sends signals to tasks of `listener`, from the moment its caller has committed the call.

    Attributes:
        is_hurried: Only send last signals, so that every task ends.
    """

    def __init__(self, mesh: Mesh, name: str, rng: Random) -> None:
        self._mesh, self._name, self._rng = mesh, AgentName(name), rng
        self._broker, self._numbers = mesh.connect(name), count(1)
        self._replies: dict[str, asyncio.Future[tuple[CompletionStatus, CompletedBody]]] = {}
        self._acks: set[asyncio.Task[bool]] = set()
        self._acknowledged: list[tuple[TaskId, str, Line]] = []
        self._finished: set[TaskId] = set()
        self.is_hurried = False

    async def open(self) -> None:
        """Start to receive replies."""
        await self._broker.open()
        await self._broker.declare(self._name)
        await self._broker.consume(response_queue(self._name), 1000, self._on_reply)

    async def run(self) -> None:
        """Send signals until cancelled."""
        while True:
            await asyncio.sleep(0.2 if self.is_hurried else self._rng.choice(_DELAYS))
            tasks = self._find_live() if self.is_hurried else self._find_called()
            if tasks:
                await self._act(self._rng.choice(tasks))

    def _find_called(self) -> list[TaskId]:
        """Tasks that have been requested lately. Some have not begun, some have ended."""
        calls = self._mesh.ledger.calls.items()
        return [TaskId(id_) for id_, peer in calls if peer == _LISTENER][-4:]

    def _find_live(self) -> list[TaskId]:
        stores = [self._mesh.store]
        stores += [self._mesh.memories[process.name] for process in self._mesh.live_processes]
        rows = [row for store in stores for row in store.tables.live.values()]
        tasks = [row.task_id for row in rows if row.agent == _LISTENER]
        return [each for each in tasks if each not in self._finished]

    async def _act(self, task_id: TaskId) -> None:
        draw = self._rng.random()
        if self.is_hurried or draw < 0.1:
            await self._send_new(task_id, is_last=True)
        elif draw < 0.7:
            await self._send_new(task_id, is_last=False)
        elif draw < 0.85 and self._acknowledged:
            await self._send_again(*self._rng.choice(self._acknowledged[-5:]))
        else:
            await self._read(task_id)

    async def _send_new(self, task_id: TaskId, *, is_last: bool) -> None:
        name = CHAT.name if is_last else self._rng.choice([CHAT.name, CHAT.name, STOP.name])
        id_ = f"{self._name}.{next(self._numbers)}"
        line = Line(id=id_, text=id_, is_last=is_last)
        self._mesh.ledger.signals.record_sent(task_id, name, id_)
        tries = 5 if self.is_hurried else self._rng.choice([1, 3, 5])
        status, text = await self._signal(task_id, name, line, tries)
        if status is CompletionStatus.RECORDED:
            self._acknowledged.append((task_id, name, line))
            self._finished |= {task_id} if self.is_hurried else set()
            self._mesh.ledger.signals.record_acknowledged(self._name, task_id, name, id_)
        elif status is CompletionStatus.REFUSED:
            is_right = any(each in text for each in _ENDED)
            self._mesh.ledger.check(is_right, f"signal {id_} to {task_id} was refused: {text}")

    async def _send_again(self, task_id: TaskId, name: str, line: Line) -> None:
        """Repeat an acknowledged signal, or use its id for another value, which is refused.

        A task in memory that begins again does not know the id.
        """
        if self._rng.random() < 0.5 or not self._mesh.is_strict:
            await self._signal(task_id, name, line, 2)
            return
        other = line.model_copy(update={"text": "other"})
        status, _ = await self._signal(task_id, name, other, 2)
        is_recorded = status is CompletionStatus.RECORDED
        self._mesh.ledger.check(not is_recorded, f"{line} to {task_id} was replaced")

    async def _read(self, task_id: TaskId) -> None:
        """Read how many signals a task has received."""
        signals = self._mesh.ledger.signals
        least = signals.value(task_id)
        message = read_message(self._name, task_id, RECEIVED, response_queue(self._name))
        status, body = await self._exchange(message, 2)
        if status is CompletionStatus.RECORDED and self._mesh.is_strict:
            number = body.value if body.is_set else 0
            is_right = isinstance(number, int) and least <= number <= signals.value(task_id)
            self._mesh.ledger.check(is_right, f"{task_id} has {number}, not {least} or more")

    async def _signal(
        self, task_id: TaskId, name: str, line: Line, tries: int
    ) -> tuple[CompletionStatus | None, str]:
        value = line.model_dump(mode="json")
        address = response_queue(self._name)
        message = signal_message(self._name, task_id, name, line.id, value, address)
        self._mesh.trace(f"signal {name} {line.id} to {task_id}")
        status, body = await self._exchange(message, tries)
        self._mesh.trace(f"signal {line.id}: {status}")
        return status, body.text

    async def _exchange(
        self, message: Message, tries: int
    ) -> tuple[CompletionStatus | None, CompletedBody]:
        """Send a message up to `tries` times, until it is recorded or refused."""
        last: tuple[CompletionStatus | None, CompletedBody] = None, CompletedBody()
        message = replace(message, user_id=OPERATOR)
        for _ in range(tries):
            future = asyncio.get_running_loop().create_future()
            self._replies[message.message_id] = future
            await self._publish(message)
            try:
                async with asyncio.timeout(self._rng.choice([0.1, 1, 3])):
                    last = await future
            except TimeoutError:
                continue
            if last[0] is not CompletionStatus.NOT_OPEN:
                break
            await asyncio.sleep(0.2)
        self._replies.pop(message.message_id, None)
        return last

    async def _publish(self, message: Message) -> None:
        try:
            results = await self._broker.publish([(response_queue(_LISTENER), message)])
        except BrokerUnavailable:
            return  # it may have arrived
        if results != [PublishResult.ACCEPTED]:
            self._mesh.trace(f"signal not accepted: {results}")

    def _on_reply(self, delivery: Delivery) -> None:
        message = delivery.message
        future = self._replies.get(message.correlation_id)
        if future is not None and not future.done():
            status = CompletionStatus(str(message.headers[Header.COMPLETED]))
            future.set_result((status, parse_body(CompletedBody, message.body)))
        ack = asyncio.ensure_future(delivery.ack())
        self._acks.add(ack)
        ack.add_done_callback(self._acks.discard)
