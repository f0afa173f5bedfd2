"""The card of an agent, from what its code declares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ValidationError

from meshpoint.agents.peer import Peer
from meshpoint.errors import ConfigurationError
from meshpoint.model.cards import (
    MAX_CARD_BYTES,
    MAX_DESCRIPTION_LENGTH,
    AgentCard,
    AgentSkill,
)
from meshpoint.model.declared_type import first_problem
from meshpoint.ports.agent import DurableAgent, HasCard, list_versions

log = logging.getLogger("meshpoint.cards")

_ENVELOPE_BYTES = 1024
"""Bytes of a card's message besides the card."""


def describe_agent(agent: DurableAgent[Any, Any]) -> AgentCard:
    """Build the card of `agent`, in the version that takes new tasks.

    A card never stops an agent: what does not fit is left out, with a warning.
    """
    newest = list_versions(agent)[0]
    own = newest.card if isinstance(newest, HasCard) else None
    try:
        card = own if isinstance(own, AgentCard) else _build_card(newest)
    except ValidationError as error:
        log.warning("agent %s: its card is not valid: %s", agent.name, first_problem(error))
        card = AgentCard(name=agent.name, version=_version_of(newest))
    return _shorten(card)


def _build_card(agent: DurableAgent[Any, Any]) -> AgentCard:
    peer = getattr(agent, "peer", None)
    if not isinstance(peer, Peer):
        return AgentCard(name=agent.name, version=_version_of(agent))
    return describe_peer(peer, _version_of(agent), getattr(agent, "skills", ()))


def describe_peer(
    peer: Peer[Any, Any], version: str, skills: Iterable[AgentSkill] = ()
) -> AgentCard:
    """Build a card from the types and the description of `peer`."""
    return AgentCard(
        name=peer.name,
        description=_truncate(peer.description or ""),
        version=version,
        input_schema=_read_schema(peer.name, "input", lambda: peer.input_schema),
        output_schema=_read_schema(peer.name, "output", lambda: peer.output_schema),
        skills=tuple(skills),
    )


def _version_of(agent: DurableAgent[Any, Any]) -> str:
    version = getattr(agent, "version", None)
    return version if isinstance(version, str) else agent.state_format


def _truncate(text: str) -> str:
    if len(text) <= MAX_DESCRIPTION_LENGTH:
        return text
    return f"{text[: MAX_DESCRIPTION_LENGTH - 1]}…"


def _read_schema(agent: str, part: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read()
    except ConfigurationError as error:
        log.warning("agent %s: its card does not describe its %s: %s", agent, part, error)
        return {}


def _shorten(card: AgentCard) -> AgentCard:
    """Leave out what makes `card` too large to send."""
    parts: dict[str, object] = {"output_schema": {}, "skills": (), "input_schema": {}}
    for part, empty in parts.items():
        size = len(card.model_dump_json(by_alias=True).encode())
        if size + _ENVELOPE_BYTES <= MAX_CARD_BYTES:
            break
        what = part.replace("_", " ")
        log.warning("agent %s: its card has %d bytes: its %s is left out", card.name, size, what)
        card = card.model_copy(update={part: empty})
    return card
