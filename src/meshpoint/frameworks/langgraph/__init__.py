"""Agents and graphs of LangGraph.

    planner = create_agent(model, tools, middleware=[MeshpointDurability()], name="travel")
    travel = durable(planner, input=Trip, prompt=lambda trip: trip.city, peers=[flights])

In the nodes and tools of a graph, `ask(flights(trip))` waits for a peer.
"""

from __future__ import annotations

from meshpoint.extras import LANGGRAPH

LANGGRAPH.require("meshpoint.frameworks.langgraph")

from meshpoint.frameworks.langgraph.agent import durable, wrap  # noqa: E402
from meshpoint.frameworks.langgraph.waits import MeshpointDurability, ask  # noqa: E402

__all__ = ["MeshpointDurability", "ask", "durable", "wrap"]
