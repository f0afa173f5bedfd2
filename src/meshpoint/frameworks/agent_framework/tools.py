"""Calls of tools as steps, also in agents that are tools."""

from __future__ import annotations

import copy
from types import CellType, FunctionType
from typing import Any

from agent_framework import (
    Agent,
    AgentSession,
    Content,
    FunctionInvocationContext,
    FunctionMiddleware,
    FunctionTool,
    MiddlewareException,
    MiddlewareFailure,
    UserInputRequiredException,
    _tools,
)
from agent_framework.exceptions import ToolExecutionException
from pydantic import JsonValue
from pydantic_core import from_json, to_json

from meshpoint.errors import AgentMisbehaved, InvalidInput, MeshpointError, StepFailed
from meshpoint.frameworks.agent_framework.open_tools import OpenTool, arguments_as_json
from meshpoint.frameworks.agent_framework.segment import Next, Segment, dump_session, scope
from meshpoint.frameworks.arguments import refuse_arguments
from meshpoint.frameworks.budget import BudgetReached
from meshpoint.frameworks.history import ToolCall, ToolCallKind
from meshpoint.frameworks.progress import show_tool
from meshpoint.frameworks.steps import METADATA_KEY, record_step, recording_context, step_name
from meshpoint.model.context import TaskExecutionContext

_Misfit: Any = getattr(_tools, "_FunctionArgumentValidationError", ())
"""The error of arguments that do not fit a tool, which did not run."""
_SELF = "self"


