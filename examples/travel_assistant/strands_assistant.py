"""The travel assistant in Strands."""

import os

from scripted_models.strands import ScriptedModel
from strands import Agent, tool
from strands.vended_interventions.hitl import HumanInTheLoop
from trips import INSTRUCTIONS, Trip, book, flights, hotels

from meshpoint.frameworks.strands import durable

model = os.environ.get("TRAVEL_MODEL") or ScriptedModel()


def build_assistant() -> Agent:
    """An agent for one conversation."""
    return Agent(
        model,
        system_prompt=INSTRUCTIONS,
        tools=[tool(book)],
        interventions=[HumanInTheLoop(allowed_tools=["*", "!book"])],
    )


assistant = build_assistant()

travel = durable(
    build_assistant,
    name="travel",
    input=Trip,
    prompt=lambda trip: f"{trip.days} days in {trip.city}",
    peers=[flights, hotels],
)
