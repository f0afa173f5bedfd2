"""The travel agent in Google ADK."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.tools.function_tool import FunctionTool
from google.genai import types
from pydantic import PrivateAttr
from scenario import TOKENS, Journey, Result, Says, Trip, flights, hotels, weather

from meshpoint.frameworks.base import FrameworkAgent
from meshpoint.frameworks.google_adk import durable


def _parts(contents: Sequence[types.Content]) -> Iterator[types.Part]:
    return (part for content in contents for part in content.parts or ())


def _text(response: dict[str, Any]) -> str:
    """A result as ADK shows it to a model."""
    if response.keys() & {"result", "error"} and len(response) == 1:
        (value,) = response.values()
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return json.dumps(response, separators=(",", ":"))


def results_of(request: LlmRequest) -> list[Result]:
    """The results in a request, in their order."""
    responses = (part.function_response for part in _parts(request.contents))
    return [
        Result(each.id or "", each.name or "", _text(each.response or {}))
        for each in responses
        if each is not None
    ]


class ScriptedModel(BaseLlm):
    """A model that follows the script, with and without streaming."""

    model: str = "script"
    _journey: Journey = PrivateAttr()

    @classmethod
    def of(cls, journey: Journey) -> ScriptedModel:
        """The model for a journey."""
        model = cls()
        model._journey = journey
        return model

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        journey = self._journey
        journey.offered = {
            declared.name or "": declared.description or ""
            for tool in llm_request.config.tools or ()
            if isinstance(tool, types.Tool)
            for declared in tool.function_declarations or ()
        }
        if journey.pause is not None:
            await journey.pause()
        answers = sum(content.role == "model" for content in llm_request.contents)
        said = journey.answer(answers, results_of(llm_request))
        if stream:
            for word in said.text.split(" ") if said.text else ():
                yield _response([types.Part(text=f"{word} ")], partial=True)
        yield _response(_said_parts(said), usage=True)


def _said_parts(said: Says) -> list[types.Part]:
    calls = [
        types.Part(
            function_call=types.FunctionCall(id=each.id, name=each.tool, args=dict(each.arguments))
        )
        for each in said.uses
    ]
    return [*([types.Part(text=said.text)] if said.text else []), *calls]


def _response(
    parts: list[types.Part], *, partial: bool = False, usage: bool = False
) -> LlmResponse:
    counted = types.GenerateContentResponseUsageMetadata(
        prompt_token_count=10, candidates_token_count=TOKENS
    )
    return LlmResponse(
        content=types.Content(role="model", parts=parts),
        partial=partial,
        usage_metadata=counted if usage else None,
    )


class GoogleADK:
    """Builds the travel agent."""

    def agent(self, journey: Journey, **options: Any) -> LlmAgent:
        """The agent by itself."""

        async def visas(country: str) -> str:
            if journey.meet is not None:
                await journey.meet()
            return journey.use("visas", country)

        def clock() -> str:
            return journey.use("clock")

        def book(offer: int) -> str:
            return journey.use("book", offer)

        tools: list[Any] = [visas, clock, FunctionTool(book, require_confirmation=True)]
        return LlmAgent(name="travel", model=ScriptedModel.of(journey), tools=tools, **options)

    def raw(self, journey: Journey) -> LlmAgent:
        """The agent, as an entrypoint may name it."""
        return self.agent(journey)

    def build(self, journey: Journey, **options: Any) -> FrameworkAgent[Trip, str]:
        """The agent, wrapped."""
        options = {"peers": [flights, hotels, weather], "stream": False, **options}
        if limit := options.pop("request_limit", None):
            options["run_config"] = RunConfig(max_llm_calls=limit)
        return durable(
            self.agent(journey),
            input=Trip,
            prompt=lambda trip: f"{trip.days} days in {trip.city}",
            **options,
        )

    def add_field(self, state: bytes) -> bytes:
        """Add a field to the first event."""
        stored = json.loads(state)
        stored["messages"][0]["laterField"] = 1
        return json.dumps(stored).encode()


FRAMEWORK = GoogleADK()
