"""Model requests and tools of Strands as steps, and peers as its tools.

Middleware records the requests to the model and the tools. It is added once to each agent, also
to agents that are tools, and does nothing outside a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from types import AsyncGeneratorType
from typing import Any
from weakref import WeakSet

from pydantic import JsonValue
from pydantic_core import to_jsonable_python
from strands import Agent
from strands.hooks import (
    AfterToolCallEvent,
    AfterToolsEvent,
    BeforeToolCallEvent,
    HookOrder,
)
from strands.interrupt import Interrupt, InterruptException
from strands.middleware.stages import (
    ExecuteToolContext,
    ExecuteToolStage,
    InvokeModelContext,
    InvokeModelStage,
)
from strands.types._events import ModelStreamChunkEvent
from strands.types.agent import Limits
from strands.types.events import ModelStopReason, ToolResultEvent, TypedEvent
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException
from strands.types.session import decode_bytes_values, encode_bytes_values
from strands.types.tools import AgentTool, ToolGenerator, ToolResult, ToolSpec, ToolUse

from meshpoint.errors import AgentFailed, InvalidInput, MeshpointError
from meshpoint.frameworks.arguments import refuse_arguments, storable_arguments
from meshpoint.frameworks.budget import check_budget, count_request
from meshpoint.frameworks.peers import PeerTool, PeerTools
from meshpoint.frameworks.progress import show_text, show_tool
from meshpoint.frameworks.steps import (
    StateChanges,
    record_step,
    recording_context,
    step_name,
)
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.error_text import exception_message, type_name
from meshpoint.model.usage import Tokens

PEER = "meshpoint:peer"
"""Name of the interrupts that wait for peers. Each has the id of its call."""
_HANDLED: dict[str, type[Exception]] = {
    each.__name__: each for each in (ContextWindowOverflowException, ModelThrottledException)
}
"""Errors of a model that Strands handles: it shortens the history, or tries again."""


@dataclass(slots=True)
class Spent:
    """What the agent's own requests to the model have used in the whole task."""

    turns: int = 0
    total_tokens: int = 0
    output_tokens: int = 0

    def check(self, limits: Limits) -> None:
        """Check that another request is allowed.

        Raises:
            AgentFailed: A limit is reached.
        """
        for name, used in asdict(self).items():
            limit: Any = limits.get(name)
            if limit is not None and used >= limit:
                raise AgentFailed(f"the limit of {limit} {name.replace('_', ' ')} is reached")

    def add(self, usage: Mapping[str, Any]) -> None:
        """Count a request."""
        self.turns += 1
        self.total_tokens += usage["totalTokens"]
        self.output_tokens += usage["outputTokens"]


