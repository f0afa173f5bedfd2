"""The script as a model of Google ADK."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from trips import next_turn


class ScriptedModel(BaseLlm):
    """A model that answers with the script's turns."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """The next turn, in one piece."""
        parts = [part for content in llm_request.contents for part in content.parts or ()]
        responses = [part.function_response for part in parts]
        results = {
            each.name or "": str((each.response or {}).get("result"))
            for each in responses
            if each is not None
        }
        turn = next_turn(results)
        if isinstance(turn, str):
            said = [types.Part.from_text(text=turn)]
        else:
            said = [
                types.Part.from_function_call(name=call.tool, args=call.arguments) for call in turn
            ]
        yield LlmResponse(content=types.ModelContent(said))
