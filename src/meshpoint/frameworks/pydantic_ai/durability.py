"""`MeshpointDurability`: model requests and tools as steps, peers as tools."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from operator import is_
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

from pydantic import JsonValue, TypeAdapter
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.capabilities import (
    AbstractCapability,
    WrapModelRequestHandler,
    WrapRunHandler,
)
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    BoundDurableOperation,
    CapabilityOperationId,
    DurabilityEngineSpec,
    DurableOperation,
    DurableOperationBackend,
    DynamicToolsetCallToolParams,
    EventStreamHandlerId,
    ModelCompactMessagesId,
    ModelRequestId,
    ToolsetCallToolId,
    ToolsetCallToolParams,
    ToolsetGetInstructionsId,
    ToolsetGetToolsId,
    ToolsetValidateToolArgumentsId,
    durable_unit_scope,
)
from pydantic_ai.exceptions import ModelAPIError, ModelRetry, UnexpectedModelBehavior
from pydantic_ai.messages import (
    AgentStreamEvent,
    FunctionToolCallEvent,
    FunctionToolResultEvent,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ToolCallPart,
)
from pydantic_ai.models import Model, ModelRequestContext
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, RunContext, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
from pydantic_ai.usage import RequestUsage, RunUsage

from meshpoint.agents.peer import Addressable
from meshpoint.errors import AgentMisbehaved, BudgetExceeded, ConfigurationError, StepFailed
from meshpoint.frameworks.arguments import refuse_arguments
from meshpoint.frameworks.base import OnPeerFailure, ToolWaits, budget_question, read_allowed
from meshpoint.frameworks.budget import (
    Budget,
    BudgetReached,
    check_budget,
    count_request,
    reached_budget,
    use_budget,
)
from meshpoint.frameworks.peers import PeerTools
from meshpoint.frameworks.progress import show_text, show_tool
from meshpoint.frameworks.pydantic_ai.toolset import (
    PeerToolset,
    Validated,
    deferred_results,
    find_calls,
    open_run,
    run_state,
)
from meshpoint.frameworks.steps import METADATA_KEY, record_step, recording_context, step_name
from meshpoint.model.calls import ALL
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import CallRecorder
from meshpoint.model.current_context import running_context
from meshpoint.model.outcomes import Outcome
from meshpoint.model.usage import Tokens
from meshpoint.model.waitable import Waitable, mark_used

ParamsT = TypeVar("ParamsT")
WireT = TypeVar("WireT")
ResultT = TypeVar("ResultT")


@lru_cache
def _adapter(type_: Any) -> TypeAdapter[Any]:
    return TypeAdapter(type_)


class _StepCodec:
    """`JSON_CODEC`, without the warnings of pydantic 2.12.0 about responses that are complete."""

    def dump(self, tp: Any, value: Any) -> Any:
        """Convert the result of an operation to JSON."""
        return _adapter(tp).dump_python(value, mode="json", warnings=False)

    def load(self, tp: Any, payload: Any) -> Any:
        """Convert JSON to the result of an operation."""
        return JSON_CODEC.load(tp, payload)


class MeshpointDurability(BaseDurabilityCapability[Any]):
    """Makes the runs of an agent part of a task.

        scout = Agent("openai:…", capabilities=[MeshpointDurability(peers=[flights])])

        @agent("concierge")
        async def concierge(ctx: Context, question: str) -> str:
            return (await scout.run(question)).output

    Inside a task, model requests and tools are steps, which survive a crash, and a call of a peer
    pauses the task. Calls of one turn are one pause. A function agent runs again from its top
    after each pause, with the recorded steps, so runs with very many turns are faster with
    `durable`. Await one run before the next. Outside a task it changes nothing.

    Args:
        peers: The peers that the model may call, as tools. Names and patterns stand for peers to
            discover.
        stream: Send the text of the model to the task's callers as it is written, and say which
            tools run. The model must support streaming.
        on_peer_failure: Whether a failure of a peer goes to the model, or fails the task.
        models: Model objects other than the agent's own, by names of your choice, for example the
            models of a `ModelFallback`. Models given as strings need not be listed.
        name: Name of the agent in error messages. Default: the agent's own.
        budget: What the task may use, checked before each request of this agent's runs in the
            function. It counts the whole task, with other agents. Agents in tools have none of
            their own.
    """

    engine_spec = DurabilityEngineSpec(
        engine_name="Meshpoint",
        durable_unit_noun="step",
        durable_container_noun="task",
        codec=_StepCodec(),
        toolset_lifecycles={
            "function": "enter-always",
            "mcp": "enter-in-durable-unit",
            "dynamic": "enter-never",
        },
        tool_config_key=METADATA_KEY,
    )

    def __init__(
        self,
        *,
        peers: Sequence[Addressable[Any, Any] | str] = (),
        stream: bool = True,
        on_peer_failure: OnPeerFailure = "tell_model",
        models: Mapping[str, Model] | None = None,
        name: str | None = None,
        budget: Budget | None = None,
    ) -> None:
        if not (budget is None or isinstance(budget, Budget)):
            problem = f"budget is {budget!r}"
            raise ConfigurationError("MeshpointDurability", problem, "write Budget(requests=30)")
        super().__init__(
            event_stream_handler=_forward_events if stream else None, models=models, name=name
        )
        tools, self._budget = PeerTools(peers), budget
        self.waits = ToolWaits(tools, on_peer_failure)
        self._peers: PeerTools | None = tools if peers else None
        self._last_bound: tuple[Sequence[object], AbstractCapability[Any]] | None = None

    def use_peers(self, tools: PeerTools) -> None:
        """Offer the model the peers of `durable`, which may also come from the configuration."""
        self._peers = tools

    def for_agent(self, agent: AbstractAgent[Any, Any]) -> AbstractCapability[Any]:
        """Bind to `agent`, once as long as its parts are the same.

        Pydantic AI asks at the start of each run with this capability, and so after each pause.
        """
        parts = (agent, agent.model, agent.root_capability, *agent.toolsets)
        if self._last_bound is not None:
            known, bound = self._last_bound
            if len(known) == len(parts) and all(map(is_, known, parts)):
                return bound
        self._last_bound = None  # the bound copy must not keep the one before it
        bound = super().for_agent(agent)
        self._last_bound = parts, bound
        return bound

    @property
    def in_durable_context(self) -> bool:
        """Whether the calling code belongs to a task, outside its steps."""
        return recording_context() is not None

    def get_wrapper_toolset(self, toolset: AbstractToolset[Any]) -> AbstractToolset[Any] | None:
        """Record the tools in `toolset`, and add the peers.

        Pydantic AI takes no toolset from a capability that binds to all toolsets.
        """
        wrapped = super().get_wrapper_toolset(toolset)
        return wrapped if self._peers is None else PeerToolset(wrapped or toolset, self._peers)

    def get_durable_operation_backend(self) -> DurableOperationBackend[Any]:
        """Runs each operation as a step."""
        return _StepBackend()

    async def wrap_run(
        self, ctx: RunContext[Any], *, handler: WrapRunHandler
    ) -> AgentRunResult[Any]:
        """Count the runs of a function agent, and check the budget in them."""
        task = recording_context()
        if task is None or (recorder := task._runtime.recorder) is None:
            return await super().wrap_run(ctx, handler=handler)
        _open_runs[recorder] = _open_runs.get(recorder, 0) + 1
        allowed = _allowed.setdefault(recorder, {})
        try:
            with open_run(), use_budget(self._budget, task, allowed.get(id(self), 1)) as budget:
                try:
                    return await super().wrap_run(ctx, handler=handler)
                finally:
                    if budget is not None:
                        allowed[id(self)] = budget.times
        finally:
            _open_runs[recorder] -= 1

    async def wrap_model_request(
        self,
        ctx: RunContext[Any],
        *,
        request_context: ModelRequestContext,
        handler: WrapModelRequestHandler,
    ) -> ModelResponse:
        """Remember the latest request, or count a request that a tool makes."""
        if self.in_durable_context:
            if (run := run_state.get()) is not None:
                run.request = ctx
        elif (task := running_context.get()) is not None:
            return await self._count_request(task, ctx, request_context, handler)
        return await super().wrap_model_request(
            ctx, request_context=request_context, handler=handler
        )

    async def _count_request(
        self,
        task: TaskExecutionContext,
        ctx: RunContext[Any],
        request_context: ModelRequestContext,
        handler: WrapModelRequestHandler,
    ) -> ModelResponse:
        check_budget()
        response = await handler(request_context)
        name = None if ctx.agent is None else ctx.agent.name
        _count_request(task, response, name or "agent")
        if (counted := _counted.get()) is not None:
            counted.incr(RunUsage(requests=1))
            counted.incr(response.usage)
        return response

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[Any], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        """Wait for the calls of a turn, in a function agent.

        Raises:
            AgentMisbehaved: Another run is open.
        """
        task = recording_context()
        if task is None or (recorder := task._runtime.recorder) is None:
            return None
        if _open_runs.get(recorder, 0) > 1:
            raise AgentMisbehaved(
                "two runs of agents wait for peers at the same time: await one before the other"
            )
        run = run_state.get()
        assert run is not None
        calls = self.waits.limit(task, find_calls(requests, ctx.messages, run))
        waits = self.waits.build(task, calls, run.tools)
        for wait in waits:
            mark_used(wait)
        # The model gets outcomes as they were sent, not as the types of the peers read them.
        outcomes = recorder.ask([_Raw(wait) for wait in waits], ALL, from_run=True)
        return deferred_results(self.waits.read_all(calls, outcomes))

    async def after_tool_validate(
        self,
        ctx: RunContext[Any],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
    ) -> dict[str, Any]:
        """Keep the validated arguments, for questions.

        Raises:
            ModelRetry: They have numbers that are not JSON.
        """
        if self.in_durable_context and (problem := refuse_arguments(args)) is not None:
            raise ModelRetry(problem)
        if (run := run_state.get()) is not None and ctx.tool_manager is not None:
            validator = (ctx.tool_manager.tools or {})[call.tool_name].args_validator
            read = partial(validator.validate_python, context=ctx.validation_context)
            run.validated[call.tool_call_id] = Validated(args, read)
        return args


_counted: ContextVar[RunUsage | None] = ContextVar("meshpoint_pydantic_ai_counted", default=None)
"""What agents with the capability have used in the tool that runs."""

_open_runs: WeakKeyDictionary[CallRecorder, int] = WeakKeyDictionary()
_allowed: WeakKeyDictionary[CallRecorder, dict[int, int]] = WeakKeyDictionary()
"""How often the budgets of the agents in a function count, by the ids of their capabilities."""


def _check_budget(task: TaskExecutionContext) -> None:
    """Check the budget. A function agent asks a person here, if it must.

    Raises:
        BudgetExceeded: The task may not send another request.
        BudgetReached: The task must pause first, which `durable` does.
    """
    while True:
        try:
            return check_budget()
        except BudgetReached:
            recorder, found = task._runtime.recorder, reached_budget()
            if recorder is None or found is None:
                raise
        budget, exceeded = found
        wait = budget_question(task, budget.budget, exceeded)
        mark_used(wait)
        (outcome,) = recorder.ask([_Raw(wait)], ALL, from_run=True)
        try:
            budget.raise_limit(read_allowed(exceeded, outcome))
        except BudgetExceeded as error:
            budget.refuse(error)
            raise


class _Raw:
    """A wait whose outcome is not converted."""

    def __init__(self, wait: Waitable[Any]) -> None:
        self.peer, self.input, self.as_call = wait.peer, wait.input, wait.as_call

    def read(self, outcome: Outcome, /) -> Outcome:
        """Return the outcome itself."""
        return outcome


class _StepBackend(DurableOperationBackend[Any]):
    """Runs the operations of an agent as steps of the task."""

    def bind(
        self, operation: DurableOperation[ParamsT, WireT, ResultT]
    ) -> BoundDurableOperation[ParamsT, WireT, ResultT]:
        """Return what runs `operation`."""
        return _Operation(operation)

    def config_for_tool(
        self,
        operation: DurableOperation[ParamsT, WireT, ResultT],
        *,
        tool: object | None,
        tool_name: str,
    ) -> dict[str, Any] | Literal[False]:
        """`False` for a tool that must not be recorded."""
        metadata = None if tool is None else cast(ToolsetTool[Any], tool).tool_def.metadata
        return False if (metadata or {}).get(METADATA_KEY) is False else {}

    def registrations(self) -> Sequence[Callable[..., object]]:
        """None: operations are created when they run."""
        return ()


class _Operation(BoundDurableOperation[ParamsT, WireT, ResultT]):
    """Runs one kind of operation."""

    def __init__(self, operation: DurableOperation[ParamsT, WireT, ResultT]) -> None:
        self._operation = operation

    @property
    def operation(self) -> DurableOperation[ParamsT, WireT, ResultT]:
        return self._operation

    async def __call__(self, params: ParamsT, *, config: object | None = None) -> ResultT:
        operation, task = self._operation, running_context.get()
        assert task is not None
        if isinstance(operation.operation_id, EventStreamHandlerId):  # advisory: not recorded
            return await operation.handler(params)

        async def run() -> JsonValue:
            with durable_unit_scope(), _count_nested(task, params) as counted:
                result = await operation.handler(counted)
            if isinstance(result, ModelResponse):
                _count_request(task, result, "agent")
                _set_ids(result)
            return cast(JsonValue, operation.result_codec.dump(result))

        if isinstance(operation.operation_id, ModelRequestId):
            _check_budget(task)
        try:
            recorded = await record_step(task, _name(operation, params), run)
        except StepFailed as error:
            model_error = _model_error(error, operation.operation_id)
            if model_error is None:
                raise
            raise model_error from error
        return operation.result_codec.load(cast(WireT, recorded))


def _set_ids(response: ModelResponse) -> None:
    """Give new ids to calls without an id, and to calls that repeat the id of another one.

    Otherwise an answer, or the approval of a person, would be for both.
    """
    used = set[str]()
    for index, call in enumerate(response.tool_calls):
        if not call.tool_call_id or call.tool_call_id in used:
            call.tool_call_id = f"{call.tool_call_id or 'call'}-{index}"
            while call.tool_call_id in used:
                call.tool_call_id += "-"
        used.add(call.tool_call_id)


def _name(operation: DurableOperation[Any, Any, Any], params: object) -> str:
    """The name of a step. Tools that run at the same time have different ids."""
    match operation.operation_id:
        case ModelRequestId():
            return "model"
        case ModelCompactMessagesId():
            return "compact messages"
        case CapabilityOperationId(capability_id=capability, operation=name):
            return step_name("capability", capability, name)
        case ToolsetCallToolId():
            kind = "tool"
        case ToolsetValidateToolArgumentsId():
            kind = "validate"
        case ToolsetGetToolsId(toolset_id=toolset):
            return step_name("tools of", toolset)
        case ToolsetGetInstructionsId(toolset_id=toolset):
            return step_name("instructions of", toolset)
        case other:
            return step_name(type(other).__name__)
    called = cast(ToolsetCallToolParams, params)
    return step_name(kind, called.name, called.ctx.tool_call_id or "")


def _model_error(error: StepFailed, operation: object) -> Exception | None:
    """The error of a failed model request, or `None` if it has no counterpart.

    It is rebuilt in the first run as well, so that a fallback to another model is the same in
    every run.
    """
    if isinstance(operation, ModelRequestId | ModelCompactMessagesId):
        if error.error_type in {"ModelAPIError", "ModelHTTPError"}:
            return ModelAPIError(operation.model_name, error.message)
        if error.error_type == "UnexpectedModelBehavior":
            return UnexpectedModelBehavior(error.message)
    return None


def _count_request(task: TaskExecutionContext, response: ModelResponse, source: str) -> None:
    tokens = _read_tokens(response.usage)
    count_request(task, response.model_name or "unknown", tokens, source=source)


def _read_tokens(usage: RequestUsage | RunUsage) -> Tokens:
    return Tokens(
        input=usage.input_tokens, output=usage.output_tokens, cached=usage.cache_read_tokens
    )


@contextmanager
def _count_nested(task: TaskExecutionContext, params: ParamsT) -> Iterator[ParamsT]:
    """Count what the agents in a tool use, if they get its `usage` or have the capability.

    The tool gets a copy of the run's usage, because tools that run at the same time share it.
    """
    if not isinstance(params, ToolsetCallToolParams | DynamicToolsetCallToolParams):
        yield params
        return
    shared, own, counted = params.ctx.usage, copy(params.ctx.usage), RunUsage()
    before, token = copy(own), _counted.set(counted)
    try:
        yield replace(params, ctx=replace(params.ctx, usage=own))
    finally:
        _counted.reset(token)
        used = own - before
        shared.incr(used)
        rest = used - counted
        if rest.requests > 0:  # of agents without the capability: their models are not known
            task.token_usage.record(_read_tokens(rest), model="unknown", source=params.name)
            task.token_usage.requests += rest.requests


async def _forward_events(ctx: RunContext[Any], events: AsyncIterable[AgentStreamEvent]) -> None:
    """Send the text of the model, and which tools run, to the callers of the task."""
    task = running_context.get()
    async for event in events:
        if task is None:
            continue
        match event:
            case PartStartEvent(part=TextPart(content=text)):
                await show_text(task, text)
            case PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
                await show_text(task, text)
            case FunctionToolCallEvent(part=part):
                await show_tool(task, part.tool_name, "called")
            case FunctionToolResultEvent(part=part):
                await show_tool(task, part.tool_name, "answered")
