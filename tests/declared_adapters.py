"""The adapters that the project declares, also if the environment has an earlier installation."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from meshpoint.agents.framework_objects import GROUP

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def declared_adapters() -> list[EntryPoint]:
    """The entries of the group `meshpoint.frameworks`."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    return [
        EntryPoint(name, value, GROUP) for name, value in project["entry-points"][GROUP].items()
    ]
