"""The travel assistant in Google ADK."""

import os

from google.adk.agents import LlmAgent
from google.adk.tools.function_tool import FunctionTool
from scripted_models.google_adk import ScriptedModel
from trips import INSTRUCTIONS, Trip, book, flights, hotels

from meshpoint.frameworks.google_adk import durable

assistant = LlmAgent(
    name="travel",
    model=os.environ.get("TRAVEL_MODEL") or ScriptedModel(model="scripted"),
    instruction=INSTRUCTIONS,
    tools=[FunctionTool(book, require_confirmation=True)],
)

travel = durable(
    assistant,
    input=Trip,
    prompt=lambda trip: f"{trip.days} days in {trip.city}",
    peers=[flights, hotels],
)
