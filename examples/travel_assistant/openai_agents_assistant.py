"""The travel assistant in the OpenAI Agents SDK."""

import os

from agents import Agent, function_tool, set_tracing_disabled
from scripted_models.openai_agents import ScriptedModel
from trips import INSTRUCTIONS, Trip, book, flights, hotels

from meshpoint.frameworks.openai_agents import durable

set_tracing_disabled(True)  # otherwise the SDK sends traces to OpenAI

assistant = Agent(
    "travel",
    model=os.environ.get("TRAVEL_MODEL") or ScriptedModel(),
    instructions=INSTRUCTIONS,
    tools=[function_tool(book, needs_approval=True)],
)

travel = durable(
    assistant,
    input=Trip,
    prompt=lambda trip: f"{trip.days} days in {trip.city}",
    peers=[flights, hotels],
)