class RecordTools(FunctionMiddleware):
    """Records each call of a tool as a step, and leaves calls open that must wait."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    async def process(self, context: FunctionInvocationContext, call_next: Next) -> None:
        """Run a tool, return its recorded result, or leave the call open.

        Raises:
            MiddlewareFailure: The task cannot continue here. The framework would make any other
                error a result for the model.
        """
        task = recording_context()
        if task is None:
            await call_next()
            return
        try:
            await self._call(task, context, call_next)
        except BudgetReached:  # in an agent that is a tool: the next segment repeats the turn
            self._segment.stop_for_budget()
            context.result = ""
        except StepFailed as error:
            if _is_result(error):
                raise
            # For its developer, not for the model.
            raise MiddlewareFailure(str(error)) from error
        except MeshpointError as error:
            raise MiddlewareFailure(str(error)) from error

    async def _call(
        self, task: TaskExecutionContext, context: FunctionInvocationContext, call_next: Next
    ) -> None:
        tool, call, segment = context.function, str(context.metadata["call_id"]), self._segment
        if scope.get():
            await self._run(task, context, tool, call_next)
            return
        if call in segment.settled:
            segment.results[call] = segment.settled[call]
            context.result = _read_result(segment.settled[call])
            return
        if (problem := refuse_arguments(self._segment.arguments(call))) is not None:
            context.result = problem
            segment.results[call] = text_result(problem)
            return
        is_known = call in segment.answers or call in segment.approved
        if segment.stream and not is_known:
            await show_tool(task, tool.name, "called")
        try:
            if call in segment.answers:
                segment.results[call] = segment.answers[call]
                context.result = _read_result(segment.answers[call])
            elif call in segment.approved:
                context.arguments = segment.approved[call]
                own = tool.original if isinstance(tool, OpenTool) else tool
                await self._run(task, context, own, None)
            elif isinstance(tool, OpenTool):
                await self._open(context, tool, call, call_next)
            else:
                await self._run(task, context, tool, call_next)
        finally:
            if segment.stream and call not in segment.waits:
                await show_tool(task, tool.name, "answered")

    async def _open(
        self, context: FunctionInvocationContext, tool: OpenTool, call: str, call_next: Next
    ) -> None:
        """Leave a call open, if its arguments fit."""
        arguments: dict[str, Any]
        if tool.peer is not None:
            arguments, name = dict(context.arguments), tool.peer.peer.name
            try:
                tool.peer.check(arguments)
            except InvalidInput as error:
                context.result = f"invalid arguments: {error}"
                return
            opened = ToolCall(call, tool.name, ToolCallKind.PEER, arguments, name)
        else:
            await call_next()  # checks the arguments
            arguments = arguments_as_json(
                tool, dict(context.arguments), self._segment.arguments(call)
            )
            is_declared = tool.original.declaration_only
            kind = ToolCallKind.QUESTION if is_declared else ToolCallKind.APPROVAL
            opened = ToolCall(call, tool.name, kind, arguments)
        self._segment.waits[call] = opened
        context.result = ""

    async def _run(
        self,
        task: TaskExecutionContext,
        context: FunctionInvocationContext,
        tool: FunctionTool,
        call_next: Next | None,
    ) -> None:
        """Run a tool of the agent. `call_next` is `None` if the call was approved."""
        call = str(context.metadata["call_id"])
        recorded: JsonValue
        try:
            if (agent := _find_agent(tool)) is not None:
                recorded = await self._run_agent(context, tool, agent, call)
            elif (tool.additional_properties or {}).get(METADATA_KEY) is False:
                recorded = _dump_result(await _invoke(context, tool, call_next))
            else:
                recorded = await self._record(task, context, tool, call_next)
        except Exception as error:
            if not scope.get() and _is_result(error):
                self._segment.results[call] = {"error": str(error)}
            raise
        if not scope.get():
            self._segment.results[call] = recorded
        context.result = _read_result(recorded)

    async def _run_agent(
        self, context: FunctionInvocationContext, tool: FunctionTool, agent: Agent[Any], call: str
    ) -> JsonValue:
        """Run an agent that is a tool. Its own requests and tools are steps."""
        recorded = copy.copy(agent)
        recorded.middleware = [*(agent.middleware or ()), *self._segment.middleware]
        token = scope.set((*scope.get(), call))
        try:
            return _dump_result(await _invoke(context, _replace_agent(tool, recorded), None))
        finally:
            scope.reset(token)

    async def _record(
        self,
        task: TaskExecutionContext,
        context: FunctionInvocationContext,
        tool: FunctionTool,
        call_next: Next | None,
    ) -> JsonValue:
        has_run = False

        async def run() -> JsonValue:
            nonlocal has_run
            has_run = True
            before = _dump_state(context.session)
            try:
                result = _dump_result(await _invoke(context, tool, call_next))
                after = _dump_state(context.session)
                changed = {each: after[each] for each in after if after[each] != before.get(each)}
                if not changed:
                    return result
                changed_at = self._segment.changes.add(context.session, changed)
                return {**result, "state": changed, "changed_at": changed_at}
            except MiddlewareFailure as error:
                return {"abort": str(error)}
            except _Misfit:
                return {"misfit": True}

        name = step_name("tool", *scope.get(), tool.name, str(context.metadata["call_id"]))
        recorded: Any = await record_step(task, name, run)
        if "misfit" in recorded:  # the framework has an error of its own for it
            return _dump_result(await _invoke(context, tool, call_next))
        if "state" in recorded and not has_run and context.session is not None:
            state = from_json(to_json(recorded["state"]))
            changed_at = recorded.get("changed_at", 0)
            names = self._segment.changes.repeat(context.session, state, changed_at)
            latest = {"session_id": "", "state": {name: state[name] for name in names}}
            context.session.state.update(AgentSession.from_dict(latest).state)
        return {key: recorded[key] for key in recorded if key not in ("state", "changed_at")}


def _is_result(error: Exception) -> bool:
    """Whether the framework makes the error of a tool a result for the model."""
    if isinstance(error, StepFailed):
        return error.error_type != AgentMisbehaved.__name__
    ends_run = (MeshpointError, MiddlewareException, UserInputRequiredException)
    return not isinstance(error, ends_run) and not isinstance(error, _Misfit)


def _dump_state(session: AgentSession | None) -> dict[str, JsonValue]:
    state: dict[str, JsonValue] = {}
    if session is not None and session.state:
        state = dump_session(session)["state"]
    return state


async def _invoke(
    context: FunctionInvocationContext, tool: FunctionTool, call_next: Next | None
) -> Any:
    if call_next is None:
        return await tool.invoke(arguments=context.arguments, context=context)
    await call_next()
    return context.result


def _dump_result(result: Any) -> dict[str, JsonValue]:
    """Convert a tool's result to JSON."""
    return {"contents": [each.to_dict() for each in FunctionTool.parse_result(result)]}


def text_result(text: str) -> JsonValue:
    """A result that is a text, as JSON."""
    return {"contents": [Content.from_text(text).to_dict()]}


def _read_result(recorded: Any) -> list[Content]:
    if "error" in recorded:
        raise ToolExecutionException(recorded["error"])
    if "abort" in recorded:
        raise MiddlewareFailure(recorded["abort"])
    return [Content.from_dict(each) for each in from_json(to_json(recorded["contents"]))]


def _find_agent(tool: FunctionTool) -> Agent[Any] | None:
    """The agent behind a tool that `Agent.as_tool` has made."""
    function = tool.func
    if not isinstance(function, FunctionType) or _SELF not in function.__code__.co_freevars:
        return None
    if function.__module__ != Agent.as_tool.__module__:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    found = cells[_SELF].cell_contents
    return found if isinstance(found, Agent) else None


def _replace_agent(tool: FunctionTool, agent: Agent[Any]) -> FunctionTool:
    """A copy of a tool of `Agent.as_tool` that runs another agent."""
    function: Any = tool.func
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    replaced = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(CellType(agent) if name == _SELF else cell for name, cell in cells),
    )
    replaced.__kwdefaults__ = function.__kwdefaults__
    replaced.__annotations__ = function.__annotations__
    copied = copy.copy(tool)
    copied.func = replaced
    return copied
