"""The directory of peers that an agent discovers at run time.

A directory keeps the latest cards of the peers that `follow` has asked for, and refreshes
them in the background. Reading it needs no I/O. Adapters for agent frameworks do not use it
directly: `meshpoint.agents.discovery.offer_peers` reads it and records the cards that a model
turn was offered, so that a replay of the turn sees the same cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshpoint.model.cards import AgentCard


class PeerDirectory(Protocol):
    """The peers that one agent may use, with their cards.

    A peer is known from its first answer until its replicas have not answered for some time, so
    that a restart does not hide it. A call to a peer that is gone fails as undeliverable.
    """

    @property
    def is_configured(self) -> bool:
        """Whether the configuration of the agent has patterns of its own."""

    def follow(self, patterns: Sequence[str]) -> None:
        """Ask for the cards of agents that match `patterns`, from now on. Needs no I/O.

        The configuration of the agent may narrow them. Without `patterns`, its own patterns are
        followed.
        """

    async def wait_ready(self) -> None:
        """Wait until the followed peers that are up have answered once, for a few seconds at most.

        Returns at once if they have.
        """

    def cards(self, patterns: Sequence[str]) -> tuple[AgentCard, ...]:
        """The cards of the known peers that match `patterns`, sorted by name. Needs no I/O.

        The agent's own card is among them only if `patterns` has its exact name.
        """
