"""Agents as plain async functions, replayed from the top after each pause."""

from __future__ import annotations

import asyncio
import inspect
import sys
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from meshpoint.agents.journal import Journal, StoredJournal
from meshpoint.agents.peer import Peer, make_peer
from meshpoint.agents.planning import build_plan
from meshpoint.agents.replay import Replay
from meshpoint.errors import (
    AgentMisbehaved,
    ConfigurationError,
    IncompatibleState,
    InvalidInput,
    InvalidOutput,
    NotJson,
)
from meshpoint.model.calls import Done, Paused
from meshpoint.model.cards import AgentSkill
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.current_context import running_context
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.model.error_text import quantity
from meshpoint.model.json_values import check_json
from meshpoint.model.messages import validate_agent_name
from meshpoint.model.outcomes import Outcomes
from meshpoint.model.snapshot import snapshot
from meshpoint.model.subtasks import Migration
from meshpoint.ports.agent import Plan, ResumeFrom

In = TypeVar("In")
Out = TypeVar("Out")

_BuildReplay: TypeAlias = Callable[[str, TaskExecutionContext, StoredJournal], Replay]

_MISSING: Any = object()
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
    config: Mapping[str, JsonValue] | None = None,
    resume_from: ResumeFrom = "start",
    merge_artifacts: bool = True,
    skills: Sequence[AgentSkill] = (),
) -> Callable[[Callable[[TaskExecutionContext, In], Awaitable[Out]]], FunctionAgent[In, Out]]:
    """Turn an async function into an agent.

        @agent("travel", version="1")
        async def travel(ctx: TaskExecutionContext, trip: Trip) -> Itinerary:
            flight, weather = await ctx.gather(flights(trip), forecast(trip))
            return Itinerary(flight=flight, weather=weather)

    `travel.peer` is its typed `Peer`, for callers. `travel(ctx, trip)` runs the function as part
    of the task of `ctx`.

    The annotations are the types of input and output, and are checked for each task. The function
    must follow these rules:

    - At each resume it runs again from the top, and calls that have finished return their recorded
      answers. The code between calls must therefore be deterministic, and its side effects are
      repeated after each pause. Use `ctx.now()`, `ctx.uuid4()` and `ctx.random()`, and put
      expensive work and changes to other systems into `ctx.step`.
    - A pause unwinds the function with an exception that is not an `Exception`: `finally` blocks
      and context managers end at each pause, and `except Exception` does not catch it.
    - It waits for one thing at a time. For several calls use `ctx.gather`, not `asyncio.gather`.
      An asyncio task that it starts outlives the pause and is started again by the replay: wait
      for it before the next call.
    - Changes that replayed code makes to `ctx` or its `token_usage` are not applied twice.
      `ctx.replaying` is `True` while recorded calls are left.
    - Within one version its code may change freely as long as tasks in progress make the same
      calls, and no new step or subtask comes before a call that they have made. Otherwise change
      `version`: replicas of the old version finish the old tasks.

    Args:
        name: Name of the agent in the mesh.
        version: Version of its path through peer calls, and of its checkpoints.
        subtasks: Names of the `ctx.subtask`s it is expected to run, in order, so that
            `ctx.progress` knows how many are left. It may run others as well.
        type: Type of its operations, shown in listings.
        exclusive: Refuse to resume an operation while another operation of this agent is active.
        preserve: Never delete the checkpoints of its operations.
        migrations: Functions decorated with `@migrates` that convert checkpoints of earlier
            versions to this one.
        config: Configuration of the agent, such as {"model": "small", "temperature": 0.2}. Each
            checkpoint of an operation stores it, without secrets, in its `agent_config`.
        resume_from: Where a failed or cancelled operation resumes: at its "start", where it skips
            recorded subtasks, or at its "last-pause", where it reuses steps and results too.
        merge_artifacts: Add the artifacts of its peers' results to its own outcome.
        skills: What it can do, for its card: peers that discover it also get its docstring and the
            schemas of its types.

    Raises:
        ConfigurationError: The function is not async or lacks an annotation, two subtasks have the
            same name, or two migrations start from the same version. The message names the
            function and the fix.
    """
    if not isinstance(name, str):
        raise ConfigurationError("@agent", "is used without a name", 'write @agent("name")')
    local_names = sys._getframe(1).f_locals

    def decorate(
        function: Callable[[TaskExecutionContext, In], Awaitable[Out]],
    ) -> FunctionAgent[In, Out]:
        plan = build_plan(
            name,
            subtasks,
            version,
            migrations,
            type=type,
            exclusive=exclusive,
            preserve=preserve,
            config=config,
            resume_from=resume_from,
        )
        return FunctionAgent(
            function,
            name,
            version=version,
            plan=plan,
            local_names=local_names,
            merge_artifacts=merge_artifacts,
            skills=skills,
        )

    return decorate


