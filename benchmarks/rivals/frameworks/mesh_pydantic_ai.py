"""The job's agents on Meshpoint, the root in Pydantic AI. `mesh --agents` serves them."""

from __future__ import annotations

from benchmarks.rivals.frameworks.pydantic_ai_agent import make_agent
from benchmarks.rivals.mesh_agents import peer
from meshpoint.frameworks.pydantic_ai import durable

__all__ = ["peer", "root"]

root = durable(make_agent(), input=int, prompt=str, peers=[peer], stream=False)
