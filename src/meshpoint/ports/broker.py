"""The message broker: confirmed publish, competing consumers, ack, redelivery and broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.messages import Address, Message, Topic


class PublishResult(Enum):
    """The broker's response to one published message."""

    ACCEPTED = auto()  # stored by the broker
    UNROUTABLE = auto()  # no such queue: it was never declared
    OVERLOADED = auto()  # refused for now: retry later
    REJECTED = auto()  # can never be sent: too large, or not encodable


@dataclass(frozen=True, slots=True)
class RequestSearch:
    """Where the request of a task may be.

    Attributes:
        may_be_queued: A queue has the request, or may have it. Held requests count.
        consumers: For each queue whose held requests the broker does not show, the number of its
            consumers. Each of them may hold the request.
    """

    may_be_queued: bool
    consumers: Mapping[Address, int] = field(default_factory=dict)


SEARCH_SECONDS = 2.0
"""Seconds after the start of a search within which other replicas must deny."""


class Delivery(Protocol):
    """One message delivered to one consumer and not yet settled.

    If the connection that delivered it is gone, settling has no effect and returns `False`, and
    the broker redelivers the message.
    """

    @property
    def message(self) -> Message: ...

    @property
    def address(self) -> Address: ...

    @property
    def delivery_count(self) -> int:
        """Delivery count, starting at 1."""

    @property
    def lost(self) -> bool:
        """Whether the broker is known to have requeued it, for any consumer to receive."""

    async def ack(self) -> bool:
        """Remove the message from its queue."""

    async def requeue(self) -> bool:
        """Return the message to its queue for any consumer and increment its delivery count."""

    async def dead_letter(self, reason: str) -> bool:
        """Move the message to its agent's dead-letter queue.

        The first 500 characters of `reason` go into the `x-dead-reason` header. `x-dead-from` may
        name the queue.
        """


class Subscription(Protocol):
    """A running consumer.

    Its methods finish their work even if the caller is cancelled, and never lose a delivery.
    """

    async def resize(self, prefetch: int) -> None:
        """Change the maximum number of unacked deliveries to `prefetch`."""

    async def cancel(self) -> None:
        """Stop receiving. Unacked deliveries can still be settled."""


OnDelivery = Callable[[Delivery], None]
"""Callback for deliveries. Runs on the event loop and must not block; start a task for real work.
"""


class Broker(Protocol):
    """A message broker.

    All methods raise `BrokerUnavailable` if the broker cannot be reached in time.
    """

    @property
    def connected(self) -> bool:
        """Whether the broker was reachable and every consumer attached when last checked."""

    @property
    def can_publish(self) -> bool:
        """Whether messages could be published when last checked."""

    def is_consuming(self, address: Address) -> bool:
        """Whether this process had a consumer attached to `address` when last checked.

        If not, responses may be stuck in that queue, so deadlines that depend on them are not
        enforced.
        """

    @property
    def max_message_bytes(self) -> int | None:
        """Maximum body size in bytes, `None` if unknown. Larger messages are `REJECTED`."""

    async def open(self) -> None:
        """Connect to the broker."""

    async def close(self) -> None:
        """Cancel all consumers, requeue unacked deliveries and disconnect."""

    async def declare(
        self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1
    ) -> None:
        """Declare the permanent queues of `agent`.

        These are its request queues, nested requests, responses and dead letters.

        Args:
            agent: the agent that consumes from them.
            replica: also declare this replica's private queue, which receives the agent's
                broadcasts. The broker deletes it after it has been unused for a while.
            shards: number of request queues.
        """

    async def mark_database(self, agent: AgentName) -> bool:
        """Set the durable marker of `agent`: its replicas store tasks in a database.

        Until it is closed, this broker sets the marker again if it is lost. Returns `True` if the
        marker was not set before.
        """

    async def has_database_marker(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set. Sees markers set before the call."""

    async def remove_database_marker(self, agent: AgentName) -> None:
        """Remove the marker of `agent`, if it is set. Its tasks must have left the database."""

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        """Publish messages and return the broker's response to each, in argument order."""

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Publish `message` to the private queue of every live replica of `agent`."""

    async def subscribe(
        self, agent: AgentName, replica: ReplicaId, topics: Sequence[Topic]
    ) -> None:
        """Also deliver `topics` to the private queue of `replica`, which this broker declared.

        It stays subscribed to the topics of earlier calls, for as long as the queue exists.
        """

    async def announce(self, topic: Topic, message: Message) -> None:
        """Publish `message` to every private queue that is subscribed to `topic`."""

    async def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> Subscription:
        """Deliver messages from `address` until cancelled, reconnecting as needed."""

    async def depth(self, address: Address) -> int | None:
        """Number of messages ready for delivery, or `None` if the queue does not exist.

        Unacked messages are not counted.
        """

    async def find_request(self, agent: AgentName, task_id: TaskId) -> RequestSearch:
        """Search the request queues of `agent`, which this process consumes, for a task's request.

        Requests among the dead letters do not count.
        """

    def deny_request(self, agent: AgentName, task_id: TaskId) -> Mapping[Address, int]:
        """The consumers of this process that have not held the task's request lately, by queue.

        "Lately" is somewhat longer than the last `SEARCH_SECONDS`. Consumers that began later do
        not count. Empty if this process holds the request, if it has returned any request lately,
        or if `find_request` names no consumers.
        """
