"""What chaos adds to a replica: a file for its events, and a broker that doubles messages."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from meshpoint.cli.watchdog import DrainExitObserver
from meshpoint.errors import Unavailable
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address, Message, MessageType
from meshpoint.ports.broker import Broker, Delivery, OnDelivery, Published, Subscription

_SILENT = {Step.RENEW, Step.SWEEP}
_TOLD_BEFORE = {Step.SEGMENT, Step.CHECKPOINT, Step.END, Step.CLAIM}
DOUBLED, REDELIVERED = "doubled", "redelivered"
"""Events that the tap adds."""


class EventFile:
    """Observer that appends each event as a complete line before `ending` gets the event."""

    def __init__(self, path: Path, told: Connection, ending: DrainExitObserver) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._told, self._ending = told, ending

    def emit(self, event: Event) -> None:
        """Write events that a count or a history needs; report served agents to the supervisor."""
        self._write(event)
        self._ending.emit(event)

    def _write(self, event: Event) -> None:
        if event.step in _SILENT or (event.phase is Phase.BEFORE and event.step not in _TOLD_BEFORE):
            return
        self.write(event.step, event.phase, event.agent, event.task_ids, event.detail)
        if event.step is Step.STARTED:
            self._told.send_bytes(event.agent.encode())

    def write(self, step: str, phase: str, agent: str, ids: Sequence[str], detail: Any = None) -> None:
        """Append one line."""
        line = json.dumps([round(time.time(), 4), step, phase, agent, list(ids), dict(detail or {})])
        os.write(self._file, line.encode() + b"\n")


class WrappedBroker:
    """A `Broker` that delegates everything to another one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def connected(self) -> bool:
        return self._broker.connected

    @property
    def can_publish(self) -> bool:
        return self._broker.can_publish

    @property
    def max_message_bytes(self) -> int | None:
        return self._broker.max_message_bytes

    def consuming(self, address: Address) -> bool:
        return self._broker.consuming(address)

    async def open(self) -> None:
        await self._broker.open()

    async def close(self) -> None:
        await self._broker.close()

    async def declare(self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1) -> None:
        await self._broker.declare(agent, replica, shards=shards)

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        return await self._broker.publish(messages)

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        await self._broker.broadcast(agent, message)

    async def consume(self, address: Address, prefetch: int, on_delivery: OnDelivery) -> Subscription:
        return await self._broker.consume(address, prefetch, on_delivery)

    async def depth(self, address: Address) -> int | None:
        return await self._broker.depth(address)


class DoublingBroker(WrappedBroker):
    """Sends some requests and responses twice: at once, or a while later."""

    def __init__(self, broker: Broker, events: EventFile, chance: random.Random, share: float) -> None:
        super().__init__(broker)
        self._events, self._chance, self._share = events, chance, share
        self._later: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._later:
            task.cancel()
        await super().close()

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        """Send `messages`, and copies of some. Returns the confirms of the originals."""
        copies = [letter for letter in messages if self._strikes(letter[1])]
        self._tell(copies)
        if copies and self._chance.random() < 0.5:
            self._send_later(copies)
            copies = []
        words = await self._broker.publish([*messages, *copies])
        return words[: len(messages)]

    async def consume(self, address: Address, prefetch: int, on_delivery: OnDelivery) -> Subscription:
        """Deliver, and record redeliveries."""

        def delivered(delivery: Delivery) -> None:
            if delivery.count > 1:
                detail: dict[str, JsonValue] = {"count": delivery.count, "type": delivery.message.type.value}
                self._events.write(REDELIVERED, "noted", address, [delivery.message.correlation_id], detail)
            on_delivery(delivery)

        return await self._broker.consume(address, prefetch, delivered)

    def _strikes(self, message: Message) -> bool:
        wanted = message.type in {MessageType.REQUEST, MessageType.RESPONSE}
        return wanted and self._chance.random() < self._share

    def _tell(self, copies: Sequence[tuple[Address, Message]]) -> None:
        for address, message in copies:
            self._events.write(DOUBLED, "noted", address, [message.correlation_id], {"type": message.type.value})

    def _send_later(self, copies: Sequence[tuple[Address, Message]]) -> None:
        task = asyncio.create_task(self._send_after(self._chance.uniform(0.1, 4.0), copies))
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _send_after(self, seconds: float, copies: Sequence[tuple[Address, Message]]) -> None:
        await asyncio.sleep(seconds)
        try:
            await self._broker.publish(copies)
        except Unavailable:
            return  # a lost copy does not matter
