"""The question that a tool call asks before a person lets it run."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import BaseModel, JsonValue

from meshpoint.model.questions import Question


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
    """The prompt of the question: the tool and its arguments."""
    shown = json.dumps(arguments, ensure_ascii=False)
    return f"Run {tool} with {shown}?"