class FunctionAgent(Generic[In, Out]):
    """A `DurableAgent` built from one async function; see `agent`."""

    merge_artifacts: ClassVar[bool] = False
    """The engine adds no artifacts of peers: a replay adds them for the calls that it reaches."""

    def __init__(
        self,
        function: Callable[[TaskExecutionContext, In], Awaitable[Out]],
        name: str,
        *,
        version: str = "1",
        plan: Plan | None = None,
        local_names: Mapping[str, Any] | None = None,
        merge_artifacts: bool = True,
        skills: Sequence[AgentSkill] = (),
    ) -> None:
        if not version:
            raise ConfigurationError(
                "agent.version", f"the version of {name!r} is empty", 'write version="1"'
            )
        self.name = str(validate_agent_name(name))
        self.version = version
        # The format of the journal: each version has its own path through peer calls.
        self.state_format = f"{self.name}/function/{version}"
        self.plan = plan or Plan(version=version)
        self.skills = tuple(skills)
        self.function, self._merge_artifacts = function, merge_artifacts
        self._build_replay: _BuildReplay = Replay
        self.__doc__ = function.__doc__
        declared_input, declared_output = _declared_types(function, local_names or {})
        where = f"{function.__module__}.{function.__qualname__}"
        self._input: DeclaredType[In] = DeclaredType(declared_input, f"{where}, input")
        self._output: DeclaredType[Out] = DeclaredType(declared_output, f"{where}, output")

    def __repr__(self) -> str:
        return f"FunctionAgent({self.name!r}, version={self.version!r})"

    @property
    def peer(self) -> Peer[In, Out]:
        """This agent as a typed `Peer`, for its callers."""
        return make_peer(self.name, self._input, self._output, inspect.getdoc(self.function))

    if TYPE_CHECKING:

        def __call__(
            self, ctx: TaskExecutionContext, request: In, /
        ) -> Coroutine[Any, Any, Out]: ...

    else:

        def __call__(self, ctx, request=_MISSING, /):
            """Run the function here, as part of the task of `ctx`: `await flights(ctx, trip)`.

            Its peer calls, steps and subtasks belong to that task, and its input is not checked.
            `flights.peer(trip)` calls the agent as a separate task.

            Raises:
                AgentMisbehaved: The context is missing.
            """
            if request is _MISSING:
                name = self.function.__name__
                raise AgentMisbehaved(
                    f"{name} is an agent: {name}.peer(t) calls it, {name}(ctx, t) runs it here"
                )
            return self._run_here(ctx, request)

    async def _run_here(self, ctx: TaskExecutionContext, request: In) -> Out:
        if running_context.get() is ctx:
            return await self.function(ctx, request)
        token = running_context.set(ctx)
        try:
            return await self.function(ctx, request)
        finally:
            running_context.reset(token)

    async def start(
        self, ctx: TaskExecutionContext, request: In | JsonValue
    ) -> Paused | Done[Out]:
        """Run the function for a new request; see `DurableAgent`."""
        received = self._parse_input(request)
        try:
            input_json = check_json(to_jsonable_python(request), "input")
        except NotJson as error:
            raise InvalidInput(f"{self.name}: {error}") from error
        journal = Journal(format=self.state_format, input=input_json, context=snapshot(ctx))
        return await self._run(ctx, StoredJournal(journal), received)

    async def resume(
        self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
    ) -> Paused | Done[Out]:
        """Run the function again, with the outcomes of its last pause; see `DurableAgent`."""
        return await self.resume_with_log(ctx, state, (), outcomes)

    async def resume_with_log(
        self, ctx: TaskExecutionContext, state: bytes, log: Sequence[bytes], outcomes: Outcomes
    ) -> Paused | Done[Out]:
        """Run the function again, with the pauses in `log`; see `ReadsLog`."""
        stored = StoredJournal.read(state, log, self.state_format, outcomes)
        try:
            received = self._parse_input(stored.journal.input)
        except InvalidInput as error:
            raise IncompatibleState(str(error)) from error
        return await self._run(ctx, stored, received)

    def check_input(self, request: object) -> None:
        """Check that `request` fits the annotated input; see `ChecksInput`."""
        self._parse_input(request)

    def _parse_input(self, request: object) -> In:
        try:
            return self._input.read(request)
        except TypeMismatch as error:
            raise InvalidInput(f"input of {self.name}: {error}") from error

    async def _run(
        self, ctx: TaskExecutionContext, journal: StoredJournal, received: In
    ) -> Paused | Done[Out]:
        replay = self._build_replay(self.name, ctx, journal)
        ctx._runtime.recorder = replay
        # A replica has set it already.
        token = None if running_context.get() is ctx else running_context.set(ctx)
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
            if token is not None:
                running_context.reset(token)
            replay.close()
        replay.finish(None)
        artifacts = replay.peer_artifacts if self._merge_artifacts else []
        if artifacts:
            produced = ctx.produced_artifacts.to_plain()
            artifacts = [each for each in artifacts if each not in produced]
        try:
            return Done(self._output.check(output), tuple(artifacts))
        except TypeMismatch as error:
            raise InvalidOutput(f"output of {self.name}: {error}") from error


def _declared_types(
    function: Callable[..., Any], local_names: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return the annotated input and output types of an agent function.

    `local_names` are the local variables where the function is defined: `get_type_hints` alone
    resolves names of the module only.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    if not inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            _KEY, f"{name} is not an async function", f"write async def {function.__name__}"
        )
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 2 or any(parameter.kind not in _POSITIONAL for parameter in parameters):
        fix = "declare two, the context and the request: (ctx: TaskExecutionContext, request: …)"
        taken = quantity(len(parameters), "parameter")
        raise ConfigurationError(_KEY, f"{name} takes {taken}", fix)
    try:
        hints = typing.get_type_hints(function, localns=dict(local_names), include_extras=True)
    except NameError as error:
        fix = "define or import it above the function, not only under TYPE_CHECKING"
        raise ConfigurationError(
            _KEY, f"an annotation of {name} is unknown: {error}", fix
        ) from error
    required = parameters[1].name, "return"
    for missing in (key for key in required if key not in hints):
        missing_part = "its return value" if missing == "return" else repr(missing)
        problem = f"{name} does not annotate {missing_part}"
        raise ConfigurationError(_KEY, problem, "add the type, which is checked for each task")
    return hints[required[0]], hints["return"]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
