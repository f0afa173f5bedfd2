"""The travel agent in Strands."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from itertools import count
from typing import Any

from scenario import TOKENS, Journey, Result, Says, Trip, flights, hotels, weather
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models import Model
from strands.types.content import Messages
from strands.types.streaming import StreamEvent
from strands.vended_interventions.hitl import HumanInTheLoop

from meshpoint.frameworks.base import FrameworkAgent
from meshpoint.frameworks.strands import durable


def results_of(messages: Messages) -> list[Result]:
    """The results in a request, in their order."""
    blocks = [block for message in messages for block in message["content"]]
    names = {it["toolUse"]["toolUseId"]: it["toolUse"]["name"] for it in blocks if "toolUse" in it}
    found = [it["toolResult"] for it in blocks if "toolResult" in it]
    return [
        Result(
            each["toolUseId"],
            names[each["toolUseId"]],
            "".join(part.get("text", "") for part in each["content"]),
        )
        for each in found
    ]


class ScriptedModel(Model):
    """A model that follows the script."""

    def __init__(self, journey: Journey) -> None:
        self._journey, self._ids = journey, count()

    def update_config(self, **model_config: Any) -> None:
        """It has no options."""

    def get_config(self) -> dict[str, Any]:
        """Its name."""
        return {"model_id": "script"}

    def structured_output(self, *args: Any, **kwargs: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Agents use a tool for this."""
        raise NotImplementedError

    async def stream(
        self, messages: Messages, tool_specs: Any = None, *args: Any, **kwargs: Any
    ) -> AsyncIterator[StreamEvent]:
        """Answer with the script's next text and calls."""
        journey = self._journey
        journey.offered = {each["name"]: each["description"] for each in tool_specs or ()}
        if journey.pause is not None:
            await journey.pause()
        answers = sum(message["role"] == "assistant" for message in messages)
        for event in self._events(journey.answer(answers, results_of(messages))):
            yield event

    def _events(self, said: Says) -> Iterator[StreamEvent]:
        yield {"messageStart": {"role": "assistant"}}
        if said.text:
            yield {"contentBlockStart": {"start": {}}}
            for word in said.text.split(" "):
                yield {"contentBlockDelta": {"delta": {"text": f"{word} "}}}
            yield {"contentBlockStop": {}}
        for each in said.uses:  # in Strands, each provider gives ids to calls without one
            call_id = each.id or f"script-{next(self._ids)}"
            start: Any = {"toolUse": {"toolUseId": call_id, "name": each.tool}}
            yield {"contentBlockStart": {"start": start}}
            arguments = json.dumps(each.arguments)
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": arguments}}}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if said.uses else "end_turn"}}
        usage: Any = {"inputTokens": 10, "outputTokens": TOKENS, "totalTokens": 10 + TOKENS}
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


class Strands:
    """Builds the travel agent."""

    def agent(self, journey: Journey, **options: Any) -> Agent:
        """The agent by itself."""

        @tool
        async def visas(country: str) -> str:
            """Finds the visas for a country."""
            if journey.meet is not None:
                await journey.meet()
            return journey.use("visas", country)

        @tool
        def clock() -> str:
            """Returns the time."""
            return journey.use("clock")

        @tool
        def book(offer: int) -> str:
            """Books an offer."""
            return journey.use("book", offer)

        return Agent(
            ScriptedModel(journey),
            name="travel",
            tools=[visas, clock, book],
            interventions=[HumanInTheLoop(allowed_tools=["*", "!book"])],
            conversation_manager=NullConversationManager(),  # the script counts all messages
            **options,
        )

    def raw(self, journey: Journey) -> Agent:
        """The agent, as an entrypoint may name it."""
        return self.agent(journey)

    def build(self, journey: Journey, **options: Any) -> FrameworkAgent[Trip, str]:
        """The agent, wrapped."""
        options = {"peers": [flights, hotels, weather], "stream": False, **options}
        if limit := options.pop("request_limit", None):
            options["limits"] = {"turns": limit}
        return durable(
            lambda: self.agent(journey),
            name="travel",
            input=Trip,
            prompt=lambda trip: f"{trip.days} days in {trip.city}",
            **options,
        )

    def add_field(self, state: bytes) -> bytes:
        """Add a field to the first message."""
        stored = json.loads(state)
        stored["messages"][0]["later_field"] = 1
        return json.dumps(stored).encode()


FRAMEWORK = Strands()
