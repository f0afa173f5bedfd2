"""Agents of other frameworks that the acceptance tests run in separate processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "frameworks"))

from scenario import FRAMEWORKS, TOOLS, Journey, Trip, load_framework, two_pauses

from meshpoint.frameworks.base import FrameworkAgent


def __getattr__(name: str) -> FrameworkAgent[Trip, str]:
    """The travel agent in the framework called `name`."""
    if name not in FRAMEWORKS:
        raise AttributeError(name)
    return load_framework(name).build(Journey(two_pauses, TOOLS), stream=True)
