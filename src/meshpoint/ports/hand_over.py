"""Hand-over: messages and acks in one commit.

All protocols are optional. A broker and a store hand over to each other if the broker's queues
are in the store's database: the store publishes and acks in the commit of a transition. An
`AckingPublisher` does so in its own commit, for replies that no store commits. Otherwise messages
are published first, and what caused them is acked later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from meshpoint.model.hand_over import HandOver
from meshpoint.model.messages import Address, Message
from meshpoint.ports.broker import Delivery, PublishResult


@runtime_checkable
class AckingPublisher(Protocol):
    """A broker that publishes a message and acks what caused it in one commit."""

    async def publish_acking(
        self, envelope: tuple[Address, Message], deliveries: Sequence[Delivery]
    ) -> PublishResult:
        """Publish a message. If it is accepted, `deliveries` are acked too.

        A delivery that this process no longer holds stays as it is. `Delivery.ack` may still be
        called for each of them, and then has no effect.

        Raises:
            BrokerUnavailable: The results are in doubt.
        """


@runtime_checkable
class HandOverBroker(Protocol):
    """A broker whose queues are in a database."""

    @property
    def lease_id(self) -> int | None:
        """A random number in the queues' tables, which only this broker has written.

        `None` while it is closed.
        """

    async def prepare_hand_over(
        self, envelopes: Sequence[tuple[Address, Message]], deliveries: Sequence[Delivery]
    ) -> HandOver | None:
        """Prepare messages and acks for the commit of a store.

        Returns `None` if the messages do not all fit: a queue is missing or full, or they are too
        large. Nothing is published or acked before the commit.
        """


@runtime_checkable
class HandOverStore(Protocol):
    """A store that publishes and acks in the commits of `Pause`, `Claim` and `End`.

    It does so only if the transition changes the task, and only for a whole `HandOver`. It then
    calls `HandOver.finish`. A transition of which it does not know whether it has committed is
    repeated without.
    """

    async def finds_lease(self, lease_id: int) -> bool:
        """Whether the queues of the broker with this lease are in the store's database.

        They also have to be writable for the store's login.

        Raises:
            StoreUnavailable: The database did not respond.
        """
