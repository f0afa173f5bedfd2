"""Peers as tools."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from meshpoint import ConfigurationError, InvalidInput, Peer, TaskExecutionContext, agent
from meshpoint.frameworks import peer_tools
from meshpoint.frameworks.peers import PeerTools


class Trip(BaseModel):
    city: str
    days: int = 2


class Node(BaseModel):
    children: list[Node] = []


@agent("flights-2")
async def flights(ctx: TaskExecutionContext, trip: Trip) -> int:
    """Finds a flight."""
    return 1


def test_a_tool_has_the_name_description_and_schema_of_its_peer() -> None:
    (tool,) = peer_tools(flights)
    assert (tool.name, tool.description) == ("flights-2", "Finds a flight.")
    assert tool.schema == flights.peer.input_schema
    call = tool.call({"city": "Rome", "days": "3"})
    assert call.as_call("a").input == {"city": "Rome", "days": 3}


def test_a_peer_without_a_description_is_named() -> None:
    (tool,) = peer_tools(Peer("flights", Trip, int))
    assert tool.description == "Asks the agent 'flights'."


@pytest.mark.parametrize(
    ("type_", "arguments", "input_"),
    [
        (str, {"request": "Rome"}, "Rome"),
        (list[Trip], {"request": [{"city": "Rome"}]}, [{"city": "Rome", "days": 2}]),
        (TypeAdapter(Trip | int), {"request": 3}, 3),
        (Node, {"request": {"children": [{}]}}, {"children": [{"children": []}]}),
    ],
)
def test_other_inputs_are_one_argument(type_: Any, arguments: Any, input_: Any) -> None:
    (tool,) = peer_tools(Peer("flights", type_, int))
    assert tool.schema["type"] == "object"
    assert list(tool.schema["properties"]) == ["request"]
    assert tool.call(arguments).as_call("a").input == input_
    with pytest.raises(InvalidInput, match="one argument, 'request'"):
        tool.check({})


def test_arguments_that_do_not_fit_are_named() -> None:
    (tool,) = peer_tools(flights)
    with pytest.raises(InvalidInput, match=r"input for peer 'flights-2': Trip: days: Input"):
        tool.check({"city": "Rome", "days": "many"})


def test_two_tools_with_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two tools are called 'flights'"):
        peer_tools(Peer("flights", str, str), Peer("flights", int, int))


def test_names_are_patterns_of_peers_to_discover() -> None:
    tools = PeerTools([flights, "hotel-*"])
    assert list(tools.known) == ["flights-2"]
    assert tools.patterns == ("hotel-*",)
    with pytest.raises(ConfigurationError, match="'a b' matches no agent"):
        PeerTools(["a b"])


def test_peers_that_are_no_list_of_agents_are_refused() -> None:
    async def undecorated(ctx: TaskExecutionContext, trip: Trip) -> int:
        return 1

    with pytest.raises(ConfigurationError, match=r"'flights' is not a list; write \['flights'\]"):
        PeerTools("flights")
    with pytest.raises(ConfigurationError, match=r"undecorated .* is not an agent, a Peer"):
        PeerTools([undecorated])  # type: ignore[list-item]  # the mistake
