"""Objects of agent frameworks, wrapped as agents when an entrypoint names them.

A package that adapts a framework declares a function in the entry-point group
`meshpoint.frameworks`. The entry's name is the module of the framework:

    [project.entry-points."meshpoint.frameworks"]
    pydantic_ai = "meshpoint.frameworks.pydantic_ai:wrap"

The function gets the object and the name that the configuration gives to the agent, or `None`:
`wrap(found, name)`. It returns a `DurableAgent`, or `None` if `found` is not an agent of the
framework. It is imported only if a class of the object comes from that module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias

from meshpoint.errors import ConfigurationError
from meshpoint.extras import FRAMEWORKS, Feature
from meshpoint.model.error_text import describe_exception
from meshpoint.ports.agent import DurableAgent

GROUP = "meshpoint.frameworks"
"""The entry-point group of the adapters."""

Wrap: TypeAlias = Callable[[object, str | None], DurableAgent[Any, Any] | None]
"""Wraps an object of a framework, under the name in the mesh."""


def wrap_framework_object(found: object, name: str | None) -> DurableAgent[Any, Any] | None:
    """Wrap `found` if it comes from a framework that has an adapter.

    Args:
        found: Any object.
        name: The agent's name in the mesh. `None` stands for the object's own.

    Raises:
        ConfigurationError: The adapter cannot be imported, or refuses the object.
    """
    for entry in _find_adapters(found):
        agent = _apply(entry, _load(entry), found, name)
        if agent is not None:
            return agent
    return None


def find_framework(module: str) -> Feature | None:
    """The framework that `module` belongs to, among those with an adapter of Meshpoint."""
    return next((each for each in FRAMEWORKS if _is_part_of(module, each.libraries)), None)


def _find_adapters(found: object) -> Iterable[EntryPoint]:
    modules = {each.__module__ for each in type(found).__mro__}
    adapters = entry_points(group=GROUP)
    return [each for each in adapters if any(_is_part_of(it, [each.name]) for it in modules)]


def _is_part_of(module: str, roots: Iterable[str]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)


def _load(entry: EntryPoint) -> Wrap:
    try:
        wrap: Wrap = entry.load()
    except ConfigurationError:
        raise
    except Exception as error:  # anybody may have written the package
        problem = f"the adapter {entry.value!r} cannot be loaded: {describe_exception(error)}"
        fix = "upgrade or remove the package that declares it"
        raise ConfigurationError("agent.entrypoint", problem, fix) from error
    return wrap


def _apply(
    entry: EntryPoint, wrap: Wrap, found: object, name: str | None
) -> DurableAgent[Any, Any] | None:
    try:
        return wrap(found, name)
    except ConfigurationError:
        raise
    except Exception as error:  # a package of anybody, and an object of anybody
        reason = " ".join(describe_exception(error).split())
        problem = f"the adapter {entry.value!r} cannot wrap a {type(found).__name__}: {reason}"
        fix = "correct the object, or wrap it in its module"
        raise ConfigurationError("agent.entrypoint", problem, fix) from error
