"""Agents of Microsoft Agent Framework.

travel = durable(planner, input=Trip, prompt=lambda trip: f"Plan {trip.city}", peers=[flights])
"""

from __future__ import annotations

from meshpoint.extras import AGENT_FRAMEWORK

AGENT_FRAMEWORK.require("meshpoint.frameworks.agent_framework")

from meshpoint.frameworks.agent_framework.agent import durable, wrap  # noqa: E402

__all__ = ["durable", "wrap"]
