"""What chaos adds to a replica: a file for its events, and a broker that doubles messages."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from meshpoint.cli.watchdog import DrainExitObserver
from meshpoint.errors import Unavailable
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.messages import Address, Message, MessageType, Topic
from meshpoint.ports.broker import (
    Broker,
    Delivery,
    OnDelivery,
    PublishResult,
    RequestSearch,
    Subscription,
)

_UNRECORDED_STEPS = {Step.RENEW, Step.SWEEP}
_STEPS_RECORDED_BEFORE = {Step.SEGMENT, Step.CHECKPOINT, Step.END, Step.CLAIM, Step.REPLY}
DOUBLED, REDELIVERED = "doubled", "redelivered"
"""Events that the tap adds."""


class EventFile:
    """Appends each event as a complete line before `exit_observer` gets the event."""

    def __init__(
        self, path: Path, supervisor: Connection, exit_observer: DrainExitObserver
    ) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._supervisor, self._exit_observer = supervisor, exit_observer

    def emit(self, event: Event) -> None:
        """Write events that a count or a history needs; report served agents to the supervisor."""
        self._record(event)
        self._exit_observer.emit(event)

    def _record(self, event: Event) -> None:
        if event.step in _UNRECORDED_STEPS or (
            event.phase is Phase.BEFORE and event.step not in _STEPS_RECORDED_BEFORE
        ):
            return
        self.append(event.step, event.phase, event.agent, event.task_ids, event.detail)
        if event.step is Step.STARTED:
            self._supervisor.send_bytes(event.agent.encode())

    def append(
        self, step: str, phase: str, agent: str, ids: Sequence[str], detail: Any = None
    ) -> None:
        """Append one line."""
        line = json.dumps(
            [round(time.time(), 4), step, phase, agent, list(ids), dict(detail or {})]
        )
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

    def is_consuming(self, address: Address) -> bool:
        return self._broker.is_consuming(address)

    async def open(self) -> None:
        await self._broker.open()

    async def close(self) -> None:
        await self._broker.close()

    async def declare(
        self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1
    ) -> None:
        await self._broker.declare(agent, replica, shards=shards)

    async def mark_database(self, agent: AgentName) -> bool:
        return await self._broker.mark_database(agent)

    async def has_database_marker(self, agent: AgentName) -> bool:
        return await self._broker.has_database_marker(agent)

    async def remove_database_marker(self, agent: AgentName) -> None:
        await self._broker.remove_database_marker(agent)

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        return await self._broker.publish(messages)

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        await self._broker.broadcast(agent, message)

    async def subscribe(
        self, agent: AgentName, replica: ReplicaId, topics: Sequence[Topic]
    ) -> None:
        await self._broker.subscribe(agent, replica, topics)

    async def announce(self, topic: Topic, message: Message) -> None:
        await self._broker.announce(topic, message)

    async def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> Subscription:
        return await self._broker.consume(address, prefetch, on_delivery)

    async def depth(self, address: Address) -> int | None:
        return await self._broker.depth(address)

    async def find_request(self, agent: AgentName, task_id: TaskId) -> RequestSearch:
        return await self._broker.find_request(agent, task_id)

    def deny_request(self, agent: AgentName, task_id: TaskId) -> Mapping[Address, int]:
        return self._broker.deny_request(agent, task_id)


class DoublingBroker(WrappedBroker):
    """Sends some requests and responses twice: at once, or a while later."""

    def __init__(
        self, broker: Broker, events: EventFile, rng: random.Random, share: float
    ) -> None:
        super().__init__(broker)
        self._events, self._rng, self._share = events, rng, share
        self._delayed_tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._delayed_tasks:
            task.cancel()
        await super().close()

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        """Send `messages`, and copies of some. Returns the confirms of the originals."""
        copies = [addressed for addressed in messages if self._should_double(addressed[1])]
        self._record_copies(copies)
        if copies and self._rng.random() < 0.5:
            self._send_later(copies)
            copies = []
        results = await self._broker.publish([*messages, *copies])
        return results[: len(messages)]

    async def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> Subscription:
        """Deliver, and record redeliveries."""

        def record_and_deliver(delivery: Delivery) -> None:
            if delivery.delivery_count > 1:
                detail: dict[str, JsonValue] = {
                    "count": delivery.delivery_count,
                    "type": delivery.message.type.value,
                }
                self._events.append(
                    REDELIVERED, "info", address, [delivery.message.correlation_id], detail
                )
            on_delivery(delivery)

        return await self._broker.consume(address, prefetch, record_and_deliver)

    def _should_double(self, message: Message) -> bool:
        is_doubled_type = message.type in {MessageType.REQUEST, MessageType.RESPONSE}
        return is_doubled_type and self._rng.random() < self._share

    def _record_copies(self, copies: Sequence[tuple[Address, Message]]) -> None:
        for address, message in copies:
            self._events.append(
                DOUBLED, "info", address, [message.correlation_id], {"type": message.type.value}
            )

    def _send_later(self, copies: Sequence[tuple[Address, Message]]) -> None:
        task = asyncio.create_task(self._send_after(self._rng.uniform(0.1, 4.0), copies))
        self._delayed_tasks.add(task)
        task.add_done_callback(self._delayed_tasks.discard)

    async def _send_after(self, seconds: float, copies: Sequence[tuple[Address, Message]]) -> None:
        await asyncio.sleep(seconds)
        try:
            await self._broker.publish(copies)
        except Unavailable:
            return  # a lost copy does not matter
