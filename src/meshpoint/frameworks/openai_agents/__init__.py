"""Agents of the OpenAI Agents SDK.

travel = durable(planner, input=Trip, prompt=lambda trip: f"Plan {trip.city}", peers=[flights])
"""

from __future__ import annotations

from meshpoint.extras import OPENAI_AGENTS

OPENAI_AGENTS.require("meshpoint.frameworks.openai_agents")

from meshpoint.frameworks.openai_agents.agent import durable, wrap  # noqa: E402

__all__ = ["durable", "wrap"]
