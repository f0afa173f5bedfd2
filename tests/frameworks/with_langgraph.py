"""The travel agent in LangGraph."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, ModelCallLimitMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from scenario import TOKENS, Journey, Result, Says, Trip, flights, hotels, weather

from meshpoint.frameworks.base import FrameworkAgent
from meshpoint.frameworks.langgraph import MeshpointDurability, durable


class ScriptedModel(BaseChatModel):
    """A model that follows the script, with and without streaming."""

    journey: Any

    @property
    def _llm_type(self) -> str:
        return "script"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """Pass the tools with each request."""
        return self.bind(tools=[convert_to_openai_tool(each) for each in tools])

    async def _next(self, messages: list[BaseMessage], tools: list[Any]) -> Says:
        journey: Journey = self.journey
        functions = [each["function"] for each in tools]
        journey.offered = {each["name"]: each["description"] for each in functions}
        if journey.pause is not None:
            await journey.pause()
        answers = sum(isinstance(each, AIMessage) for each in messages)
        results = [
            Result(each.tool_call_id, each.name or "", each.text)
            for each in messages
            if isinstance(each, ToolMessage)
        ]
        return journey.answer(answers, results)

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        raise NotImplementedError

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        said = await self._next(messages, kwargs.get("tools", []))
        message = AIMessage(
            said.text,
            tool_calls=[
                {"name": each.tool, "args": dict(each.arguments), "id": each.id}
                for each in said.uses
            ],
            usage_metadata=_USAGE,
            response_metadata={"model_name": "script"},
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        said = await self._next(messages, kwargs.get("tools", []))
        for word in said.text.split(" ") if said.text else ():
            yield ChatGenerationChunk(message=AIMessageChunk(content=f"{word} "))
        calls: list[Any] = [
            {"name": each.tool, "args": json.dumps(each.arguments), "id": each.id, "index": index}
            for index, each in enumerate(said.uses)
        ]
        last = AIMessageChunk(
            content="",
            tool_call_chunks=calls,
            usage_metadata=_USAGE,
            response_metadata={"model_name": "script"},
        )
        yield ChatGenerationChunk(message=last)


_USAGE: Any = {"input_tokens": 10, "output_tokens": TOKENS, "total_tokens": 10 + TOKENS}


class LangGraph:
    """Builds the travel agent."""

    def agent(self, journey: Journey, **options: Any) -> Any:
        """The agent by itself."""

        @tool
        async def visas(country: str) -> str:
            """Says which visa is needed."""
            if journey.meet is not None:
                await journey.meet()
            return journey.use("visas", country)

        @tool
        def clock() -> str:
            """Says the time."""
            return journey.use("clock")

        @tool
        def book(offer: int) -> str:
            """Books an offer."""
            return journey.use("book", offer)

        middleware = [
            HumanInTheLoopMiddleware({"book": True}, interrupt_mode="per_call"),
            *options.pop("middleware", ()),
            MeshpointDurability(),
        ]
        return create_agent(
            ScriptedModel(journey=journey),
            [visas, clock, book],
            middleware=middleware,
            name="travel",
            **options,
        )

    def build(self, journey: Journey, **options: Any) -> FrameworkAgent[Trip, str]:
        """The agent, wrapped."""
        options = {"peers": [flights, hotels, weather], "stream": False, **options}
        limits: list[Any] = []
        if limit := options.pop("request_limit", None):
            limits = [ModelCallLimitMiddleware(thread_limit=limit, exit_behavior="error")]
        return durable(
            self.agent(journey, middleware=limits),
            input=Trip,
            prompt=lambda trip: f"{trip.days} days in {trip.city}",
            output=str,
            **options,
        )

    def raw(self, journey: Journey) -> object:
        """The agent, as an entrypoint may name it."""
        return self.agent(journey)

    def add_field(self, state: bytes) -> bytes:
        """Add a field to the first message."""
        stored = json.loads(state)
        stored["messages"][0]["later_field"] = 1
        return json.dumps(stored).encode()


FRAMEWORK = LangGraph()
