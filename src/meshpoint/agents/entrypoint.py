"""Load an agent from its entrypoint, `package.module:attribute`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from meshpoint.agents.framework_objects import find_framework, wrap_framework_object
from meshpoint.agents.stateful import StatefulAgent
from meshpoint.agents.versions import AgentVersions
from meshpoint.errors import ConfigurationError
from meshpoint.extras import FRAMEWORKS
from meshpoint.model.error_text import describe_exception
from meshpoint.model.messages import validate_agent_name
from meshpoint.ports.agent import DurableAgent, WrapsLibrary

_KEY = "agent.entrypoint"


def load_agent(entrypoint: str, name: str | None = None) -> DurableAgent[Any, Any]:
    """Import the agent at `entrypoint`, written as `package.module:attribute`.

    The attribute is an agent; a `StatefulAgent` class, which is instantiated without arguments; or
    an agent of another framework, which its adapter wraps.

    Args:
        entrypoint: Where it is.
        name: The name in the mesh of another framework's agent. Default: its own.

    Raises:
        ConfigurationError: The module cannot be imported, or the attribute is missing or not an
            agent. The message says what to write instead.
    """
    module_name, _, attribute = entrypoint.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise ConfigurationError(
            _KEY, f"{entrypoint!r} is not an entrypoint", "write package.module:attribute"
        )
    found = _get_attribute(_import_module(module_name, entrypoint), attribute)
    agent = _to_agent(found, entrypoint, name)
    if isinstance(agent, WrapsLibrary):
        agent.source_module = module_name
    return agent


def load_versions(entrypoints: Sequence[str], name: str | None = None) -> DurableAgent[Any, Any]:
    """Import the versions of one agent. The first takes new tasks.

    Raises:
        ConfigurationError: As for `load_agent`, or they are not versions of one agent.
    """
    versions = [load_agent(entrypoint, name) for entrypoint in entrypoints]
    return versions[0] if len(versions) == 1 else AgentVersions(versions)


def _import_module(name: str, entrypoint: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ConfigurationError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            framework = None if error.name is None else find_framework(error.name)
            fix = (
                f"install what provides {error.name!r} in this environment"
                if framework is None
                else f"run: {framework.install_command}"
            )
            raise ConfigurationError(
                _KEY, f"{entrypoint!r}: {name} imports {error.name!r}", fix
            ) from error
        fix = (
            "correct the name, or make the module importable "
            "(install its package or set PYTHONPATH)"
        )
        raise ConfigurationError(
            _KEY, f"{entrypoint!r}: no module named {error.name!r}", fix
        ) from error
    except Exception as error:
        problem = f"{entrypoint!r}: importing {name} failed with {type(error).__name__}: {error}"
        raise ConfigurationError(
            _KEY, problem, f"make `python -c 'import {name}'` work"
        ) from error


def _get_attribute(module: ModuleType, name: str) -> object:
    if hasattr(module, name):
        found: object = getattr(module, name)
        return found
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    close_matches = difflib.get_close_matches(name, public, n=1)
    close_matches = close_matches or [
        key for key, value in public.items() if isinstance(value, DurableAgent)
    ]
    fix = (
        f"write {module.__name__}:{close_matches[0]}"
        if close_matches
        else "write the name of the agent that the module defines"
    )
    raise ConfigurationError(_KEY, f"module {module.__name__!r} has no {name!r}", fix)


def _to_agent(found: object, entrypoint: str, name: str | None) -> DurableAgent[Any, Any]:
    if isinstance(found, type) and issubclass(found, StatefulAgent):
        found = _instantiate(found, entrypoint)
    if isinstance(found, type):
        raise ConfigurationError(
            _KEY, f"{entrypoint!r} is a class", "name an instance of it that the module creates"
        )
    if not isinstance(found, DurableAgent):
        found = wrap_framework_object(found, name) or found
    if not isinstance(found, DurableAgent):
        problem = f"{entrypoint!r} is not an agent: its type is {type(found).__name__}"
        raise ConfigurationError(_KEY, problem, _suggest_fix(found))
    for method in (found.start, found.resume):
        if not inspect.iscoroutinefunction(method):
            problem = f"{entrypoint!r}: {method.__name__} is not an async method"
            raise ConfigurationError(_KEY, problem, f"write `async def {method.__name__}`")
    validate_agent_name(found.name)
    return found


def _instantiate(kind: type[StatefulAgent[Any, Any, Any]], entrypoint: str) -> object:
    try:
        return kind()
    except TypeError as error:
        problem = f"{entrypoint!r} cannot be instantiated without arguments: {error}"
        raise ConfigurationError(
            _KEY, problem, "complete the class, or name an instance of it"
        ) from error
    except ConfigurationError:
        raise
    except Exception as error:
        problem = f"{entrypoint!r}: its constructor failed with {describe_exception(error)}"
        raise ConfigurationError(
            _KEY, problem, "correct __init__, or name an instance of it"
        ) from error


def _suggest_fix(found: object) -> str:
    if inspect.iscoroutinefunction(found):
        return f'put the decorator @agent("{found.__name__}") on the function'
    missing = [
        name for name in ("name", "state_format", "start", "resume") if not hasattr(found, name)
    ]
    framework = find_framework(type(found).__module__)
    if framework is not None:
        return f"name an agent of {framework.name}, not another object of it"
    known = " or ".join(f"{each.name} (meshpoint[{each.extra}])" for each in FRAMEWORKS)
    return (
        f"name a function decorated with @agent, a StatefulAgent, an agent of {known}, "
        f"or an object with {', '.join(missing)}"
    )
