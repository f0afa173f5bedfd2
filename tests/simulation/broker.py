"""The in-process exchange as a server behind a network that delays, doubles and loses messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from meshpoint.adapters.inprocess.broker import (
    InProcessBroker,
    InProcessExchange,
    InProcessSubscription,
    Queue,
    QueuedMessage,
)
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address, Message
from meshpoint.ports.broker import Delivery, OnDelivery, PublishResult

from .loop import WORLD, process_context
from .network_faults import CallResult, Network
from .remote_call import remote_call, run_at_once

BROKER = "broker"
OnAccepted = Callable[[Address, Message], None]
"""Called with each message that the server accepts."""


class SimulatedExchange(InProcessExchange):
    """Delivers each message after a delay of its own, so that messages overtake each other."""

    def __init__(self, network: Network) -> None:
        super().__init__(delivery_limit=100_000)
        self._network = network

    def deliver_ready(self, queue: Queue) -> None:
        """Deliver outside of any process: a message under way survives the end of its sender."""
        process_context(WORLD).run(super().deliver_ready, queue)

    def _deliver(self, *delivered: Any) -> None:
        asyncio.get_running_loop().call_later(
            self._network.delay(), super()._deliver, *delivered, context=process_context(WORLD)
        )

    def remaining_messages(self, excused: Container[str]) -> dict[str, int]:
        """Queued or unacked messages per address, without private queues of ended processes."""
        counts = {
            queue.address: sum(
                item.message.correlation_id not in excused for item in _all_items(queue)
            )
            for queue in self.queues.values()
            if queue.users or not queue.private
        }
        return {address: count for address, count in counts.items() if count}


def _all_items(queue: Queue) -> Iterator[QueuedMessage]:
    return chain(queue.ready, *(consumer.unacked.values() for consumer in queue.consumers))


class SimulatedBroker(InProcessBroker):
    """One process's connection to the exchange."""

    def __init__(
        self, exchange: SimulatedExchange, network: Network, process: str, on_accepted: OnAccepted
    ) -> None:
        super().__init__(exchange)
        self._server, self._network, self._process, self._on_accepted = (
            exchange,
            network,
            process,
            on_accepted,
        )
        self._pending_settlements: dict[asyncio.TimerHandle, Callable[[], None]] = {}

    @property
    def connected(self) -> bool:
        """Whether it is open and the network lets it through."""
        return super().connected and not self._network.is_unreachable(self._process, BROKER)

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        """Publish; the fate decides whether the messages are accepted, refused or in doubt."""
        if not super().connected:
            raise BrokerUnavailable("not open")
        drawn_fate = self._network.draw_fate(BROKER, "publish")
        in_doubt = drawn_fate.result is CallResult.DOUBT
        accepted_count = (
            self._network.random_integer(1, len(messages)) if in_doubt else len(messages)
        )
        return await remote_call(
            partial(self._accept, list(messages)[:accepted_count]), drawn_fate, _unavailable
        )

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Put `message` into some of the private queues of `agent`."""
        fate = self._network.draw_fate(BROKER, "broadcast")
        await remote_call(partial(self._broadcast_to_queues, agent, message), fate, _unavailable)

    async def declare(
        self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1
    ) -> None:
        """Declare the queues."""
        fate = self._network.draw_fate(BROKER, "declare")
        await remote_call(partial(self._declare, agent, replica, shards), fate, _unavailable)

    async def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> InProcessSubscription:
        """Consume; settlements reach the server after a delay."""

        def wrap_delivery(delivery: Delivery) -> None:
            on_delivery(SimulatedDelivery(delivery, self._settle))

        return await super().consume(address, prefetch, wrap_delivery)

    async def close(self) -> None:
        """Close cleanly: pending acks still arrive."""
        self._flush(0.0)
        await super().close()

    def lose_connection(self) -> None:
        """Break and restore the connection: acks may be lost, unacked messages are redelivered."""
        self._flush(self._network.fault_rates.ack_lost)
        super().lose_connection()

    def notice_end(self) -> None:
        """Let the server notice that the process is gone."""
        self._flush(self._network.fault_rates.ack_lost)
        at_close = super().close()
        with suppress(StopIteration):  # killed before it was connected
            at_close.send(None)  # it closes at once, then yields to the loop
        at_close.close()

    def _declare(self, agent: AgentName, replica: ReplicaId | None, shards: int) -> None:
        self._server.declare(agent, replica, self, shards)
        if not self._open:  # the process is gone by now: its private queue will expire
            self._server.detach(self)

    def _flush(self, loss_probability: float) -> None:
        for timer, settle in list(self._pending_settlements.items()):
            timer.cancel()
            if not self._network.happens(loss_probability):
                settle()
        self._pending_settlements.clear()

    def _settle(self, settle: Callable[[], None]) -> None:
        def settle_at_server() -> None:
            del self._pending_settlements[timer]
            settle()

        timer = asyncio.get_running_loop().call_later(
            self._network.delay(), settle_at_server, context=process_context(WORLD)
        )
        self._pending_settlements[timer] = settle

    def _accept(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        results = []
        for address, message in messages:
            result = PublishResult.OVERLOADED
            if not self._network.happens(self._network.fault_rates.overloaded):
                result = self._server.publish(address, message)
            results.append(result)
            if result is PublishResult.ACCEPTED:
                self._on_accepted(address, message)
                if self._network.happens(self._network.fault_rates.duplicated):
                    self._server.publish(address, message)
        return results

    def _broadcast_to_queues(self, agent: AgentName, message: Message) -> None:
        for queue in self._server.private_queues(agent):
            if not self._network.happens(self._network.fault_rates.broadcast_lost):
                self._server.put(queue, message)


class SimulatedDelivery:
    """A delivery whose ack reaches the server later, or never, while the process continues."""

    def __init__(self, delivery: Delivery, send: Callable[[Callable[[], None]], None]) -> None:
        self._delivery, self._send = delivery, send
        self._settled = False
        self.message, self.address, self.delivery_count = (
            delivery.message,
            delivery.address,
            delivery.delivery_count,
        )

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

        def settle_at_server() -> None:
            run_at_once(settle())

        self._send(settle_at_server)
        return True


def _unavailable(result: CallResult) -> Exception:
    return BrokerUnavailable(f"the broker: {result}")
