"""Agent cards: how agents describe themselves to peers that discover them.

The fields `name`, `description`, `version` and `skills` follow the A2A agent card. The schemas are
JSON schemas of the agent's input and output, as in the description of an MCP tool.
`AgentCard` is the value that adapters, tools and people see; `CardBody` is its message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
)
from pydantic.alias_generators import to_camel

from meshpoint.errors import ConfigurationError, PoisonMessage
from meshpoint.model.bodies import Body, parse_body
from meshpoint.model.card_schema import check_card_schema
from meshpoint.model.json_values import json_digest
from meshpoint.model.messages import is_agent_name, is_valid_name

MAX_CARD_BYTES = 64 * 1024
"""Maximum bytes of a card's message."""
MAX_DESCRIPTION_LENGTH = 4_000
"""Maximum characters of a description."""
_MAX_SKILLS = 100
_MAX_TAGS = 50
_MAX_LABEL_LENGTH = 200

# Also surrogates, which have no UTF-8 form, and characters that change the direction of text.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_PATTERN = re.compile(r"[A-Za-z0-9_*?-]{1,63}")


def _clean_text(text: object) -> object:
    """Replace control characters, which terminals and models might interpret, with spaces."""
    return _CONTROL_CHARACTERS.sub(" ", text) if isinstance(text, str) else text


def _check_agent_name(name: str) -> str:
    if not is_agent_name(name):
        raise ValueError("not a valid agent name")
    return name


def _read_schema(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    check_card_schema(schema)
    return schema


_Label = Annotated[str, BeforeValidator(_clean_text), Field(max_length=_MAX_LABEL_LENGTH)]
_Text = Annotated[str, BeforeValidator(_clean_text), Field(max_length=MAX_DESCRIPTION_LENGTH)]
_Labels = Annotated[tuple[_Label, ...], Field(max_length=_MAX_TAGS)]
_Schema = Annotated[dict[str, JsonValue], AfterValidator(_read_schema)]


class _CardPart(BaseModel):
    """camelCase in JSON, snake_case in Python. Unknown fields are ignored."""

    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore"
    )


class AgentSkill(_CardPart):
    """One thing that an agent can do, as in A2A."""

    id: _Label
    name: _Label
    description: _Text = ""
    tags: _Labels = ()
    examples: Annotated[tuple[_Text, ...], Field(max_length=_MAX_TAGS)] = ()


class AgentCard(_CardPart):
    """An agent's description of itself.

    Attributes:
        name: The name under which peers call it.
        description: What it does, for models and people.
        version: The version that takes new tasks.
        input_schema: JSON schema of its input. Empty if it accepts any JSON.
        output_schema: JSON schema of its output. Empty if it may be any JSON.
        skills: What it can do.
    """

    name: Annotated[str, AfterValidator(_check_agent_name)]
    description: _Text = ""
    version: _Label = ""
    input_schema: _Schema = Field(default_factory=dict)
    output_schema: _Schema = Field(default_factory=dict)
    skills: Annotated[tuple[AgentSkill, ...], Field(max_length=_MAX_SKILLS)] = ()

    def __hash__(self) -> int:
        """Hash without the schemas, which are dictionaries."""
        return hash((self.name, self.description, self.version))

    @property
    def digest(self) -> str:
        """Digest of the content, the same in every process."""
        return json_digest(self.to_json())

    def to_json(self) -> dict[str, JsonValue]:
        """The card as JSON, with the field names of the wire."""
        return self.model_dump(mode="json", by_alias=True)


class CardBody(Body):
    """A card in a message: the answer to a `describe`, or the announcement of a new replica.

    `replica` identifies the replica that serves the card. If the cards of an agent differ, the
    most recently started replica's counts.
    """

    card: AgentCard
    replica: str = Field(max_length=_MAX_LABEL_LENGTH)
    started_at: AwareDatetime
    app_version: str | None = Field(default=None, max_length=_MAX_LABEL_LENGTH)


def parse_card(body: bytes, sender: str) -> CardBody:
    """Parse the card that `sender` sent.

    Raises:
        PoisonMessage: It is too large, it cannot be read, or it describes another agent.
    """
    if len(body) > MAX_CARD_BYTES:
        raise PoisonMessage(
            f"the card has {len(body):,} bytes; at most {MAX_CARD_BYTES:,} are allowed"
        )
    parsed = parse_body(CardBody, body)
    if parsed.card.name != sender:
        raise PoisonMessage(f"card.name: {sender!r} sent the card of {parsed.card.name!r}")
    if not is_valid_name(parsed.replica):
        raise PoisonMessage("replica: must be printable")
    return parsed


def check_patterns(patterns: Iterable[str], key: str) -> tuple[str, ...]:
    """Check names and patterns of peers. `*` stands for any characters, `?` for one.

    Raises:
        ConfigurationError: One can match no agent; `key` says where it was declared.
    """
    if isinstance(patterns, str):  # which would be one pattern per character
        raise ConfigurationError(key, f"{patterns!r} is not a list", f"write [{patterns!r}]")
    checked = tuple(patterns)
    for pattern in checked:
        if not (isinstance(pattern, str) and _PATTERN.fullmatch(pattern)):
            raise ConfigurationError(
                key,
                f"{pattern!r} matches no agent",
                "write names or patterns, such as flights, hotel-* or *",
            )
    return checked


def is_exact(pattern: str) -> bool:
    """Whether `pattern` is the name of one agent."""
    return "*" not in pattern and "?" not in pattern
