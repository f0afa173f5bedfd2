"""The script as a model of Pydantic AI."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from pydantic_ai.messages import ModelMessage, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from trips import next_turn


def scripted_model() -> FunctionModel:
    """A model that streams the script's turns."""
    return FunctionModel(stream_function=_stream, model_name="scripted")


async def _stream(
    messages: list[ModelMessage], info: AgentInfo
) -> AsyncIterator[str | dict[int, DeltaToolCall]]:
    parts = [part for message in messages for part in message.parts]
    results = {
        part.tool_name: part.model_response_str()
        for part in parts
        if isinstance(part, ToolReturnPart)
    }
    turn = next_turn(results)
    if isinstance(turn, str):
        yield turn
        return
    for index, call in enumerate(turn):
        yield {index: DeltaToolCall(call.tool, json.dumps(call.arguments))}
