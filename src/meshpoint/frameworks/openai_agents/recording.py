"""Model requests and tools of the OpenAI Agents SDK as steps, and peers as its tools."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    Handoff,
    Model,
    ModelProvider,
    ModelResponse,
    ModelSettings,
    ModelTracing,
    RunConfig,
    RunContextWrapper,
    Tool,
    ToolOutputFileContent,
    ToolOutputImage,
    ToolOutputText,
    Usage,
    UserError,
)
from agents.function_schema import function_schema
from agents.models import get_default_model_settings
from agents.run import CallModelData, ModelInputData
from agents.tool import (
    maybe_invoke_function_tool_failure_error_function,
    set_function_tool_failure_error_function,
)
from agents.tool_context import ToolContext
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from meshpoint.agents.peer import Peer
from meshpoint.errors import AgentFailed, AgentMisbehaved, InvalidInput, MeshpointError
from meshpoint.frameworks.arguments import refuse_argument_text, refuse_arguments
from meshpoint.frameworks.base import Answer, failure_text
from meshpoint.frameworks.budget import BudgetReached, check_budget, count_request
from meshpoint.frameworks.history import ToolCallKind
from meshpoint.frameworks.openai_agents.context import StoredContext
from meshpoint.frameworks.peers import PeerTool, PeerTools
from meshpoint.frameworks.progress import show_text, show_tool
from meshpoint.frameworks.steps import record_step, recording_context, step_name
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Failed
from meshpoint.model.usage import Tokens

_OUTPUT = "$output"
"""Key that marks a structured output in a recorded result."""
_HANDLES_ERRORS = "__agents_bind_function_tool__"
"""Attribute of the functions of tools that turn errors into results for the model."""
_RESPONSE: TypeAdapter[ModelResponse] = TypeAdapter(ModelResponse)
_OUTPUTS: TypeAdapter[ToolOutputText | ToolOutputImage | ToolOutputFileContent] = TypeAdapter(
    ToolOutputText | ToolOutputImage | ToolOutputFileContent
)

_scope: ContextVar[tuple[str, ...]] = ContextVar("meshpoint_openai_agents_scope", default=())
"""The calls of agents as tools that the running code is part of."""


@dataclass(slots=True)
class Run:
    """What a run of an agent must remember until it pauses or ends.

    Attributes:
        peers: The peers.
        stream: Whether to send the text of the model to the task's callers.
        answers: The outcomes of the calls that the last pause has waited for, by their ids, until
            the run has read them.
        used_ids: The ids of all calls so far.
        offered_to: The agents that may call peers, by their `id`.
        offered: The peers that a model was offered last, by the names of their tools.
        asks: Whether the run stops when the budget is used, to ask a person.
        context: What the run keeps in its context object, if it is stored.
        tools: The agents' own tools, by the `id` of the agent and the name of the tool.
        recorded: Own tools with their recorded copies, by the `id` of the tool.
    """

    peers: PeerTools
    stream: bool
    answers: dict[str, Answer]
    used_ids: set[str]
    offered_to: frozenset[int]
    offered: Mapping[str, PeerTool] = field(default_factory=dict)
    asks: bool = False
    context: StoredContext | None = None
    tools: dict[tuple[int, str], FunctionTool] = field(default_factory=dict)
    recorded: dict[int, tuple[FunctionTool, FunctionTool]] = field(default_factory=dict)
    offering: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def list_tools(self, agent: Agent[Any], own: list[Tool]) -> list[Tool]:
        """The tools of an agent, recorded, and the peers.

        Raises:
            ConfigurationError: A typed peer has the name of another tool.
        """
        tools = [self._record(agent, each) if is_plain(each) else each for each in own]
        if self.asks:
            tools.append(_STOP_TOOL)
        task = recording_context()
        if task is None or id(agent) not in self.offered_to:
            return tools
        names = {each.name for each in own}
        self.peers.check_names(names)
        if waiting := self._answered_peers():
            self.offered = {**self.peers.known, **waiting}
        else:
            async with self.offering:
                self.offered = await self.peers.offer(task, names.__contains__)
        return [*tools, *(_peer_tool(each, self) for each in self.offered.values())]

    def _answered_peers(self) -> dict[str, PeerTool]:
        """The peers whose results the run has yet to read. Some may be gone by now."""
        return {
            call.tool: self.peers.known.get(call.tool)
            or replace(PeerTool.of(Peer(call.peer or call.tool, Any, Any)), name=call.tool)
            for call in (answer.call for answer in self.answers.values())
            if call.kind is ToolCallKind.PEER
        }

    def _record(self, agent: Agent[Any], tool: Any) -> Tool:
        self.tools[id(agent), tool.name] = tool
        if id(tool) not in self.recorded:
            self.recorded[id(tool)] = tool, _recorded_tool(tool, self)
        return self.recorded[id(tool)][1]


current_run: ContextVar[Run | None] = ContextVar("meshpoint_openai_agents_run", default=None)
_asking: ContextVar[Agent[Any]] = ContextVar("meshpoint_openai_agents_asking")
"""The agent that sends the next request to its model."""


def is_plain(tool: object) -> bool:
    """Whether a tool is a function, which can be a step, and not a tool of the provider."""
    return isinstance(tool, FunctionTool)


def walk(agent: Agent[Any], *, into_tools: bool = False) -> Iterator[Agent[Any]]:
    """An agent and its handoffs and, on request, its agents as tools."""
    seen, found = set[int](), [agent]
    while found:
        agent = found.pop()
        if id(agent) in seen:
            continue
        seen.add(id(agent))
        yield agent
        for each in agent.handoffs:
            target = each._agent_ref and each._agent_ref() if isinstance(each, Handoff) else each
            if isinstance(target, Agent):
                found.append(target)
        if into_tools:
            inner = (getattr(each, "_agent_instance", None) for each in agent.tools)
            found += (each for each in inner if isinstance(each, Agent))


def install(agent: Agent[Any]) -> None:
    """Let an agent list recorded tools while it runs in a task. Otherwise nothing changes.

    The SDK keeps the agents of handoffs and tools in closures, so that a copy of them would not
    run.
    """
    if "get_all_tools" in vars(agent):
        return

    async def get_all_tools(context: RunContextWrapper[Any]) -> list[Tool]:
        own = await type(agent).get_all_tools(agent, context)
        run = current_run.get()
        return (
            own if run is None or recording_context() is None else await run.list_tools(agent, own)
        )

    vars(agent)["get_all_tools"] = get_all_tools


async def _continue(context: ToolContext[Any], arguments: str) -> str:
    return ""


STOP = "meshpoint_stop"
"""A tool that the model does not see. A call of it stops the run before a request: the SDK has a
state to continue from only if a tool waits for approval."""
_STOP_TOOL = FunctionTool(
    name=STOP,
    description="",
    params_json_schema={"type": "object", "properties": {}},
    on_invoke_tool=_continue,
    strict_json_schema=False,
    needs_approval=True,
)


def _stop(run: Run) -> ModelResponse:
    """A response that calls `STOP`, in place of the model's."""
    call = ResponseFunctionToolCall(
        type="function_call", name=STOP, arguments="{}", call_id=f"{STOP}-{len(run.used_ids)}"
    )
    response = ModelResponse(output=[call], usage=Usage(), response_id=None)
    _set_ids(response, run.used_ids)
    return response


