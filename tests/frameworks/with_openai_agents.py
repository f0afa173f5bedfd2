"""The travel agent in the OpenAI Agents SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from agents import (
    Agent,
    Model,
    ModelResponse,
    Usage,
    function_tool,
    set_tracing_disabled,
)
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseUsage,
)
from scenario import TOKENS, Journey, Result, Says, Trip, flights, hotels, weather

from meshpoint.frameworks.base import FrameworkAgent
from meshpoint.frameworks.openai_agents import durable

set_tracing_disabled(True)  # otherwise the SDK sends traces to OpenAI


def results_of(items: Any) -> list[Result]:
    """The results in a request, in their order."""
    items = [] if isinstance(items, str) else items
    tools = {each["call_id"]: each["name"] for each in items if _is(each, "function_call")}
    return [
        Result(each["call_id"], tools[each["call_id"]], str(each["output"]))
        for each in items
        if _is(each, "function_call_output")
    ]


def _is(item: Any, kind: str) -> bool:
    return bool(item.get("type") == kind)


def _answers(items: Any) -> int:
    """The model's answers in a request: each is followed by results, or is a text alone."""
    if isinstance(items, str):
        return 0
    pairs = [*zip(items, [*items[1:], {}], strict=True)]
    with_calls: int = sum(
        _is(each, "function_call_output") and not _is(following, "function_call_output")
        for each, following in pairs
    )
    texts: int = sum(
        each.get("role") == "assistant" and not _is(following, "function_call")
        for each, following in pairs
    )
    return with_calls + texts


class ScriptedModel(Model):
    """A model that follows the script, with and without streaming."""

    model = "script"

    def __init__(self, journey: Journey) -> None:
        self._journey = journey

    async def _next(self, items: Any, tools: list[Any]) -> Says:
        journey = self._journey
        journey.offered = {each.name: each.description for each in tools}
        if journey.pause is not None:
            await journey.pause()
        return journey.answer(_answers(items), results_of(items))

    async def get_response(
        self,
        system_instructions: Any,
        input: Any,
        model_settings: Any,
        tools: Any,
        *_: Any,
        **__: Any,
    ) -> ModelResponse:
        said = await self._next(input, tools)
        usage = Usage(requests=1, input_tokens=10, output_tokens=TOKENS, total_tokens=10 + TOKENS)
        return ModelResponse(output=_output(said), usage=usage, response_id=None)

    async def stream_response(
        self,
        system_instructions: Any,
        input: Any,
        model_settings: Any,
        tools: Any,
        *_: Any,
        **__: Any,
    ) -> AsyncIterator[Any]:
        said = await self._next(input, tools)
        for word in said.text.split(" ") if said.text else ():
            yield ResponseTextDeltaEvent(
                type="response.output_text.delta",
                delta=f"{word} ",
                content_index=0,
                item_id="m",
                logprobs=[],
                output_index=0,
                sequence_number=0,
            )
        yield ResponseCompletedEvent(
            type="response.completed",
            sequence_number=1,
            response=Response.model_construct(
                id="r", output=_output(said), usage=_USAGE, model=self.model
            ),
        )


_USAGE = ResponseUsage.model_validate(
    {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": TOKENS,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10 + TOKENS,
    }
)


def _output(said: Says) -> list[ResponseOutputItem]:
    items: list[ResponseOutputItem] = [
        ResponseFunctionToolCall(
            type="function_call",
            name=each.tool,
            arguments=json.dumps(each.arguments),
            call_id=each.id,
        )
        for each in said.uses
    ]
    if said.text:
        text = ResponseOutputText(type="output_text", text=said.text, annotations=[])
        message = ResponseOutputMessage(
            id="m", type="message", role="assistant", status="completed", content=[text]
        )
        items.insert(0, message)
    return items


class OpenAIAgents:
    """Builds the travel agent."""

    def agent(self, journey: Journey, **options: Any) -> Agent[None]:
        """The agent by itself."""

        @function_tool
        async def visas(country: str) -> str:
            if journey.meet is not None:
                await journey.meet()
            return journey.use("visas", country)

        @function_tool
        def clock() -> str:
            return journey.use("clock")

        @function_tool(needs_approval=True)
        def book(offer: int) -> str:
            return journey.use("book", offer)

        return Agent("travel", model=ScriptedModel(journey), tools=[visas, clock, book], **options)

    def raw(self, journey: Journey) -> Agent[None]:
        """The agent, as an entrypoint may name it."""
        return self.agent(journey)

    def build(self, journey: Journey, **options: Any) -> FrameworkAgent[Trip, str]:
        """The agent, wrapped."""
        options = {"peers": [flights, hotels, weather], "stream": False, **options}
        if limit := options.pop("request_limit", None):
            options["max_turns"] = limit
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


FRAMEWORK = OpenAIAgents()
