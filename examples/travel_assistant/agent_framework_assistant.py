"""The travel assistant in Microsoft Agent Framework."""

import os
from typing import Any

from agent_framework import Agent, tool
from scripted_models.agent_framework import ScriptedClient
from trips import INSTRUCTIONS, Trip, book, flights, hotels

from meshpoint.frameworks.agent_framework import durable


def chat_client(model: str | None) -> Any:
    """A client of OpenAI, or else the script."""
    if not model:
        return ScriptedClient()
    from agent_framework.openai import OpenAIChatClient

    return OpenAIChatClient(model)


assistant = Agent(
    chat_client(os.environ.get("TRAVEL_MODEL")),
    name="travel",
    instructions=INSTRUCTIONS,
    tools=[tool(book, approval_mode="always_require")],
)

travel = durable(
    assistant,
    input=Trip,
    prompt=lambda trip: f"{trip.days} days in {trip.city}",
    peers=[flights, hotels],
)
