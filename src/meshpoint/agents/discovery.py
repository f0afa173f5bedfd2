"""Peers that an agent discovers at run time, for adapters of agent frameworks.

An adapter asks once per model turn which peers it may offer, and turns each card into a tool:

    cards = await offer_peers(ctx, ["flights", "hotel-*"], step="peers-of-turn")
    tools = [peer_of_card(card) for card in cards]  # with name, description and schemas

- `offer_peers` reads the cards that the replica has in memory. Only the first call in a replica
  may wait, for about a second, until the peers have answered.
- What it returns is recorded as a step: a replayed turn is offered the same cards, although peers
  may have joined, left or changed since. The record has only the cards that have changed since the
  previous turn in the segment (in a function agent, in the task).
- `peer_of_card` makes an untyped `Peer`. Its calls are ordinary calls: input that does not fit
  the peer's type fails as `invalid`, and a call to a peer that is gone as `undeliverable`. An
  adapter gives such failures to the model as tool errors.
- Outside replicas, `offer_peers` returns nothing.
- An agent with the attribute `peer_patterns` (see `DiscoversPeers`) has its peers' cards requested
  when its replica starts, so that the first turn need not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal

from pydantic import JsonValue

from meshpoint.agents.peer import Peer, make_peer
from meshpoint.model.cards import AgentCard, check_patterns
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.declared_type import DeclaredType
from meshpoint.model.peer_directory import PeerDirectory
from meshpoint.model.recorded_work import current_subtask


async def offer_peers(
    ctx: TaskExecutionContext, patterns: Sequence[str] = (), *, step: str = "offer peers"
) -> tuple[AgentCard, ...]:
    """Return the cards of the peers that this turn may use, sorted by name, and record them.

    Args:
        ctx: The context of the task.
        patterns: Names of agents, and patterns: `*` stands for any characters, `?` for one. The
            agent's settings `peers` and `denied_peers` narrow them. Without patterns, the setting
            `peers` alone selects.
        step: Name of the step that records the offer. Turns that run concurrently need different
            names.

    Raises:
        ConfigurationError: A pattern can match no agent.
    """
    selected = check_patterns(patterns, "peers")
    key = current_subtask(), step  # a recorded subtask does not run again, nor do its offers
    last = ctx._runtime.offers.get(key, ())
    change = await ctx.step(step, _find_change, ctx._runtime.directory, selected, last)
    if change is not None:
        ctx._runtime.offers[key] = last = _apply(change, last)
    return last


# What the step records: nothing if the offer is unchanged, else its names and new cards.
async def _find_change(
    directory: PeerDirectory | None, patterns: tuple[str, ...], last: tuple[AgentCard, ...]
) -> dict[str, Any] | None:
    if directory is None:
        cards: tuple[AgentCard, ...] = ()
    else:
        directory.follow(patterns)
        await directory.wait_ready()
        cards = directory.cards(patterns)
    if cards == last:
        return None
    new = [card.to_json() for card in cards if card not in last]
    return {"names": [card.name for card in cards], "cards": new}


def _apply(change: dict[str, Any], last: tuple[AgentCard, ...]) -> tuple[AgentCard, ...]:
    by_name = {card.name: card for card in last}
    for json in change["cards"]:
        card = AgentCard.model_validate(json)
        by_name[card.name] = card
    return tuple([by_name[name] for name in change["names"]])


class _DescribedType(DeclaredType[Any]):
    """JSON that a peer describes by a schema. Only the peer checks it."""

    def __init__(self, schema: dict[str, JsonValue], key: str) -> None:
        super().__init__(Any, key)
        self.name = "JSON"
        self._schema = schema

    def json_schema(self, mode: Literal["validation", "serialization"]) -> dict[str, Any]:
        """The schema from the card, the same in both modes."""
        return deepcopy(self._schema)


def peer_of_card(card: AgentCard) -> Peer[Any, Any]:
    """Create the `Peer` that `card` describes. It takes and returns JSON."""
    return make_peer(
        card.name,
        _DescribedType(card.input_schema, f"peer {card.name!r}, input"),
        _DescribedType(card.output_schema, f"peer {card.name!r}, output"),
        card.description or None,
    )
