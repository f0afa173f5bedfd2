"""Messages and acks that are part of a transition's own commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshpoint.model.messages import Address, Message


@dataclass(slots=True, eq=False)
class HandOver:
    """Messages to publish and deliveries to ack in the commit of a store.

    A broker prepares it for a store in the same database. A store that does not know it leaves it
    as it is, and its messages and acks are sent after the commit, as with any other broker.

    Attributes:
        envelopes: The messages, with their addresses.
        is_done: Whether a commit of the store contains the messages and the acks.
    """

    envelopes: Sequence[tuple[Address, Message]]
    is_done: bool = False

    def finish(self) -> None:
        """Record that a commit of the store contains the messages and the acks."""
        self.is_done = True