def without_stops(items: Any) -> Any:
    """The input of a model without calls of `STOP`, and without their results."""
    if not isinstance(items, list):
        return items
    stops = {each["call_id"] for each in items if each.get("name") == STOP}
    return [each for each in items if each.get("call_id") not in stops or not stops]


def _peer_tool(peer: PeerTool, run: Run) -> FunctionTool:
    async def invoke(context: ToolContext[Any], arguments: str) -> str:
        if (answer := run.answers.pop(context.tool_call_id, None)) is None:
            try:  # it did not wait, so the arguments do not fit
                peer.check(read_arguments(arguments))
            except InvalidInput as error:
                return str(error)
            raise AgentMisbehaved(f"the call of {peer.name!r} has not waited for the peer")
        if run.stream and (task := recording_context()) is not None:
            await show_tool(task, peer.name, "answered")
        if isinstance(answer.outcome, Failed):
            return failure_text(answer.outcome)
        value = answer.outcome.value
        return value if isinstance(value, str) else to_json(value).decode()

    return FunctionTool(
        name=peer.name,
        description=peer.description,
        params_json_schema=peer.schema,
        on_invoke_tool=invoke,
        strict_json_schema=False,
        needs_approval=True,  # the SDK's only pause
    )


def read_arguments(arguments: str | None) -> dict[str, Any]:
    """A model's arguments.

    Raises:
        InvalidInput: They are no JSON object. The message is for the model.
    """
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the arguments are no JSON: {error}") from error
    if not isinstance(read, dict):
        raise InvalidInput("the arguments are no JSON object")
    if (problem := refuse_arguments(read)) is not None:
        raise InvalidInput(problem)
    return read


