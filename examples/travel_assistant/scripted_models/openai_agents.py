"""The script as a model of the OpenAI Agents SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from agents import Model, ModelResponse, Usage
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputMessage,
    ResponseOutputText,
)
from trips import next_turn


class ScriptedModel(Model):
    """A model that answers with the script's turns."""

    async def get_response(
        self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any
    ) -> ModelResponse:
        """The next turn."""
        return ModelResponse(output=_next_output(input), usage=Usage(), response_id=None)

    async def stream_response(
        self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """The next turn, in one piece."""
        response = Response.model_construct(id="scripted", output=_next_output(input), usage=None)
        yield ResponseCompletedEvent(
            type="response.completed", sequence_number=0, response=response
        )


def _next_output(items: Any) -> list[ResponseOutputItem]:
    """The next turn; the id of each call is the name of its tool."""
    outputs = [] if isinstance(items, str) else items
    results = {
        each["call_id"]: str(each["output"])
        for each in outputs
        if each.get("type") == "function_call_output"
    }
    turn = next_turn(results)
    if isinstance(turn, str):
        text = ResponseOutputText(type="output_text", text=turn, annotations=[])
        return [
            ResponseOutputMessage(
                id="scripted", type="message", role="assistant", status="completed", content=[text]
            )
        ]
    return [
        ResponseFunctionToolCall(
            type="function_call",
            name=call.tool,
            arguments=json.dumps(call.arguments),
            call_id=call.tool,
        )
        for call in turn
    ]
