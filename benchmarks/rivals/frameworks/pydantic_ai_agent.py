"""The agent in Pydantic AI, for every contender. Meshpoint is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import RequestUsage

from benchmarks.rivals import job

USAGE = RequestUsage(input_tokens=10, output_tokens=10)
"""Given, because the model would estimate it slowly."""


def _parts(messages: Sequence[ModelMessage]) -> Iterator[Any]:
    return (part for each in messages if isinstance(each, ModelRequest) for part in each.parts)


def _respond(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Call the peer until there are as many answers as the prompt says, then answer."""
    prompt = next(part for part in _parts(messages) if isinstance(part, UserPromptPart))
    answers = [str(part.content) for part in _parts(messages) if isinstance(part, ToolReturnPart)]
    if len(answers) < int(str(prompt.content)):
        arguments = {"request": job.QUESTION}
        call = ToolCallPart("peer", arguments, tool_call_id=f"call-{len(answers)}")
        return ModelResponse(parts=[call], usage=USAGE)
    return ModelResponse(parts=[TextPart(job.summary(answers))], usage=USAGE)


def make_agent(**options: Any) -> Agent[None, str]:
    """Build the agent. `options` are passed to `Agent`, for example its tools."""
    return Agent(FunctionModel(_respond, model_name="script"), name="root", **options)
