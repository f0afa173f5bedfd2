"""The question that a tool call asks before a person lets it run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, JsonValue
from pydantic_core import to_json

from meshpoint.model.questions import MAX_PROMPT_LENGTH, Question

_MAX_SHOWN_LENGTH = MAX_PROMPT_LENGTH - 2_000
"""Maximum characters of arguments in a prompt. The rest is for the tool's name, and for notes."""


class Approval(BaseModel):
    """A person's decision about a tool call.

    Attributes:
        approved: Whether the tool may run, with the arguments that the question shows.
        message: For the model, if it may not.
    """

    approved: bool
    message: str = ""


APPROVAL = Question("approval", Approval)
"""Asked for each call of a tool that requires approval."""


def describe_call(tool: str, arguments: Mapping[str, JsonValue]) -> str:
    """The prompt of the question: the tool and its arguments.

    If they are too long, each is cut, with its length, so that none hides another.
    """
    shown = json.dumps(arguments, ensure_ascii=False)
    if len(shown) > _MAX_SHOWN_LENGTH:
        room = _MAX_SHOWN_LENGTH // len(arguments)
        each = (json.dumps({name: value}, ensure_ascii=False) for name, value in arguments.items())
        shown = f"{{{', '.join(_cut(text[1:-1], room) for text in each)}}}"
    return _cut(f"Run {tool} with {shown}?", _MAX_SHOWN_LENGTH + 1_000)


def prompt_text(value: Any) -> str:
    """The prompt that shows a value of a framework to a person."""
    text = value if isinstance(value, str) else to_json(value, fallback=str).decode()
    return _cut(text, _MAX_SHOWN_LENGTH)


def validate_arguments(schema: Any, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The arguments as `schema` reads them, for a person.

    Arguments that do not fit, or that JSON cannot represent, are returned as the model wrote them.
    """
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        try:
            read = schema.model_validate(arguments)
            shown = read.model_dump(mode="json", round_trip=True)
            if schema.model_validate(shown) == read:
                return shown
        except Exception:  # the types of a tool may raise any; the tool itself will refuse them
            return arguments
    return arguments


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text):,} characters)"
