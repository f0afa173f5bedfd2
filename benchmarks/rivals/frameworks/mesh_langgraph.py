"""The job's agents on Meshpoint, the root in LangGraph. `mesh --agents` serves them."""

from __future__ import annotations

from benchmarks.rivals.frameworks.langgraph_agent import make_agent
from benchmarks.rivals.mesh_agents import peer
from meshpoint.frameworks.langgraph import MeshpointDurability, durable

__all__ = ["peer", "root"]

root = durable(
    make_agent(middleware=[MeshpointDurability()]),
    input=int,
    prompt=str,
    output=str,
    peers=[peer],
    stream=False,
)
