"""The travel assistant in Pydantic AI."""

import os

from pydantic_ai import Agent, Tool
from scripted_models.pydantic_ai import scripted_model
from trips import INSTRUCTIONS, Trip, book, flights, hotels

from meshpoint.frameworks.pydantic_ai import durable

assistant = Agent(
    os.environ.get("TRAVEL_MODEL") or scripted_model(),
    name="travel",
    instructions=INSTRUCTIONS,
    tools=[Tool(book, requires_approval=True)],
)

travel = durable(
    assistant,
    input=Trip,
    prompt=lambda trip: f"{trip.days} days in {trip.city}",
    peers=[flights, hotels],
)
