"""Agents of Google's Agent Development Kit (ADK).

travel = durable(planner, input=Trip, prompt=lambda trip: f"Plan {trip.city}", peers=[flights])
"""

from __future__ import annotations

from meshpoint.extras import GOOGLE_ADK

GOOGLE_ADK.require("meshpoint.frameworks.google_adk")

from meshpoint.frameworks.google_adk.agent import durable, wrap  # noqa: E402

__all__ = ["durable", "wrap"]