def validate(tool: FunctionTool | None, arguments: str | None) -> dict[str, JsonValue]:
    """The arguments as the tool's function reads them, as JSON.

    Raises:
        InvalidInput, ValidationError: They do not fit.
    """
    read = read_arguments(arguments)
    function = getattr(tool, "__wrapped__", None) if tool is not None else None
    if tool is None or function is None:
        return read
    model = function_schema(function, strict_json_schema=False).params_pydantic_model
    parsed = model.model_validate(read)
    try:
        shown: dict[str, JsonValue] = parsed.model_dump(mode="json", round_trip=True)
        return shown if model.model_validate(shown) == parsed else read
    except Exception:  # the types of a tool may raise any
        return read


def fits(tool: FunctionTool | None, arguments: str | None) -> bool:
    """Whether a tool can read its arguments."""
    try:
        validate(tool, arguments)
    except (InvalidInput, ValidationError, RecursionError):
        return False
    return True


def _recorded_tool(tool: FunctionTool, run: Run) -> FunctionTool:
    """A copy of a tool that runs as a step."""
    recorded, needs_approval = copy.copy(tool), tool.needs_approval
    call_tool = _with_own_errors(tool)

    async def invoke(context: ToolContext[Any], arguments: str) -> Any:
        task, call = recording_context(), context.tool_call_id
        if task is None:
            return await tool.on_invoke_tool(context, arguments)
        if (problem := refuse_argument_text(arguments)) is not None:
            return problem
        if tool._is_agent_tool:  # its own requests and tools are steps
            token = _scope.set((*_scope.get(), call))
            try:
                return await call_tool(context, arguments)
            finally:
                _scope.reset(token)
        if (answer := run.answers.get(call)) is not None:  # what the question has shown
            arguments = to_json(answer.call.arguments).decode()

        has_run = False

        async def run_tool() -> JsonValue:
            nonlocal has_run
            has_run = True
            if run.stream:
                await show_tool(task, tool.name, "called")
            before = None if run.context is None else run.context.dump()
            result = _dump_output(await call_tool(context, arguments))
            if run.stream:
                await show_tool(task, tool.name, "answered")
            if run.context is None or before is None:
                return result
            return {"output": result, "context": run.context.changes_since(before)}

        name = step_name("tool", *_scope.get(), tool.name, call)
        recorded: Any = await record_step(task, name, run_tool)
        if run.context is None:
            return _read_output(recorded)
        if not has_run:
            run.context.repeat(recorded["context"])
        return _read_output(recorded["output"])

    async def must_wait(
        context: RunContextWrapper[Any], arguments: dict[str, Any], call: str
    ) -> bool:
        """Whether a person must approve the call: also if validation changes its arguments."""
        if not callable(needs_approval):
            return needs_approval
        if not fits(tool, json.dumps(arguments)):
            return False
        if validate(tool, json.dumps(arguments)) != arguments:
            return True
        needed = needs_approval(context, arguments, call)
        return bool(await needed if inspect.isawaitable(needed) else needed)

    recorded.on_invoke_tool = invoke
    if callable(needs_approval):
        recorded.needs_approval = must_wait
    return recorded


