"""Ask the agents of a mesh for their cards."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from meshpoint.errors import PoisonMessage
from meshpoint.model.cards import AgentCard, CardBody, parse_card
from meshpoint.model.messages import Message

_QUIET_SECONDS = 0.25
"""Once there is an answer: seconds without another until the answers count as complete."""
_MAX_CARDS = 20_000
_MAX_BYTES = 64 * 1024 * 1024
"""Maximum number of answers to one question, and of their bytes. More are ignored."""


@dataclass(frozen=True, slots=True)
class AgentReplica:
    """A replica that serves an agent.

    Attributes:
        id: Identifies the replica, and is new at each start.
        started_at: When it started, by its own clock.
        version: The version of the agent that it runs.
        app_version: The version of the application, or a digest of its source.
    """

    id: str
    started_at: datetime
    version: str
    app_version: str | None


@dataclass(frozen=True, slots=True)
class FoundAgent:
    """An agent whose replicas have answered.

    Attributes:
        card: The card of the replica that started last.
        replicas: The replicas that answered, the most recently started first.
    """

    card: AgentCard
    replicas: tuple[AgentReplica, ...]


class CardAnswers:
    """Collects the answers to one question for cards."""

    def __init__(self) -> None:
        self._cards: dict[tuple[str, str], CardBody] = {}
        self._size = 0
        self._heard = asyncio.Event()

    def add(self, message: Message) -> None:
        """Add the card in a message. A card that is invalid or of another agent is ignored."""
        if len(self._cards) >= _MAX_CARDS or self._size + len(message.body) > _MAX_BYTES:
            return
        try:
            body = parse_card(message.body, message.app_id)
        except PoisonMessage:
            return
        self._cards[body.card.name, body.replica] = body
        self._size += len(message.body)
        self._heard.set()

    async def wait(self, seconds: float, names: Collection[str]) -> None:
        """Wait until the answers seem complete, for `seconds` at most.

        They are not complete before each agent in `names` has answered.
        """
        now = asyncio.get_running_loop().time
        ends_at = now() + seconds
        while (left := ends_at - now()) > 0:
            is_partial = not self._cards or not {name for name, _ in self._cards} >= set(names)
            self._heard.clear()
            try:
                async with asyncio.timeout(left if is_partial else min(left, _QUIET_SECONDS)):
                    await self._heard.wait()
            except TimeoutError:
                return

    def agents(self) -> list[FoundAgent]:
        """The agents that have answered, sorted by name."""
        by_name: dict[str, list[CardBody]] = {}
        for body in self._cards.values():
            by_name.setdefault(body.card.name, []).append(body)
        return [_found(bodies) for _, bodies in sorted(by_name.items())]


def _found(bodies: list[CardBody]) -> FoundAgent:
    bodies.sort(key=lambda body: (body.started_at, body.replica), reverse=True)
    replicas = [
        AgentReplica(body.replica, body.started_at, body.card.version, body.app_version)
        for body in bodies
    ]
    return FoundAgent(bodies[0].card, tuple(replicas))
