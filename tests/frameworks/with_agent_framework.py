"""The travel agent in Microsoft Agent Framework."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any

from agent_framework import (
    Agent,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    FunctionTool,
    Message,
    ResponseStream,
    UsageDetails,
    tool,
)
from scenario import TOKENS, Journey, Result, Says, Trip, flights, hotels, weather

from meshpoint.frameworks import Budget
from meshpoint.frameworks.agent_framework import durable
from meshpoint.frameworks.base import FrameworkAgent


def _results(messages: Sequence[Message]) -> list[Result]:
    contents = [content for message in messages for content in message.contents]
    names = {each.call_id: each.name for each in contents if each.type == "function_call"}
    return [
        Result(each.call_id or "", names.get(each.call_id) or "", str(each.result))
        for each in contents
        if each.type == "function_result"
    ]


class ScriptedModel(FunctionInvocationLayer[Any], ChatMiddlewareLayer[Any], BaseChatClient[Any]):
    """A model that follows the script, with and without streaming."""

    def __init__(self, journey: Journey, **limits: Any) -> None:
        configuration: Any = {"max_iterations": 1000, **limits}  # 40 by default
        super().__init__(function_invocation_configuration=configuration)
        self._journey = journey

    async def _next(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Says:
        journey, tools = self._journey, options.get("tools") or ()
        journey.offered = {
            each.name: each.description for each in tools if isinstance(each, FunctionTool)
        }
        if journey.pause is not None:
            await journey.pause()
        answers = sum(each.role == "assistant" for each in messages)
        return journey.answer(answers, _results(messages))

    def _inner_get_response(
        self,
        *,
        messages: Sequence[Message],
        stream: bool,
        options: Mapping[str, Any],
        **kwargs: Any,
    ) -> Awaitable[ChatResponse[Any]] | ResponseStream[ChatResponseUpdate, ChatResponse[Any]]:
        if stream:
            return self._build_response_stream(self._stream(messages, options))
        return self._respond(messages, options)

    async def _respond(
        self, messages: Sequence[Message], options: Mapping[str, Any]
    ) -> ChatResponse[Any]:
        said = await self._next(messages, options)
        contents = [*([Content.from_text(said.text)] if said.text else []), *_calls(said)]
        message = Message("assistant", contents)
        return ChatResponse(messages=message, model="script", usage_details=_USAGE)

    async def _stream(
        self, messages: Sequence[Message], options: Mapping[str, Any]
    ) -> AsyncIterator[ChatResponseUpdate]:
        said = await self._next(messages, options)
        for word in said.text.split(" ") if said.text else ():
            yield _update([Content.from_text(f"{word} ")])
        yield _update([*_calls(said), Content.from_usage(_USAGE)])


_USAGE: UsageDetails = {"input_token_count": 10, "output_token_count": TOKENS}


def _calls(said: Says) -> list[Content]:
    return [
        Content.from_function_call(each.id, each.tool, arguments=json.dumps(each.arguments))
        for each in said.uses
    ]


def _update(contents: list[Content]) -> ChatResponseUpdate:
    return ChatResponseUpdate(contents=contents, role="assistant", model="script")


class AgentFramework:
    """Builds the travel agent."""

    def agent(self, journey: Journey, **options: Any) -> Agent[Any]:
        """The agent by itself."""

        @tool
        async def visas(country: str) -> str:
            if journey.meet is not None:
                await journey.meet()
            return journey.use("visas", country)

        @tool
        def clock() -> str:
            return journey.use("clock")

        @tool(approval_mode="always_require")
        def book(offer: int) -> str:
            return journey.use("book", offer)

        tools = [visas, clock, book]
        return Agent(ScriptedModel(journey), name="travel", tools=tools, **options)

    def raw(self, journey: Journey) -> Agent[Any]:
        """The agent, as an entrypoint may name it."""
        return self.agent(journey)

    def build(self, journey: Journey, **options: Any) -> FrameworkAgent[Trip, str]:
        """The agent, wrapped."""
        options = {"peers": [flights, hotels, weather], "stream": False, **options}
        if limit := options.pop("request_limit", None):  # no limit of the framework fails
            options["budget"] = Budget(requests=limit)
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


FRAMEWORK = AgentFramework()
