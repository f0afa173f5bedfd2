"""Agents of Pydantic AI.

    travel = durable(planner, input=Trip, prompt=lambda trip: f"Plan {trip.city}", peers=[flights])

Or, in a function agent, `Agent(..., capabilities=[MeshpointDurability(peers=[flights])])`.
"""

from __future__ import annotations

from meshpoint.extras import PYDANTIC_AI

PYDANTIC_AI.require("meshpoint.frameworks.pydantic_ai")

from meshpoint.frameworks.pydantic_ai.agent import durable, wrap  # noqa: E402
from meshpoint.frameworks.pydantic_ai.durability import MeshpointDurability  # noqa: E402

__all__ = ["MeshpointDurability", "durable", "wrap"]