class Recorder:
    """Records one run of an agent.

    Args:
        root: The agent. Agents that are its tools cannot call peers.
        peers: The peers.
        stream: Whether to send the text of the model to the task's callers.
        limits: Limits of the whole task.
        spent: What earlier runs have used.
        used_ids: The ids of the calls so far.

    Attributes:
        offered: The peers that the model was offered last, by the names of their tools.
        nested: The ids of interrupts of agents that are tools.
        answers: The results of calls that the task has waited for, by the ids of the calls.
        approved: The arguments that a person has approved, by the ids of the calls.
        refused: Messages for the model, by the ids of calls that a person has refused.
    """

    def __init__(
        self,
        root: Agent,
        peers: PeerTools,
        *,
        stream: bool,
        limits: Limits,
        spent: Spent,
        used_ids: Iterable[str],
    ) -> None:
        self.root, self.spent = root, spent
        self._peers, self._stream, self._limits = peers, stream, limits
        self._used_ids, self._offering, self._has_offered = set(used_ids), asyncio.Lock(), False
        self._scopes: dict[int, tuple[str, ...]] = {id(root): ()}
        self._error: BaseException | None = None
        self._changes = StateChanges()
        self.offered: Mapping[str, PeerTool] = peers.known
        self.nested: set[str] = set()
        self.answers: dict[str, ToolResult] = {}
        self.approved: dict[str, dict[str, JsonValue]] = {}
        self.refused: dict[str, str] = {}

    @contextmanager
    def use(self) -> Iterator[None]:
        """Record the agents that run in the block."""
        record(self.root)
        token = _recorder.set(self)
        try:
            yield
        finally:
            _recorder.reset(token)
            self._error = None  # its traceback has this recorder

    def keep_decisions(self, stored: Any) -> None:
        """Keep what people have decided before the last pause; see `open_decisions`."""
        self.approved.update(stored.get("approved", {}))
        self.refused.update(stored.get("refused", {}))

    def open_decisions(self) -> dict[str, JsonValue]:
        """The decisions about calls of the latest turn, which may run again after this pause.

        An approved tool may have an interrupt of its own, and then runs again from its start.
        """
        turn = self.root.messages[-1:]
        ids = {call["toolUseId"] for message in turn for call in tool_uses(message)}
        approved: dict[str, JsonValue] = {}
        approved.update((call, self.approved[call]) for call in ids & self.approved.keys())
        refused: dict[str, JsonValue] = {}
        refused.update((call, self.refused[call]) for call in ids & self.refused.keys())
        found = {"approved": approved, "refused": refused}
        return {name: decided for name, decided in found.items() if decided}

    def _scope(self, agent: Any) -> tuple[str, ...]:
        """The ids of the calls that have led to `agent`. Empty for the root."""
        return self._scopes.get(id(agent), (agent.name,))

    async def offer(self, task: TaskExecutionContext) -> None:
        """Find the peers of this turn of the model."""
        own = self.root.tool_registry.get_all_tools_config()
        self._peers.check_names(own)
        async with self._offering:  # tools may run in parallel
            self.offered, self._has_offered = await self._peers.offer(task, own.__contains__), True

    async def find_peer(self, task: TaskExecutionContext, call: ToolUse) -> PeerTool | None:
        """The peer that a call of the root's model names."""
        name = call["name"]
        if name not in self.offered and not self._has_offered:  # an earlier run had offered it
            await self.offer(task)
        return self.offered.get(name)

    async def run_model(
        self, task: TaskExecutionContext, context: InvokeModelContext, call_next: _ModelNext
    ) -> AsyncGenerator[TypedEvent, None]:
        """Ask a model in a step.

        Raises:
            MeshpointError: The task cannot continue here.
        """
        if self._error is not None:  # Strands has swallowed it
            raise self._error
        scope, is_root = self._scope(context.agent), context.agent is self.root
        if is_root:
            check_budget()
            self.spent.check(self._limits)
        events, has_run, asked = list[TypedEvent](), False, context

        async def request() -> JsonValue:
            nonlocal has_run
            has_run = True
            if not is_root:
                check_budget()  # in the step, so that it does not wait for a person
            try:
                async with aclosing(call_next(asked)) as running:
                    async for event in running:
                        events.append(event)
                        if is_root and self._stream and isinstance(event.get("data"), str):
                            await show_text(task, event["data"])
            except (ContextWindowOverflowException, ModelThrottledException) as error:
                events.clear()
                return {"error": type(error).__name__, "message": str(error)}
            return self._dump_response(task, asked, events)

        while True:
            if is_root:
                await self.offer(task)
                specs = [*context.tool_specs, *map(_spec_of, self.offered.values())]
                asked = context.replace(tool_specs=specs)
            with self._keep_cancellation():
                recorded: Any = await record_step(task, step_name("model", *scope), request)
            error = recorded.get("error")
            if error is None:
                break
            if has_run or error != ModelThrottledException.__name__:
                raise _HANDLED[error](recorded["message"])
            # The model was busy in an earlier run: use the next answer, or ask again.
        stop_reason, message, usage, metrics = decode_bytes_values(recorded["stop"])
        if is_root:
            self.spent.add(usage)
        self._used_ids.update(each["toolUseId"] for each in tool_uses(message))
        for event in events or _read_redaction(recorded):
            if not isinstance(event, ModelStopReason):
                yield event
        yield ModelStopReason(stop_reason, message, usage, metrics)

    def _dump_response(
        self, task: TaskExecutionContext, context: InvokeModelContext, events: list[TypedEvent]
    ) -> JsonValue:
        (*_, stop) = (each for each in events if isinstance(each, ModelStopReason))
        usage = stop.usage
        tokens = Tokens(
            input=_input_tokens(usage),
            output=usage["outputTokens"],
            cached=usage.get("cacheReadInputTokens", 0),
        )
        source = "agent" if context.agent is self.root else context.agent.name
        count_request(task, _model_id(context), tokens, source=source)
        self._set_ids(stop.message)
        for each in tool_uses(stop.message):
            each["input"] = storable_arguments(each["input"])
        parts = [stop.stop_reason, stop.message, usage, stop.metrics]
        dumped: dict[str, JsonValue] = {"stop": encode_bytes_values(parts)}
        chunks = [each for each in events if isinstance(each, ModelStreamChunkEvent)]
        redacted = next((it.chunk for it in chunks if "redactContent" in (it.chunk or {})), None)
        if redacted is not None:
            dumped["redacted"] = encode_bytes_values(redacted)
        return dumped

    def _set_ids(self, message: Any) -> None:
        """Give new ids to calls whose ids were used before, in this turn or an earlier one."""
        taken = set(self._used_ids)
        for index, each in enumerate(tool_uses(message)):
            if each["toolUseId"] in taken:
                each["toolUseId"] = f"{each['toolUseId']}-{len(taken)}-{index}"
                while each["toolUseId"] in taken:  # a model may have chosen this one
                    each["toolUseId"] += "-"
            taken.add(each["toolUseId"])

    async def run_tool(
        self, task: TaskExecutionContext, context: ExecuteToolContext, call_next: _ToolNext
    ) -> AsyncGenerator[TypedEvent, None]:
        """Run a tool in a step, return the result of a peer, or wait for a peer."""
        tool, call = context.tool, context.tool_use
        is_root = context.agent is self.root
        answer = self.answers.get(call["toolUseId"]) if is_root else None
        if (problem := refuse_arguments(call["input"])) is not None:
            answer = error_result(call["toolUseId"], problem)
        if self._stream and answer is None:
            await show_tool(task, call["name"], "called")
        if answer is not None:
            yield ToolResultEvent(answer)
        elif isinstance(tool, _Peer):
            yield tool.wait(call)
        else:
            events = self._run_own_tool(task, context, call_next)
            async with aclosing(events):
                async for event in events:
                    yield event
        if self._stream:
            await show_tool(task, call["name"], "answered")

    async def _run_own_tool(
        self, task: TaskExecutionContext, context: ExecuteToolContext, call_next: _ToolNext
    ) -> AsyncGenerator[TypedEvent, None]:
        tool, call = context.tool, context.tool_use
        scope = (*self._scope(context.agent), call["toolUseId"])
        if tool is None or tool.tool_type == "structured_output":  # no code of the agent
            async for event in call_next(context):
                yield event
        elif isinstance(nested := getattr(tool, "agent", None), Agent):
            with self._nest(nested, scope):
                async with aclosing(call_next(context)) as running:
                    async for event in running:
                        pauses = event.get("tool_interrupt_event", {}).get("interrupts", ())
                        self.nested.update(each.id for each in pauses)
                        yield event
        else:
            if context.agent is self.root and call["toolUseId"] in self.approved:
                approved: Any = {**call, "input": self.approved[call["toolUseId"]]}
                context = context.replace(tool_use=approved)
            events, has_run = list[TypedEvent](), False

            async def run() -> JsonValue:
                nonlocal has_run
                has_run = True
                return await _run_tool(context, call_next, events, self._changes)

            name = step_name("tool", *scope[:-1], call["name"], scope[-1])
            try:
                with self._keep_cancellation():
                    recorded: Any = await record_step(task, name, run)
            except AgentFailed:
                raise
            except MeshpointError as error:
                self._error = error
                raise
            if not has_run:
                _repeat_state(context.agent.state, recorded["state"], self._changes)
            if (interrupt := recorded.get("interrupt")) is not None:
                raise InterruptException(Interrupt(**interrupt))
            for event in events:
                yield event
            failed = recorded["error"]
            yield ToolResultEvent(
                decode_bytes_values(recorded["result"]),
                exception=None if failed is None else AgentFailed(failed),
            )

    @contextmanager
    def _keep_cancellation(self) -> Iterator[None]:
        """Keep the cancellation of a step, for example because the run has lost its task.

        Strands ignores the cancellation of a tool unless the whole run is cancelled, and would ask
        the model again.
        """
        try:
            yield
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and not current.cancelling():  # not cancelled by Strands
                self._error = error
            raise

    @contextmanager
    def _nest(self, agent: Agent, scope: tuple[str, ...]) -> Iterator[None]:
        """Record an agent that is a tool. Its own requests and tools are steps."""
        record(agent)
        is_first = id(agent) not in self._scopes  # else it refuses the call: it runs already
        if is_first:
            self._scopes[id(agent)] = scope
        try:
            yield
        finally:
            if is_first:
                del self._scopes[id(agent)]


