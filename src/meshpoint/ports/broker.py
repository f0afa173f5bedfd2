"""What carries messages: confirmed publish, competing consumers, ack, redelivery, broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol

from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address, Message


class Published(Enum):
    """What the broker said of one message."""

    ACCEPTED = auto()  # stored by the broker
    UNROUTABLE = auto()  # no such queue: nobody ever declared it
    OVERLOADED = auto()  # refused for now: try again later
    REJECTED = auto()  # it can never be sent: too large, or not encodable


class Delivery(Protocol):
    """One message handed to one consumer, not yet settled.

    When the connection that brought it is gone, settling does nothing and returns False: the broker
    delivers the message again.
    """

    @property
    def message(self) -> Message: ...

    @property
    def address(self) -> Address: ...

    @property
    def count(self) -> int:
        """Delivery count, starting at 1."""

    @property
    def lost(self) -> bool:
        """Whether the broker is known to have requeued it, so another consumer may receive it."""

    async def ack(self) -> bool:
        """Settle it: done."""

    async def requeue(self) -> bool:
        """Give it back for another consumer; raises its count."""

    async def dead_letter(self, reason: str) -> bool:
        """Move it to its agent's dead letters, with the first 500 characters of `reason` in `x-dead-reason`."""


class Subscription(Protocol):
    """A running consumer. What is asked of it is done even if the caller is cancelled, and costs no delivery."""

    async def resize(self, prefetch: int) -> None:
        """Let up to `prefetch` deliveries be unsettled at a time."""

    async def cancel(self) -> None:
        """Take no more deliveries; those unsettled can still be settled."""


OnDelivery = Callable[[Delivery], None]
"""Called on the event loop; must not block. The receiver runs its own tasks."""


class Broker(Protocol):
    """A message broker. All methods raise `BrokerUnavailable` when it cannot be reached in time."""

    @property
    def connected(self) -> bool:
        """Whether the broker is reachable and every consumer attached, as far as is known."""

    @property
    def can_publish(self) -> bool:
        """Whether messages can be sent now, as far as is known."""

    def consuming(self, address: Address) -> bool:
        """Whether this process has a consumer attached to `address`, as far as is known.

        If not, responses may be stuck there, and deadlines that depend on them are not enforced.
        """

    @property
    def max_message_bytes(self) -> int | None:
        """Largest body in bytes that the broker accepts, if known. Larger ones are `REJECTED`."""

    async def open(self) -> None:
        """Connect."""

    async def close(self) -> None:
        """Cancel consumers, give unsettled deliveries back, disconnect."""

    async def declare(self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1) -> None:
        """Declare the permanent queues of `agent`: requests, nested requests, responses and dead letters.

        With `replica`, also that incarnation's private queue, which gets the agent's broadcasts and
        disappears when unused for a while. `shards` is the number of request queues.
        """

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        """Send messages and wait for the broker's word on each, in the order of the arguments."""

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Send `message` to the private queue of every live replica of `agent`."""

    async def consume(self, address: Address, prefetch: int, on_delivery: OnDelivery) -> Subscription:
        """Deliver messages of `address` until cancelled, through lost connections."""

    async def depth(self, address: Address) -> int | None:
        """Messages in the queue that no consumer holds; None when there is no such queue."""
