"""Agents of Strands.

travel = durable(build_planner, name="travel", input=Trip, prompt=plan, peers=[flights])
"""

from __future__ import annotations

from meshpoint.extras import STRANDS

STRANDS.require("meshpoint.frameworks.strands")

from meshpoint.frameworks.strands.agent import durable, wrap  # noqa: E402

__all__ = ["durable", "wrap"]