_ModelNext = Callable[[InvokeModelContext], AsyncGenerator[TypedEvent, None]]
_ToolNext = Callable[[ExecuteToolContext], AsyncGenerator[TypedEvent, None]]

_recorder: ContextVar[Recorder | None] = ContextVar("meshpoint_strands_recorder", default=None)
_recorded: WeakSet[Agent] = WeakSet()
_closing: set[asyncio.Future[None]] = set()


def record(agent: Agent) -> None:
    """Add the middleware to an agent, once. It cannot be removed."""
    if agent in _recorded:
        return
    _recorded.add(agent)
    agent.add_middleware(InvokeModelStage, _invoke_model)
    agent.add_middleware(ExecuteToolStage, _execute_tool)
    agent.add_hook(_select_peer, BeforeToolCallEvent, order=HookOrder.SDK_FIRST)
    agent.add_hook(_explain_refusal, AfterToolCallEvent)
    agent.add_hook(_sort_results, AfterToolsEvent)


async def _invoke_model(
    context: InvokeModelContext, call_next: _ModelNext
) -> AsyncGenerator[TypedEvent, None]:
    recorder, task = _recorder.get(), recording_context()
    if recorder is None or task is None:
        events = call_next(context)
    else:
        events = recorder.run_model(task, context, call_next)
    async with aclosing(events):
        async for event in events:
            yield event


