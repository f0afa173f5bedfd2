"""The travel assistant in LangGraph."""

import os

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from scripted_models.langgraph import ScriptedModel
from trips import INSTRUCTIONS, Trip, book, flights, hotels

from meshpoint.frameworks.langgraph import MeshpointDurability, durable

assistant = create_agent(
    os.environ.get("TRAVEL_MODEL") or ScriptedModel(),
    [book],
    system_prompt=INSTRUCTIONS,
    middleware=[
        HumanInTheLoopMiddleware({"book": True}, interrupt_mode="per_call"),
        MeshpointDurability(),
    ],
    name="travel",
)

travel = durable(
    assistant,
    input=Trip,
    prompt=lambda trip: f"{trip.days} days in {trip.city}",
    output=str,
    peers=[flights, hotels],
)
