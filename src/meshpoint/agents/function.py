"""An agent as a function that reads like ordinary code, and runs again from the top after each pause."""

from __future__ import annotations

import asyncio
import inspect
import sys
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from meshpoint.agents.journal import Journal, complete_last_entry, read_journal
from meshpoint.agents.planning import build_plan
from meshpoint.agents.replay import Replay
from meshpoint.errors import ConfigurationError, IncompatibleState, InvalidInput, InvalidOutput, NotJson
from meshpoint.model.calls import Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import agent_name
from meshpoint.model.json_values import check_json
from meshpoint.model.outcomes import Outcomes
from meshpoint.model.snapshot import snapshot
from meshpoint.model.subtasks import Migration
from meshpoint.model.typed import DoesNotFit, Typed
from meshpoint.ports.agent import Plan

In = TypeVar("In")
Out = TypeVar("Out")

_KEY = "agent.entrypoint"


def agent(
    name: str,
    *,
    version: str = "1",
    subtasks: Sequence[str] = (),
    type: str = "agent",
    exclusive: bool = False,
    preserve: bool = False,
    migrations: Sequence[Migration] = (),
) -> Callable[[Callable[[TaskExecutionContext, In], Awaitable[Out]]], FunctionAgent[In, Out]]:
    """Make an async function an agent of this name.

        @agent("travel", version="1")
        async def travel(ctx: TaskExecutionContext, trip: Trip) -> Itinerary:
            flight, weather = await ctx.gather(flights(trip), forecast(trip))
            return Itinerary(flight=flight, weather=weather)

    The annotations are the types of input and output. What to know of the function:

    - It runs from the top at each resume, and finished calls return their recorded answers. So between its calls
      it must be deterministic, and what it does there happens once per pause; put work that costs or changes
      a peer call.
    - A pause unwinds it: `finally` blocks and context managers end at each pause. `except Exception` does not see it.
    - It waits for one thing at a time: for several calls there is `ctx.gather`, not `asyncio.gather`. An asyncio task
      that it starts outlives a pause and is started again: let it end before the next call.
    - What a repeated part sets on `ctx`, or counts into its `token_usage`, is not there twice. `ctx.replaying` tells
      whether a part is repeated.
    - Its code may change freely within one version as long as tasks that are under way make the same calls. If not,
      give it a new `version`: replicas of the old one finish the old tasks.

    Args:
        name: the agent's name in the mesh.
        version: of its path through calls, and of its checkpoints.
        subtasks: the names of the `ctx.subtask`s that it expects to run, in order, so that `ctx.progress` knows how
            many are left. Others may run as well.
        type: a word for its operations, for people who list them.
        exclusive: refuse to resume an operation while another one of this agent is active.
        preserve: keep the checkpoints of its operations for ever.
        migrations: functions under `@migrates`, which lead from checkpoints of earlier versions to this one.

    Raises:
        ConfigurationError: the function is not async, or lacks an annotation; two subtasks have one name, or two
            migrations lead from one version; names the function and the fix.
    """
    if not isinstance(name, str):
        raise ConfigurationError("@agent", "it was used without a name", 'write @agent("name")')
    local_names = sys._getframe(1).f_locals

    def decorate(function: Callable[[TaskExecutionContext, In], Awaitable[Out]]) -> FunctionAgent[In, Out]:
        plan = build_plan(name, subtasks, version, migrations, type=type, exclusive=exclusive, preserve=preserve)
        return FunctionAgent(function, name, version=version, plan=plan, local_names=local_names)

    return decorate


class FunctionAgent(Generic[In, Out]):
    """A `DurableAgent` made of one async function; see `agent`."""

    def __init__(
        self,
        function: Callable[[TaskExecutionContext, In], Awaitable[Out]],
        name: str,
        *,
        version: str = "1",
        plan: Plan | None = None,
        local_names: Mapping[str, Any] | None = None,
    ) -> None:
        if not version:
            raise ConfigurationError("agent.version", f"the version of {name!r} is empty", 'write version="1"')
        self.name = str(agent_name(name))
        self.version = version
        self.plan = plan or Plan(version=version)
        self.function = function
        self.__doc__ = function.__doc__
        declared_input, declared_output = _declared_types(function, local_names or {})
        where = f"{function.__module__}.{function.__qualname__}"
        self._input: Typed[In] = Typed(declared_input, f"{where}, input")
        self._output: Typed[Out] = Typed(declared_output, f"{where}, output")

    def __repr__(self) -> str:
        return f"FunctionAgent({self.name!r}, version={self.version!r})"

    @property
    def state_format(self) -> str:
        """Of this name and version: another version takes another path through its calls."""
        return f"{self.name}/function/{self.version}"

    async def start(self, ctx: TaskExecutionContext, request: In | JsonValue) -> Paused | Done[Out]:
        """Begin a task; see `DurableAgent`."""
        received = self._parse_input(request)
        try:
            input_json = check_json(to_jsonable_python(request), "input")
        except NotJson as error:
            raise InvalidInput(f"{self.name}: {error}") from error
        journal = Journal(format=self.state_format, input=input_json, context=snapshot(ctx))
        return await self._run(ctx, journal, received)

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Paused | Done[Out]:
        """Go on with a task; see `DurableAgent`."""
        journal = read_journal(state, self.state_format)
        complete_last_entry(journal, outcomes)
        try:
            received = self._parse_input(journal.input)
        except InvalidInput as error:
            raise IncompatibleState(str(error)) from error
        return await self._run(ctx, journal, received)

    def _parse_input(self, request: object) -> In:
        try:
            return self._input.read(request)
        except DoesNotFit as error:
            raise InvalidInput(f"input of {self.name}: {error}") from error

    async def _run(self, ctx: TaskExecutionContext, journal: Journal, received: In) -> Paused | Done[Out]:
        replay = Replay(self.name, ctx, journal)
        ctx.record_with(replay)
        try:
            output = await self.function(ctx, received)
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as raised:
            paused = replay.finish(raised)
            if paused is None:
                raise
            return paused
        finally:
            replay.close()
        replay.finish(None)
        try:
            return Done(self._output.check(output))
        except DoesNotFit as error:
            raise InvalidOutput(f"output of {self.name}: {error}") from error


def _declared_types(function: Callable[..., Any], local_names: Mapping[str, Any]) -> tuple[Any, Any]:
    """The declared input and output of an agent function.

    `local_names` are those where it is defined: `get_type_hints` by itself finds only the module's.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    if not inspect.iscoroutinefunction(function):
        raise ConfigurationError(_KEY, f"{name} is not an async function", f"write async def {function.__name__}")
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 2 or any(parameter.kind not in _POSITIONAL for parameter in parameters):
        fix = "let it take the context and the request: (ctx: TaskExecutionContext, request: …)"
        raise ConfigurationError(_KEY, f"{name} takes {len(parameters)} parameters", fix)
    try:
        hints = typing.get_type_hints(function, localns=dict(local_names), include_extras=True)
    except NameError as error:
        fix = "define or import it above the function, not only under TYPE_CHECKING"
        raise ConfigurationError(_KEY, f"an annotation of {name} is unknown: {error}", fix) from error
    required = parameters[1].name, "return"
    for missing in (key for key in required if key not in hints):
        missing_part = "its return value" if missing == "return" else repr(missing)
        problem = f"{name} does not annotate {missing_part}"
        raise ConfigurationError(_KEY, problem, "write the type: it is checked for each task")
    return hints[required[0]], hints["return"]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