async def _execute_tool(
    context: ExecuteToolContext, call_next: _ToolNext
) -> AsyncGenerator[TypedEvent, None]:
    recorder, task = _recorder.get(), recording_context()
    if recorder is None or task is None:
        events = call_next(context)
    else:
        events = recorder.run_tool(task, context, call_next)
        _close_after(asyncio.current_task(), events)
    async with aclosing(events):
        async for event in events:
            yield event


def _close_after(task: asyncio.Task[Any] | None, events: AsyncGenerator[TypedEvent, None]) -> None:
    """Close the events of a tool when its asyncio task has ended.

    Strands does not, if it cancels the tool between two events. Then an agent that is a tool would
    stay locked, and watch for its cancellation for ever.
    """

    def close(_: object) -> None:
        if isinstance(events, AsyncGeneratorType) and events.ag_frame is not None:
            closing = asyncio.ensure_future(events.aclose())
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)

    if task is not None:
        task.add_done_callback(close)


async def _select_peer(event: BeforeToolCallEvent[Any]) -> None:
    """Give Strands the tool of a peer, which is in no registry."""
    recorder, task = _recorder.get(), recording_context()
    if recorder is None or task is None or event.agent is not recorder.root:
        return
    if event.selected_tool is None:
        peer = await recorder.find_peer(task, event.tool_use)
        is_answered = event.tool_use["toolUseId"] in recorder.answers
        if peer is not None or is_answered:
            event.selected_tool = _Peer(event.tool_use["name"], peer)


def _explain_refusal(event: AfterToolCallEvent[Any]) -> None:
    """Give the model the reason why a person has refused a call."""
    recorder = _recorder.get()
    if recorder is None or event.agent is not recorder.root or event.cancel_message is None:
        return
    message = recorder.refused.get(event.tool_use["toolUseId"])
    if message is not None:
        event.result = error_result(event.tool_use["toolUseId"], message)


def _sort_results(event: AfterToolsEvent) -> None:
    """Put the results of a turn into call order. Strands adds results of resumed calls last."""
    if _recorder.get() is not None and event.agent.messages:
        calls = tool_uses(event.agent.messages[-1])
        places = {call["toolUseId"]: place for place, call in enumerate(calls)}
        results: Any = event.message["content"]
        results.sort(key=lambda each: places.get(each["toolResult"]["toolUseId"], len(places)))


