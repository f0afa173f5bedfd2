"""Identify the version of an agent's code by its source, where no `app_version` is set."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from meshpoint.ports.agent import DurableAgent
from meshpoint.subtasks.versions import version_of


def source_version(agents: Iterable[DurableAgent[Any, Any]]) -> str:
    """Return a digest of the modules that define `agents`, the same in every process.

    Modules that they import do not count.
    """
    parts = "\0".join(map(_describe_source, agents))
    digest = blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=6)
    return f"src:{digest.hexdigest()}"


def _describe_source(agent: DurableAgent[Any, Any]) -> str:
    function = getattr(agent, "function", None)  # of a function agent
    code = function if inspect.isfunction(function) else type(agent)
    try:
        text = inspect.getsource(sys.modules[code.__module__])
    except (KeyError, OSError, TypeError):  # typed into a shell, or without its source file
        text = ""
    return "\0".join([agent.state_format, version_of(code), text])
