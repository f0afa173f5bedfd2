"""The in-process exchange as a server behind a network that delays, doubles and loses messages."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Container, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessSubscription
from meshpoint.adapters.inprocess.exchange import InProcessExchange, Queue, QueuedMessage
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address, Message
from meshpoint.ports.broker import Delivery, OnDelivery, Published

from .loop import WORLD, process_context
from .weather import Weather, Word
from .wire import at_once, call

BROKER = "broker"
Published_ = Callable[[Address, Message], None]
"""Called with each message that the server accepts."""


class SimulatedExchange(InProcessExchange):
    """Delivers each message after a delay of its own, so that messages overtake each other."""

    def __init__(self, weather: Weather) -> None:
        super().__init__(delivery_limit=100_000)
        self._weather = weather

    def deliver_ready(self, queue: Queue) -> None:
        """Send ready messages to consumers with room."""
        while queue.ready and (consumer := queue.next_consumer()):
            item = heapq.heappop(queue.ready)
            item.count += 1
            consumer.unacked[item.position] = item
            asyncio.get_running_loop().call_later(
                self._weather.delay(),
                self._deliver,
                consumer,
                item,
                item.count,
                context=process_context(WORLD),
            )

    def left_over(self, excused: Container[str]) -> dict[str, int]:
        """Queued or unacked messages per address, without private queues of ended processes."""
        counts = {
            queue.address: sum(item.message.correlation_id not in excused for item in _items(queue))
            for queue in self._queues.values()
            if queue.users or not queue.private
        }
        return {address: found for address, found in counts.items() if found}


def _items(queue: Queue) -> Iterator[QueuedMessage]:
    return chain(queue.ready, *(consumer.unacked.values() for consumer in queue.consumers))


class SimulatedBroker(InProcessBroker):
    """One process's connection to the exchange."""

    def __init__(self, exchange: SimulatedExchange, weather: Weather, process: str, heard: Published_) -> None:
        super().__init__(exchange)
        self._server, self._weather, self._process, self._heard = exchange, weather, process, heard
        self._settling: dict[asyncio.TimerHandle, Callable[[], None]] = {}

    @property
    def connected(self) -> bool:
        """Whether it is open and the network lets it through."""
        return super().connected and not self._weather.is_away(self._process, BROKER)

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        """Publish; the fate decides whether the messages are accepted, refused or in doubt."""
        if not super().connected:
            raise BrokerUnavailable("not open")
        fate = self._weather.fate(BROKER, "publish")
        in_doubt = fate.word is Word.DOUBT
        taken = self._weather.between(1, len(messages)) if in_doubt else len(messages)
        return await call(partial(self._take, list(messages)[:taken]), fate, _away)

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Put `message` into some of the private queues of `agent`."""
        fate = self._weather.fate(BROKER, "broadcast")
        await call(partial(self._spread, agent, message), fate, _away)

    async def declare(self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1) -> None:
        """Declare the queues."""
        fate = self._weather.fate(BROKER, "declare")
        await call(partial(self._declare, agent, replica, shards), fate, _away)

    async def consume(self, address: Address, prefetch: int, on_delivery: OnDelivery) -> InProcessSubscription:
        """Consume; settlements reach the server after a delay."""

        def take(delivery: Delivery) -> None:
            on_delivery(SimulatedDelivery(delivery, self._settle))

        return await super().consume(address, prefetch, take)

    async def close(self) -> None:
        """Close cleanly: pending acks still arrive."""
        self._flush(0.0)
        await super().close()

    def lose_connection(self) -> None:
        """Break and restore the connection: acks may be lost, unacked messages are redelivered."""
        self._flush(self._weather.climate.ack_lost)
        super().lose_connection()

    def vanish(self) -> None:
        """Let the server notice that the process is gone."""
        self._flush(self._weather.climate.ack_lost)
        at_close = super().close()
        with suppress(StopIteration):  # killed before it was connected
            at_close.send(None)  # it closes at once, then yields to the loop
        at_close.close()

    def _declare(self, agent: AgentName, replica: ReplicaId | None, shards: int) -> None:
        self._server.declare(agent, replica, self, shards)
        if not self._open:  # the process is gone by now: its private queue will expire
            self._server.detach(self)

    def _flush(self, lost: float) -> None:
        for timer, settle in list(self._settling.items()):
            timer.cancel()
            if not self._weather.chance(lost):
                settle()
        self._settling.clear()

    def _settle(self, settle: Callable[[], None]) -> None:
        def arrive() -> None:
            del self._settling[timer]
            settle()

        timer = asyncio.get_running_loop().call_later(self._weather.delay(), arrive, context=process_context(WORLD))
        self._settling[timer] = settle

    def _take(self, messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        words = []
        for address, message in messages:
            word = Published.OVERLOADED
            if not self._weather.chance(self._weather.climate.overloaded):
                word = self._publish(address, message)
            words.append(word)
            if word is Published.ACCEPTED:
                self._heard(address, message)
                if self._weather.chance(self._weather.climate.duplicated):
                    self._publish(address, message)
        return words

    def _spread(self, agent: AgentName, message: Message) -> None:
        for queue in self._server.private_queues(agent):
            if not self._weather.chance(self._weather.climate.broadcast_lost):
                self._server.put(queue, message)


class SimulatedDelivery:
    """A delivery whose ack reaches the server later, or never, while the process continues."""

    def __init__(self, delivery: Delivery, send: Callable[[Callable[[], None]], None]) -> None:
        self._delivery, self._send = delivery, send
        self._settled = False
        self.message, self.address, self.count = delivery.message, delivery.address, delivery.count

    @property
    def lost(self) -> bool:
        """Whether the server requeued it, as far as this process knows."""
        return not self._settled and self._delivery.lost

    async def ack(self) -> bool:
        """Ack it."""
        return self._settle(self._delivery.ack)

    async def requeue(self) -> bool:
        """Requeue it."""
        return self._settle(self._delivery.requeue)

    async def dead_letter(self, reason: str) -> bool:
        """Move it to the dead-letter queue."""
        return self._settle(partial(self._delivery.dead_letter, reason))

    def _settle(self, settle: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        if self._settled:
            return False
        self._settled = True

        def arrive() -> None:
            at_once(settle())

        self._send(arrive)
        return True


def _away(word: Word) -> Exception:
    return BrokerUnavailable(f"the broker: {word}")
