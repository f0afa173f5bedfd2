"""Versions of an agent: several in one process, and the name of the version of its source."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from meshpoint.errors import ConfigurationError
from meshpoint.model.calls import Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Outcomes
from meshpoint.ports.agent import DurableAgent, Plan, WrapsLibrary, get_plan, readable_formats
from meshpoint.subtasks.versions import version_of

_Agent = DurableAgent[Any, Any]
_KEY = "agent.entrypoint"


class AgentVersions:
    """Versions of one agent: the first takes new tasks, the others finish what they began.

    Args:
        versions: Agents of the same name that read different state formats.

    Raises:
        ConfigurationError: They have different names, or two read the same format.
    """

    def __init__(self, versions: Sequence[_Agent]) -> None:
        self.versions = tuple(versions)
        self._by_format: dict[str, _Agent] = {}
        names = list(dict.fromkeys(version.name for version in self.versions))
        if len(names) != 1:
            problem = f"its versions are called {' and '.join(map(repr, names))}"
            raise ConfigurationError(_KEY, problem, "list versions of one agent")
        for version in self.versions:
            for state_format in readable_formats(version):
                if state_format in self._by_format:
                    problem = f"two versions of {version.name!r} read {state_format!r}"
                    raise ConfigurationError(_KEY, problem, "give each its own version=")
                self._by_format[state_format] = version

    def __repr__(self) -> str:
        return f"AgentVersions({list(self.versions)!r})"

    @property
    def newest(self) -> _Agent:
        """The version that takes new tasks."""
        return self.versions[0]

    @property
    def name(self) -> str:
        """The name of the agent."""
        return self.newest.name

    @property
    def state_format(self) -> str:
        """The format of the states of new tasks."""
        return self.newest.state_format

    @property
    def readable_formats(self) -> frozenset[str]:
        """The formats that any version reads."""
        return frozenset(self._by_format)

    @property
    def plan(self) -> Plan:
        """The plan of new tasks."""
        return get_plan(self.newest)

    def version_for(self, state_format: str) -> _Agent:
        """Return the version that reads `state_format`; the newest if none does."""
        return self._by_format.get(state_format, self.newest)

    async def start(self, ctx: TaskExecutionContext, request: Any) -> Paused | Done[Any]:
        """Run the first segment of a new task; see `DurableAgent`."""
        return await self.newest.start(ctx, request)

    async def resume(
        self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
    ) -> Paused | Done[Any]:
        """Resume a task in the newest format; see `DurableAgent`."""
        return await self.newest.resume(ctx, state, outcomes)


def code_version(agents: Iterable[DurableAgent[Any, Any]], app_version: str | None) -> str:
    """Return what identifies the code of `agents` when it tries a parked task.

    With `app_version`, code that was corrected under the same one still counts as another version.
    """
    digest = source_version(agents)
    return f"{app_version}+{digest}" if app_version else digest


def source_version(agents: Iterable[DurableAgent[Any, Any]]) -> str:
    """Return a digest of the modules that define `agents`, the same in every process.

    Modules that they import do not count. An agent of another framework also depends on the
    installed version of the framework.
    """
    parts = "\0".join(map(_describe_source, agents))
    digest = blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=6)
    return f"src:{digest.hexdigest()}"


def _describe_source(agent: DurableAgent[Any, Any]) -> str:
    function = getattr(agent, "function", None)  # of a function agent
    code = function if inspect.isfunction(function) else type(agent)
    parts = [agent.state_format, version_of(code), _read_source(code.__module__)]
    if isinstance(agent, WrapsLibrary):
        parts += [agent.library, _read_source(agent.source_module)]
    return "\0".join(parts)


def _read_source(module: str | None) -> str:
    try:
        return "" if module is None else inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # typed into a shell, or without its source file
        return ""
