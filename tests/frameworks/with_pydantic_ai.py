"""The travel agent in Pydantic AI."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ModelResponsePart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.usage import RequestUsage
from scenario import TOKENS, Journey, Result, Says, Trip, flights, hotels, weather

from meshpoint.frameworks.base import FrameworkAgent
from meshpoint.frameworks.pydantic_ai import durable


def _results(messages: Sequence[ModelMessage]) -> list[Result]:
    return [
        Result(part.tool_call_id, part.tool_name, part.model_response_str())
        for message in messages
        if isinstance(message, ModelRequest)
        for part in message.parts
        if isinstance(part, ToolReturnPart)
    ]


async def _next(journey: Journey, messages: Sequence[ModelMessage], info: AgentInfo) -> Says:
    journey.offered = {tool.name: tool.description or "" for tool in info.function_tools}
    if journey.pause is not None:
        await journey.pause()
    answers = sum(isinstance(each, ModelResponse) for each in messages)
    return journey.answer(answers, _results(messages))


def model_of(journey: Journey) -> FunctionModel:
    """A model that follows the script, with and without streaming."""

    async def request(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        said = await _next(journey, messages, info)
        calls = [ToolCallPart(each.tool, dict(each.arguments), each.id) for each in said.uses]
        parts: list[ModelResponsePart] = [*calls, *([TextPart(said.text)] if said.text else [])]
        usage = RequestUsage(input_tokens=10, output_tokens=TOKENS)  # an estimate is slow
        return ModelResponse(parts=parts, usage=usage)

    async def stream(
        messages: list[ModelMessage], info: AgentInfo
    ) -> AsyncIterator[str | dict[int, DeltaToolCall]]:
        said = await _next(journey, messages, info)
        for index, each in enumerate(said.uses):
            yield {
                index: DeltaToolCall(each.tool, json.dumps(each.arguments), tool_call_id=each.id)
            }
        for word in said.text.split(" ") if said.text else ():
            yield f"{word} "

    return FunctionModel(request, stream_function=stream, model_name="script")


class PydanticAI:
    """Builds the travel agent."""

    def agent(self, journey: Journey, **options: Any) -> Agent[None, str]:
        """The agent by itself."""
        agent = Agent(model_of(journey), name="travel", **options)

        @agent.tool_plain
        async def visas(country: str) -> str:
            if journey.meet is not None:
                await journey.meet()
            return journey.use("visas", country)

        @agent.tool_plain
        def clock() -> str:
            return journey.use("clock")

        @agent.tool_plain(requires_approval=True)
        def book(offer: int) -> str:
            return journey.use("book", offer)

        return agent

    def raw(self, journey: Journey) -> Agent[None, str]:
        """The agent, as an entrypoint may name it."""
        return self.agent(journey)

    def build(self, journey: Journey, **options: Any) -> FrameworkAgent[Trip, str]:
        """The agent, wrapped."""
        options = {"peers": [flights, hotels, weather], "stream": False, **options}
        if limit := options.pop("request_limit", None):
            options["usage_limits"] = UsageLimits(request_limit=limit)
        return durable(
            self.agent(journey),
            input=Trip,
            prompt=lambda trip: f"{trip.days} days in {trip.city}",
            **options,
        )

    def add_field(self, state: bytes) -> bytes:
        """Add a field to the first message."""
        stored = json.loads(state)
        stored["messages"][0]["later_field"] = 1
        return json.dumps(stored).encode()


FRAMEWORK = PydanticAI()