def _with_own_errors(tool: FunctionTool) -> Callable[[ToolContext[Any], str], Awaitable[Any]]:
    """What runs a tool. Errors of Meshpoint are raised, and not shown to the model."""
    if not hasattr(tool.on_invoke_tool, _HANDLES_ERRORS):
        return tool.on_invoke_tool
    raising = set_function_tool_failure_error_function(copy.copy(tool), None)

    async def call_tool(context: ToolContext[Any], arguments: str) -> Any:
        try:
            return await raising.on_invoke_tool(context, arguments)
        except Exception as error:
            if _must_settle(error):
                raise
            shown = await maybe_invoke_function_tool_failure_error_function(
                function_tool=tool, context=context, error=error
            )
            if shown is None:
                raise
            return shown

    return call_tool


def _must_settle(error: Exception) -> bool:
    """Whether an error settles the task. The agent's next request stops for the budget."""
    if isinstance(error, UserError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of a tool of an agent as a tool
    if isinstance(error, AgentMisbehaved):
        return True
    return isinstance(error, MeshpointError) and not isinstance(error, AgentFailed | BudgetReached)


def _dump_output(output: Any) -> JsonValue:
    """Convert a tool's output to JSON, as the SDK shows it to the model."""
    if (
        isinstance(output, list | tuple)
        and output
        and all(_is_structured(each) for each in output)
    ):
        return [_dump_output(each) for each in output]
    if _is_structured(output):
        return {_OUTPUT: output.model_dump(mode="json", exclude_none=True)}
    try:
        dumped: JsonValue = json.loads(json.dumps(output, allow_nan=False))
    except (TypeError, ValueError):
        return str(output)
    return dumped


def _is_structured(output: object) -> bool:
    return isinstance(output, ToolOutputText | ToolOutputImage | ToolOutputFileContent)


def _read_output(recorded: Any) -> Any:
    if isinstance(recorded, list):
        return [_read_output(each) for each in recorded]
    if isinstance(recorded, dict) and recorded.keys() == {_OUTPUT}:
        return _OUTPUTS.validate_python(recorded[_OUTPUT])
    return recorded


class RecordingModel(Model):
    """Asks the models of all agents of a run, each request as a step."""

    def __init__(self, provider: ModelProvider, model: str | Model | None) -> None:
        self._provider, self._model = provider, model

    def use_in(self, config: RunConfig) -> RunConfig:
        """A copy of `config` with this model, which also learns which agent asks it."""
        changed, own = copy.copy(config), config.call_model_input_filter

        async def keep_agent(data: CallModelData[Any]) -> ModelInputData:
            _asking.set(data.agent)
            filtered = data.model_data if own is None else own(data)
            return await filtered if inspect.isawaitable(filtered) else filtered

        changed.model, changed.call_model_input_filter = self, keep_agent
        return changed

    def _supports_default_prompt_cache_key(self) -> bool:
        model, _ = self._find(_asking.get())
        supports = getattr(model, "_supports_default_prompt_cache_key", None)
        return callable(supports) and bool(supports())

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: Any,
        handoffs: list[Handoff[Any, Any]],
        tracing: ModelTracing,
        **options: Any,
    ) -> ModelResponse:
        """Ask the model of the agent, or return the recorded response."""
        agent, run, task = _asking.get(), current_run.get(), recording_context()
        model, name = self._find(agent)
        settings = self._complete(agent, model_settings)
        request = (
            system_instructions,
            _sort_results(without_stops(input)),
            settings,
            [each for each in tools if each.name != STOP],
            output_schema,
            handoffs,
            tracing,
        )
        if run is None or task is None:
            return await model.get_response(*request, **options)
        scope = _scope.get()
        try:
            check_budget()
        except BudgetReached:
            if scope or not run.asks:  # in a tool, it cannot stop
                raise
            return _stop(run)

        async def ask() -> JsonValue:
            if run.stream and not scope:
                response = await _stream(task, model.stream_response(*request, **options))
            else:
                response = await model.get_response(*request, **options)
            _count(task, name, response.usage, agent.name if scope else "agent")
            _set_ids(response, run.used_ids)
            dumped: JsonValue = _RESPONSE.dump_python(
                response, mode="json", exclude_unset=True, warnings=False
            )
            return dumped

        recorded = await record_step(task, step_name("model", *scope), ask)
        response = _RESPONSE.validate_python(recorded)
        run.used_ids.update(_ids(response.output))
        return response

    def stream_response(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        """Stream from the model of the agent, unrecorded, for agents as tools with `on_stream`."""
        model, _ = self._find(_asking.get())
        return model.stream_response(*arguments, **options)

    def _find(self, agent: Agent[Any]) -> tuple[Model, str]:
        """The model of an agent, and its name."""
        chosen = agent.model if self._model is None else self._model
        model = chosen if isinstance(chosen, Model) else self._provider.get_model(chosen)
        name = getattr(model, "model", chosen)
        return model, str(name) if isinstance(name, str) else "unknown"

    def _complete(self, agent: Agent[Any], settings: ModelSettings) -> ModelSettings:
        """Add the default settings of a model, which the SDK adds for models by name only."""
        chosen = agent.model if self._model is None else self._model
        if isinstance(chosen, Model):
            return settings
        own = get_default_model_settings(*(() if agent.model is None else (agent.model,)))
        if agent.model_settings != own:
            return settings
        return get_default_model_settings(*(() if chosen is None else (chosen,))).resolve(settings)


async def _stream(task: TaskExecutionContext, events: AsyncIterator[Any]) -> ModelResponse:
    """Read a stream, and send its text to the task's callers."""
    final: Response | None = None
    items = []
    async for event in events:
        match event.type:
            case "response.output_text.delta":
                await show_text(task, event.delta)
            case "response.output_item.done":
                items.append(event.item)
            case "response.completed":
                final = event.response
            case "response.failed" | "response.incomplete" | "error" | "response.error":
                raise AgentFailed(f"the model failed: {event.type}: {_stream_error(event)}")
    if final is None:
        raise AgentFailed("the model's stream has ended without a response")
    usage = Usage()
    if final.usage is not None:
        usage = Usage(
            requests=1,
            input_tokens=final.usage.input_tokens,
            output_tokens=final.usage.output_tokens,
            total_tokens=final.usage.total_tokens,
            input_tokens_details=final.usage.input_tokens_details,
            output_tokens_details=final.usage.output_tokens_details,
        )
    return ModelResponse(output=final.output or items, usage=usage, response_id=final.id)


def _stream_error(event: Any) -> str:
    response = getattr(event, "response", event)
    error = getattr(response, "error", None) or getattr(response, "incomplete_details", None)
    return str(getattr(error, "message", error) or getattr(event, "message", ""))


def _count(task: TaskExecutionContext, model: str, usage: Usage, source: str) -> None:
    tokens = Tokens(
        input=usage.input_tokens,
        output=usage.output_tokens,
        cached=usage.input_tokens_details.cached_tokens or 0,
    )
    count_request(task, model, tokens, source=source)


def _ids(items: Iterable[Any]) -> Iterator[str]:
    return (each.call_id for each in items if isinstance(each, ResponseFunctionToolCall))


def _set_ids(response: ModelResponse, used: set[str]) -> None:
    """Give new ids to calls without an id, and to calls that repeat an id, and add all to `used`.

    Models of agents as tools may answer at the same time.
    """
    for index, item in enumerate(response.output):
        if not isinstance(item, ResponseFunctionToolCall):
            continue
        if not item.call_id or item.call_id in used:
            item.call_id = f"{item.call_id or 'call'}-{index}"
            while item.call_id in used:
                item.call_id += "-"
        used.add(item.call_id)


def _sort_results(items: Any) -> Any:
    """Put the results of each turn into call order: the SDK adds those after approvals last."""
    if not isinstance(items, list):
        return items
    ordered, results = list[Any](), list[Any]()
    places = {
        each["call_id"]: place
        for place, each in enumerate(items)
        if isinstance(each, dict) and each.get("type") == "function_call"
    }
    for each in [*items, None]:
        if isinstance(each, dict) and each.get("type") == "function_call_output":
            results.append(each)
            continue
        results.sort(key=lambda result: places.get(result["call_id"], -1))
        ordered += results
        results.clear()
        if each is not None:
            ordered.append(each)
    return ordered
