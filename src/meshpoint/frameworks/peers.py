"""Peers as tools for a model: a name, a description and a JSON schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from meshpoint.agents.discovery import offer_peers, peer_of_card
from meshpoint.agents.peer import Addressable, Peer, PeerCall
from meshpoint.errors import ConfigurationError, InvalidInput
from meshpoint.model.cards import check_patterns
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.waitable import mark_used

_MAX_TOOL_NAME_LENGTH = 64
_WRAPPED = "request"


@dataclass(frozen=True, slots=True)
class PeerTool:
    """A peer as a model sees it.

    Attributes:
        name: Name of the tool: the peer's, with `_` for each character that providers refuse.
        description: What the peer does.
        schema: JSON schema of the arguments. Always an object.
        peer: The peer.
        is_wrapped: Whether the peer's input is the only argument, because it is not an object.
    """

    name: str
    description: str
    schema: dict[str, Any]
    peer: Peer[Any, Any]
    is_wrapped: bool

    @classmethod
    def of(cls, peer: Peer[Any, Any]) -> PeerTool:
        """Make a tool of `peer`.

        Raises:
            ConfigurationError: Its input has no JSON schema.
        """
        name = re.sub(r"[^A-Za-z0-9_-]", "_", peer.name)[:_MAX_TOOL_NAME_LENGTH]
        description = peer.description or f"Asks the agent {peer.name!r}."
        schema = peer.input_schema
        if schema.get("type") == "object":
            return cls(name, description, schema, peer, is_wrapped=False)
        definitions = schema.pop("$defs", None)
        wrapped: dict[str, Any] = {
            "type": "object",
            "properties": {_WRAPPED: schema},
            "required": [_WRAPPED],
            "additionalProperties": False,
        }
        if definitions is not None:
            wrapped["$defs"] = definitions
        return cls(name, description, wrapped, peer, is_wrapped=True)

    def call(self, arguments: Mapping[str, JsonValue]) -> PeerCall[Any]:
        """Build the request for a model's arguments.

        Raises:
            InvalidInput: They do not fit the peer's input. The message is for the model.
        """
        if not self.is_wrapped:
            return self.peer.from_json(dict(arguments))
        if arguments.keys() != {_WRAPPED}:
            raise InvalidInput(f"{self.name} takes one argument, {_WRAPPED!r}")
        return self.peer.from_json(arguments[_WRAPPED])

    def check(self, arguments: Mapping[str, JsonValue]) -> None:
        """Check a model's arguments.

        Raises:
            InvalidInput: They do not fit the peer's input. The message is for the model.
        """
        mark_used(self.call(arguments))


class PeerTools:
    """The peers that the model of an agent may call, as tools by name.

    Args:
        peers: Typed peers, and names or patterns of peers to discover.
        use_setting: Without names and patterns, discover what the setting `peers` selects.

    Attributes:
        known: The tools of typed peers.
        patterns: The names and patterns.

    Raises:
        ConfigurationError: Two peers have the same tool, an input has no JSON schema, one is not
            an agent, or a pattern can match no agent.
    """

    def __init__(
        self, peers: Sequence[Addressable[Any, Any] | str], *, use_setting: bool = False
    ) -> None:
        if not isinstance(peers, Sequence):
            raise ConfigurationError("peers", f"{peers!r} is not a list", "write peers=[…]")
        typed = [each for each in peers if not isinstance(each, str)]
        names = (
            peers if isinstance(peers, str) else [each for each in peers if isinstance(each, str)]
        )
        self.known = {tool.name: tool for tool in peer_tools(*typed)}
        self.patterns = check_patterns(names, "peers")
        self._use_setting = use_setting

    def check_names(self, own: Collection[str]) -> None:
        """Check that no typed peer has the name of a tool of the agent.

        Raises:
            ConfigurationError: One has.
        """
        if same := sorted(self.known.keys() & set(own)):
            problem = f"the agent has a tool and a peer called {same[0]!r}"
            raise ConfigurationError("peers", problem, "rename the tool")

    async def offer(
        self, ctx: TaskExecutionContext, is_taken: Callable[[str], bool]
    ) -> dict[str, PeerTool]:
        """The tools of one turn of the model, recorded as a step if any are discovered.

        Typed peers hide discovered peers of the same name, as do tools of the agent's own,
        for whose names `is_taken` is true: a new peer must not break the agent.
        """
        tools = dict(self.known)
        directory = ctx._runtime.directory
        configured = self._use_setting and directory is not None and directory.is_configured
        if self.patterns or configured:
            for card in await offer_peers(ctx, self.patterns):
                tool = PeerTool.of(peer_of_card(card))
                if not is_taken(tool.name):
                    tools.setdefault(tool.name, tool)
        return tools


def peer_tools(*peers: Addressable[Any, Any]) -> list[PeerTool]:
    """Make tools of typed peers.

    Raises:
        ConfigurationError: Two have the same name, an input has no JSON schema, or one is not an
            agent.
    """
    tools = list[PeerTool]()
    for each in peers:
        peer = getattr(each, "peer", None)
        if not isinstance(peer, Peer):
            problem = f"{each!r} is not an agent, a Peer or a name"
            raise ConfigurationError("peers", problem, 'write an agent, or its name: "flights"')
        tool = PeerTool.of(peer)
        if any(tool.name == other.name for other in tools):
            raise ConfigurationError(
                "peers", f"two tools are called {tool.name!r}", "list each peer once"
            )
        tools.append(tool)
    return tools
