"""The contract between Meshpoint and an agent, and how an agent is found from its entrypoint."""

from __future__ import annotations

import difflib
import importlib
import inspect
from types import ModuleType
from typing import Any, Protocol, TypeVar, runtime_checkable

from meshpoint.agents.stateful import StatefulAgent
from meshpoint.errors import ConfigurationError
from meshpoint.model.calls import Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import agent_name
from meshpoint.model.outcomes import Outcomes

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)

_KEY = "agent.entrypoint"


@runtime_checkable
class DurableAgent(Protocol[In_contra, Out_co]):
    """An agent whose tasks can wait in a database and go on in any replica.

    Waiting is a return value: `Paused` hands over the calls and everything the agent wants to know when their
    outcomes are there. Between `start` and `resume` nothing of the task is in memory, and the two may run in
    different replicas, of different releases. One instance serves many tasks at once, so nothing of a task may be
    kept on `self`.

    A segment may run more than once: a replica may die before its result is committed. What a segment does to
    the outside must therefore bear repetition.
    """

    @property
    def name(self) -> str:
        """The agent's name in the mesh, which its peers call."""

    @property
    def state_format(self) -> str:
        """Names the form of `Paused.state`, such as "travel/1": stored beside it and compared before `resume`."""

    async def start(self, ctx: TaskExecutionContext, request: In_contra) -> Paused | Done[Out_co]:
        """Begin a task.

        Args:
            ctx: what is known of the task. What is set on it is kept over a pause.
            request: the input as it came, as JSON. An agent with a declared input validates it here.

        Returns:
            `Done` with an output that `pydantic_core.to_jsonable_python` accepts, or `Paused`.

        Raises:
            InvalidInput: the request does not fit; names the field.
            InvalidOutput: the output does not fit what the agent declares.
            Exception: the task fails, and the requester gets the message.
        """

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Paused | Done[Out_co]:
        """Go on with a task whose join is met.

        A pure function of `state` and `outcomes`: after a crash it runs again with the same ones.

        Args:
            ctx: what `to_checkpoint_dict` kept of the context; the tokens that the peers used are counted in.
            state: `Paused.state`, byte for byte.
            outcomes: exactly one outcome per call, in call order. A call that failed, or that the join closed, is
                a `Failed`; nothing is raised for it.

        Raises:
            IncompatibleState: this release cannot read `state`. The task is offered to other replicas, and after a
                limit parked for a person; it is never destroyed.
        """


@runtime_checkable
class ReadsOlderStates(Protocol):
    """Optional: an agent that resumes states written in other formats than its own."""

    @property
    def readable_formats(self) -> frozenset[str]:
        """Every format that `resume` can read, `state_format` included."""


def readable_formats(agent: DurableAgent[Any, Any]) -> frozenset[str]:
    """The state formats `agent` can resume from: its own, and those it declares."""
    declared = agent.readable_formats if isinstance(agent, ReadsOlderStates) else frozenset[str]()
    return declared | {agent.state_format}


def load_agent(entrypoint: str) -> DurableAgent[Any, Any]:
    """The agent at `entrypoint`, "package.module:attribute": an agent, or a `StatefulAgent` class to instantiate.

    Raises:
        ConfigurationError: there is none; names what is wrong and what to write instead.
    """
    module_name, _, attribute = entrypoint.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise ConfigurationError(_KEY, f"{entrypoint!r} names no agent", "write package.module:attribute")
    found = _attribute(_module(module_name, entrypoint), attribute)
    return _as_agent(found, entrypoint)


def _module(name: str, entrypoint: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ConfigurationError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            fix = f"install what provides {error.name!r} in this environment"
            raise ConfigurationError(_KEY, f"{entrypoint!r}: {name} imports {error.name!r}", fix) from error
        fix = "correct the name, or run where Python finds it (install its package or set PYTHONPATH)"
        raise ConfigurationError(_KEY, f"{entrypoint!r}: there is no module {error.name!r}", fix) from error
    except Exception as error:
        problem = f"{entrypoint!r}: importing {name} failed with {type(error).__name__}: {error}"
        raise ConfigurationError(_KEY, problem, f"make `python -c 'import {name}'` work") from error


def _attribute(module: ModuleType, name: str) -> object:
    if hasattr(module, name):
        found: object = getattr(module, name)
        return found
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    near = difflib.get_close_matches(name, public, n=1)
    near = near or [key for key, value in public.items() if isinstance(value, DurableAgent)]
    fix = f"write {module.__name__}:{near[0]}" if near else "write the name of the agent that the module defines"
    raise ConfigurationError(_KEY, f"module {module.__name__!r} has no {name!r}", fix)


def _as_agent(found: object, entrypoint: str) -> DurableAgent[Any, Any]:
    if isinstance(found, type) and issubclass(found, StatefulAgent):
        found = _instance(found, entrypoint)
    if isinstance(found, type):
        raise ConfigurationError(_KEY, f"{entrypoint!r} is a class", "name an instance of it, made in the module")
    if not isinstance(found, DurableAgent):
        problem = f"{entrypoint!r} is not an agent but of type {type(found).__name__}"
        raise ConfigurationError(_KEY, problem, _how_to_make_one(found))
    for method in (found.start, found.resume):
        if not inspect.iscoroutinefunction(method):
            problem = f"{entrypoint!r}: {method.__name__} is not an async method"
            raise ConfigurationError(_KEY, problem, f"write `async def {method.__name__}`")
    agent_name(found.name)
    return found


def _instance(kind: type[StatefulAgent[Any, Any, Any]], entrypoint: str) -> object:
    try:
        return kind()
    except TypeError as error:
        problem = f"{entrypoint!r} cannot be made without arguments: {error}"
        raise ConfigurationError(_KEY, problem, "complete the class, or name an instance of it") from error


def _how_to_make_one(found: object) -> str:
    if inspect.iscoroutinefunction(found):
        return f'put @agent("{found.__name__}") above the function'
    missing = [name for name in ("name", "state_format", "start", "resume") if not hasattr(found, name)]
    return f"name a function under @agent, a StatefulAgent, or an object that has {', '.join(missing)}"
