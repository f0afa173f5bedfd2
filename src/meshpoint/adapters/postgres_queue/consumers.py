"""Consumers of queues, and the messages that they hold unacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from meshpoint.model.messages import Address, Message

MAX_CLAIMED = 64
"""Maximum messages that one claim takes for one consumer."""
LOWEST_ID = -(2**63)
"""Below every id, including negative ones from other programs."""
_LATE_IDS = 1000
"""Messages whose ids were assigned earlier, but that may be committed later."""


def low_before(message_id: int) -> int:
    """The hint, see `Consumer`, if this is the lowest id of the messages that are left."""
    return max(LOWEST_ID, message_id - _LATE_IDS)


class Claim(NamedTuple):
    """One delivery of one message. Only this claim may settle it."""

    queue: int
    id: int
    deliveries: int
    holder: int


@dataclass(slots=True, eq=False)
class Consumer:
    """A subscription. `queue` is the id of the queue at `address`.

    `low` is a hint: messages with lower ids are claimed at the next sweep only. It keeps a claim
    from passing the dead rows of earlier messages.
    """

    address: Address
    queue: int
    prefetch: int
    deliver: Callable[[Claim, Message], None]
    unacked: set[Claim] = field(default_factory=set)
    low: int = LOWEST_ID
    cancelled: bool = False

    @property
    def room(self) -> int:
        """Number of messages that the next claim may take."""
        free = 0 if self.cancelled else self.prefetch - len(self.unacked)
        return max(0, min(free, MAX_CLAIMED))

    @property
    def ended(self) -> bool:
        """Whether it receives no more messages and has settled all."""
        return self.cancelled and not self.unacked

    def took(self, lowest_id: int) -> None:
        """Move the hint behind the lowest id of a claim.

        If the claim found nothing, `lowest_id` is of a message committed before.
        """
        self.low = max(self.low, low_before(lowest_id))