class _Peer(AgentTool):
    """A peer as a tool. `peer` is missing if a call has an answer, but the peer is gone."""

    def __init__(self, name: str, peer: PeerTool | None) -> None:
        super().__init__()
        self._name, self._peer = name, peer

    @property
    def tool_name(self) -> str:
        return self._name

    @property
    def tool_spec(self) -> ToolSpec:
        if self._peer is not None:
            return _spec_of(self._peer)
        return {"name": self._name, "description": self._name, "inputSchema": {"json": {}}}

    @property
    def tool_type(self) -> str:
        return "peer"

    def wait(self, call: ToolUse) -> ToolResultEvent:
        """Check the arguments. An error goes back to the model.

        Raises:
            InterruptException: They fit, so the task must wait.
        """
        assert self._peer is not None
        try:
            if not isinstance(call["input"], dict):
                raise InvalidInput("the arguments are not an object")
            self._peer.check(call["input"])
        except InvalidInput as error:
            return ToolResultEvent(error_result(call["toolUseId"], str(error)))
        raise InterruptException(Interrupt(call["toolUseId"], PEER))

    async def stream(
        self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: Any
    ) -> ToolGenerator:
        raise AssertionError(f"the middleware answers calls of {self._name}")
        yield


def _spec_of(peer: PeerTool) -> ToolSpec:
    return {
        "name": peer.name,
        "description": peer.description,
        "inputSchema": {"json": peer.schema},
    }


def error_result(call: str, message: str) -> ToolResult:
    """The result of a call that has failed."""
    return {"toolUseId": call, "status": "error", "content": [{"text": message}]}


def tool_uses(message: Any) -> list[ToolUse]:
    """The calls of tools in a message."""
    return [block["toolUse"] for block in message["content"] if "toolUse" in block]


async def _run_tool(
    context: ExecuteToolContext,
    call_next: _ToolNext,
    events: list[TypedEvent],
    changes: StateChanges,
) -> JsonValue:
    """Run a tool. What it yields before its result goes to `events`.

    Returns what the tool has done to the agent's state, and its result or what it waits for.
    """
    before, result, interrupt = context.agent.state.get(), None, None
    try:
        async with aclosing(call_next(context)) as running:
            async for event in running:
                if isinstance(event, ToolResultEvent):
                    result = event
                elif "tool_interrupt_event" in event:
                    (interrupt, *_) = event["tool_interrupt_event"]["interrupts"]
                else:
                    events.append(event)
    except InterruptException as raised:
        interrupt = raised.interrupt
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Strands would ask the model without a result of the call
        raise RuntimeError(f"{type_name(error)}: {exception_message(error)}") from error
    after = context.agent.state.get()
    state: dict[str, Any] = {
        "set": {key: value for key, value in after.items() if before.get(key, ...) != value},
        "deleted": [key for key in before if key not in after],
    }
    names = [*state["set"], *state["deleted"]]
    state["changed_at"] = changes.add(context.agent.state, names) if names else 0
    if interrupt is not None:
        dumped: JsonValue = to_jsonable_python(asdict(interrupt), fallback=str)
        return {"state": state, "interrupt": dumped}
    assert result is not None
    failed = None if result.exception is None else str(result.exception)
    return {
        "state": state,
        "result": to_jsonable_python(encode_bytes_values(result.tool_result)),
        "error": failed,
    }


def _repeat_state(state: Any, recorded: Mapping[str, Any], changes: StateChanges) -> None:
    names = [*recorded["set"], *recorded["deleted"]]
    for key in changes.repeat(state, names, recorded.get("changed_at", 0)):
        if key in recorded["set"]:
            state.set(key, recorded["set"][key])
        else:
            state.delete(key)


def _read_redaction(recorded: Mapping[str, Any]) -> list[TypedEvent]:
    """The event with which a guardrail changes the prompt, if any."""
    redacted = recorded.get("redacted")
    return [] if redacted is None else [ModelStreamChunkEvent(chunk=decode_bytes_values(redacted))]


def _input_tokens(usage: Mapping[str, Any]) -> int:
    """The input tokens with cached ones, which some providers report apart."""
    count: int = usage["inputTokens"]
    if count + usage["outputTokens"] == usage["totalTokens"]:
        return count
    cached: int = usage.get("cacheReadInputTokens", 0) + usage.get("cacheWriteInputTokens", 0)
    return count + cached


def _model_id(context: InvokeModelContext) -> str:
    config: Any = context.model.get_config()
    found = config.get("model_id") if isinstance(config, dict) else None
    return str(found or "unknown")
