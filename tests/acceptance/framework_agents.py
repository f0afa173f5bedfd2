"""Agents of other frameworks that the acceptance tests run in separate processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "frameworks"))

from scenario import TOOLS, Journey, load_framework, two_pauses

pydantic_ai = load_framework("pydantic_ai").build(Journey(two_pauses, TOOLS), stream=True)
