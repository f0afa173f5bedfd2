"""The question that a tool call asks before a person lets it run."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import BaseModel, JsonValue

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


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text):,} characters)"
