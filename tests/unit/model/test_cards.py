"""Agent cards: what they accept, and what they refuse."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from meshpoint.errors import ConfigurationError, PoisonMessage
from meshpoint.model.cards import (
    MAX_CARD_BYTES,
    AgentCard,
    AgentSkill,
    check_patterns,
    is_exact,
    parse_card,
)

_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


def a_body(sender: str = "flights", **card: Any) -> bytes:
    """The body of a card from `sender`."""
    content = {
        "card": {"name": sender, **card},
        "replica": "r-1",
        "startedAt": "2026-01-02T03:04:05Z",
    }
    return json.dumps(content).encode()


def test_a_card_on_the_wire_has_the_names_of_a2a() -> None:
    skill = AgentSkill(id="quote", name="Quote", tags=("price",))
    card = AgentCard(name="flights", input_schema=_SCHEMA, skills=(skill,))
    assert card.to_json() == {
        "name": "flights",
        "description": "",
        "version": "",
        "inputSchema": _SCHEMA,
        "outputSchema": {},
        "skills": [
            {"id": "quote", "name": "Quote", "description": "", "tags": ["price"], "examples": []}
        ],
    }
    assert AgentCard.model_validate(card.to_json()) == card


def test_a_card_is_frozen_and_hashable() -> None:
    card = AgentCard(name="flights", input_schema=_SCHEMA)
    with pytest.raises(ValidationError):
        card.name = "hotels"
    assert {card, card.model_copy(update={"output_schema": _SCHEMA})} != {card}
    assert card.digest == AgentCard(name="flights", input_schema=_SCHEMA).digest


def test_a_card_of_a_later_release_is_read() -> None:
    body = a_body(description="Finds flights.", streaming=True)
    assert parse_card(body, "flights").card.description == "Finds flights."


def test_control_characters_become_spaces() -> None:
    card = AgentCard(name="flights", description="a\x1b[31mb\u202ec\nd\te\x00")
    assert card.description == "a [31mb c\nd\te "


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": schema}
    return schema


def _bomb(definitions: int, references: int) -> dict[str, Any]:
    """A schema whose definitions refer to the next one, so often each."""
    chain: dict[str, Any] = {
        f"A{each}": {"anyOf": [{"$ref": f"#/$defs/A{each + 1}"}] * references}
        for each in range(definitions)
    }
    return {"$ref": "#/$defs/A0", "$defs": {**chain, f"A{definitions}": {"type": "string"}}}


@pytest.mark.parametrize(
    ("card", "problem"),
    [
        ({"description": "x" * 5_000}, "card.description"),
        ({"description": "x" * 10_000_000}, "at most"),
        ({"version": "1" * 300}, "card.version"),
        ({"inputSchema": []}, "card.inputSchema"),
        ({"inputSchema": _nested(100)}, "64 levels"),
        ({"inputSchema": {"$ref": "https://evil.example/schema"}}, "must refer to a definition"),
        ({"outputSchema": {"items": {"$dynamicRef": "file:///etc/passwd"}}}, "must refer to a"),
        ({"inputSchema": {"$ref": "#/$defs/A"}}, "'#/$defs/A' must refer to a definition"),
        ({"inputSchema": {"properties": {"a": {"$ref": "#"}}}}, "'#' must refer to a definition"),
        ({"inputSchema": {"properties": "x"}}, "schema.properties must be an object"),
        ({"inputSchema": {"properties": {"a": 5}}}, "schema.properties.a must be an object or a"),
        ({"inputSchema": {"items": {"anyOf": {}}}}, "schema.items.anyOf must be a list"),
        ({"inputSchema": {"required": "x"}}, "schema.required must be a list"),
        ({"inputSchema": {"type": ["string", "text"]}}, "schema.type must name types of JSON"),
        ({"inputSchema": {"$ref": 5}}, "schema.$ref must be a string"),
        ({"inputSchema": {"maximum": 10**4200}}, "an integer of over 4000 digits"),
        ({"inputSchema": _bomb(20, 2)}, "too large with its references expanded"),
        ({"inputSchema": _bomb(500, 1)}, "too large with its references expanded"),
        ({"outputSchema": {"maximum": "∞"}, "skills": [{"id": "x"}]}, "card.skills"),
        ({"skills": [{"id": str(n), "name": "x"} for n in range(101)]}, "card.skills"),
        ({"name": "hotels"}, "'flights' sent the card of 'hotels'"),
        ({"name": "no name"}, "not a valid agent name"),
    ],
)
def test_hostile_cards_are_refused(card: dict[str, Any], problem: str) -> None:
    with pytest.raises(PoisonMessage, match=re.escape(problem)):
        parse_card(a_body(**card), "flights")


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"\xff", b'{"card": 1}', b"[" * 100_000 + b"]" * 100_000]
)
def test_unreadable_cards_are_refused(body: bytes) -> None:
    with pytest.raises(PoisonMessage):
        parse_card(body, "flights")


def test_infinity_in_a_schema_is_refused() -> None:
    body = a_body(inputSchema={"maximum": 17}).replace(b"17", b"1e400")
    with pytest.raises(PoisonMessage, match="inf is not JSON"):
        parse_card(body, "flights")


def test_a_property_may_be_called_ref() -> None:
    schema: dict[str, Any] = {
        "properties": {"$ref": {"type": "string"}, "x": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"type": "string"}},
    }
    assert AgentCard(name="flights", input_schema=schema).input_schema == schema


def test_a_card_is_refused_by_its_size_alone() -> None:
    body = a_body().ljust(MAX_CARD_BYTES)
    assert parse_card(body, "flights").card.name == "flights"
    with pytest.raises(PoisonMessage, match="at most 65,536"):
        parse_card(body + b" ", "flights")


def test_a_schema_may_have_sixty_four_levels() -> None:
    assert parse_card(a_body(inputSchema=_nested(63)), "flights").card.input_schema
    with pytest.raises(PoisonMessage, match="64 levels"):
        parse_card(a_body(inputSchema=_nested(64)), "flights")


def test_a_replica_with_an_unprintable_id_is_refused() -> None:
    with pytest.raises(PoisonMessage, match="replica: must be printable"):
        parse_card(a_body().replace(b"r-1", b"r\\n1"), "flights")


def test_patterns() -> None:
    patterns = ["flights", "hotel-*", "*", "?"]
    assert check_patterns(patterns, "peers") == tuple(patterns)
    assert [is_exact(each) for each in patterns] == [True, False, False, False]


@pytest.mark.parametrize("pattern", ["", "a b", "a.b", "[a]", "x" * 64])
def test_patterns_that_match_no_agent_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match="matches no agent"):
        check_patterns([pattern], "peers")
