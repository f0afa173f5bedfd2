"""`durable`: a graph of LangGraph as an agent of the mesh."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import Any, ClassVar, overload

from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels import DeltaChannel
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Interrupt
from pydantic import JsonValue, TypeAdapter
from typing_extensions import TypeVar

from meshpoint.agents.peer import Addressable
from meshpoint.errors import ConfigurationError, PeerFailed
from meshpoint.frameworks.approval import validate_arguments
from meshpoint.frameworks.base import (
    Answer,
    FrameworkAgent,
    MakeLifespan,
    OnPeerFailure,
    is_approved,
    tool_question,
)
from meshpoint.frameworks.budget import Budget
from meshpoint.frameworks.history import History, ToolCall, ToolCallKind, Turn
from meshpoint.frameworks.langgraph.codec import decode, decode_messages, encode, encode_message
from meshpoint.frameworks.langgraph.nodes import RequestCounter, record_nodes
from meshpoint.frameworks.langgraph.saver import (
    MESSAGES,
    Checkpoints,
    TaskSaver,
    current_checkpoints,
)
from meshpoint.frameworks.langgraph.waits import (
    ASKED,
    CHANNEL,
    PEER,
    SPENT,
    RunState,
    peer_result,
    run_state,
)
from meshpoint.frameworks.progress import show_text
from meshpoint.model.calls import Done
from meshpoint.model.context import Context, TaskExecutionContext
from meshpoint.model.outcomes import Failed, encode_outcome
from meshpoint.model.waitable import Waitable
from meshpoint.ports.conversations import Conversations

In = TypeVar("In")
Out = TypeVar("Out", default=Any)

log = logging.getLogger("meshpoint.frameworks")

_LIBRARIES = ("langgraph", "langchain-core")
_VERSION = " with ".join(f"{each} {installed_version(each)}" for each in _LIBRARIES)


class LangGraphAgent(FrameworkAgent[In, Out]):
    """A graph of LangGraph as a `DurableAgent`; see `durable`."""

    framework: ClassVar[str] = "langgraph"
    wait_hint: ClassVar[str] = (
        "a tool cannot wait: list its peers in durable(peers=[…]), so that the model calls them, "
        "or write ask(…) instead of await"
    )

    def __init__(
        self,
        wrapped: CompiledStateGraph[Any, Any, Any, Any],
        *,
        name: str,
        result: Callable[[Any], Out] | None,
        context: Callable[[Context], Any] | None,
        stream: bool,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        key = f"durable({name!r})"
        if wrapped.interrupt_before_nodes or wrapped.interrupt_after_nodes:
            problem = "interrupt_before= and interrupt_after= ask nobody"
            raise ConfigurationError(key, problem, "call interrupt(…) in a node")
        channels = {
            name: channel for each in _graphs(wrapped) for name, channel in each.channels.items()
        }
        deltas = (each for each, channel in channels.items() if isinstance(channel, DeltaChannel))
        if delta := next(deltas, None):
            problem = f"channel {delta!r} is a DeltaChannel, which needs a history of checkpoints"
            raise ConfigurationError(key, problem, "use another channel")
        if options.get("conversations") is not None and MESSAGES not in wrapped.channels:
            fix = f"add a channel {MESSAGES!r}, or leave conversations= out"
            raise ConfigurationError(key, "the graph has no messages to continue", fix)
        self.wrapped, self._result, self._context, self._stream = wrapped, result, context, stream
        self._own_tools = dict(_find_tools(wrapped))
        self._can_offer = CHANNEL in channels
        if (self.tools.known or self.tools.patterns) and not self._can_offer:
            fix = "write create_agent(…, middleware=[MeshpointDurability()])"
            raise ConfigurationError(key, "no agent of the graph offers peers to its model", fix)
        self.tools.check_names(self._own_tools)
        self._graph = record_nodes(wrapped, self.tools, checkpointer=TaskSaver())

    @property
    def library(self) -> str:
        """The installed versions of LangGraph and LangChain."""
        return _VERSION

    async def run(
        self, ctx: TaskExecutionContext, prompt: Any, history: History, answers: Sequence[Answer]
    ) -> Done[Out] | Turn:
        """Run the graph until it ends, or waits; see `FrameworkAgent`."""
        self._check_setting(ctx)
        run = RunState(self.tools.known, self._stream)
        if history.extra:
            checkpoints = self._read_checkpoints(history)
            argument: Any = Command(resume=_resume(history, answers, run))
        else:
            checkpoints = Checkpoints()
            argument = {MESSAGES: [HumanMessage(prompt)]} if isinstance(prompt, str) else prompt
            if earlier := self._read_messages(history):
                argument = {**argument, MESSAGES: [*earlier, *argument.get(MESSAGES, ())]}
        tokens = current_checkpoints.set(checkpoints), run_state.set(run)
        try:
            config: RunnableConfig = {
                "configurable": {"thread_id": ctx.task_id},
                "callbacks": [RequestCounter(ctx)],
            }
            values = await self._run_graph(ctx, argument, config)
            snapshot = await self._graph.aget_state(config)
            if not snapshot.next:
                history.end(lambda: list(map(encode_message, checkpoints.messages())))
                return Done(self._read_result(values))
            waiting = _Waiting(ctx, run, self._own_tools)
            for each in snapshot.interrupts:
                waiting.add(each)
            extra: dict[str, JsonValue] = {
                "interrupts": waiting.interrupts,
                "checkpoints": checkpoints.dump({task.id for task in snapshot.tasks}),
            }
            if run.arguments:
                extra["approved"] = [encode([*each]) for each in run.arguments]
            messages = [encode_message(each) for each in checkpoints.messages()]
            return Turn(messages, waiting.calls, run.tools, extra, waiting.waits)
        finally:
            current_checkpoints.reset(tokens[0])
            run_state.reset(tokens[1])

    def _check_setting(self, ctx: TaskExecutionContext) -> None:
        """Log, once, that the setting `peers` does nothing."""
        directory = ctx._runtime.directory
        if self._can_offer or directory is None or not directory.is_configured:
            return
        self._can_offer = True
        log.warning(
            "agent %s: the setting peers has no effect, because no agent of the graph offers "
            "peers to its model: write create_agent(…, middleware=[MeshpointDurability()])",
            self.name,
        )

    async def _run_graph(
        self, ctx: TaskExecutionContext, argument: Any, config: RunnableConfig
    ) -> Any:
        """Run the graph, and return its values."""
        values: Any = None
        events: Any = self._graph.astream(
            argument,
            config,
            context=None if self._context is None else self._context(ctx),
            stream_mode=["values", "messages"] if self._stream else ["values"],
            durability="exit",
        )
        async for mode, chunk in events:
            if mode == "values":
                values = chunk
                continue
            message, metadata = chunk
            if isinstance(message, AIMessageChunk) and "lc_source" not in metadata:
                await show_text(ctx, message.text)
        return values

    def _read_result(self, values: Any) -> Any:
        if self._result is not None:
            return self._result(values)
        if not (isinstance(values, Mapping) and MESSAGES in values):
            return values
        structured = values.get("structured_response")
        return values[MESSAGES][-1].text if structured is None else structured

    def _read_checkpoints(self, history: History) -> Checkpoints:
        """Read the messages and the checkpoints of the last pause.

        Raises:
            IncompatibleState: These versions cannot read them, or would lose a part.
        """
        messages = self._read_messages(history)
        try:
            return Checkpoints.load(history.extra["checkpoints"], messages)
        except Exception as error:  # of any type, depending on what is stored
            raise self.refuse_history(history, f"cannot read it: {error}") from error

    def _read_messages(self, history: History) -> list[BaseMessage]:
        """Read the messages so far.

        Raises:
            IncompatibleState: As for `_read_checkpoints`.
        """
        try:
            messages = decode_messages(history.messages)
        except Exception as error:
            raise self.refuse_history(history, f"cannot read it: {error}") from error
        self.check_complete(history, lambda: [encode_message(each) for each in messages])
        return messages


class _Waiting:
    """The tool calls and waits for the interrupts of a pause."""

    def __init__(self, ctx: TaskExecutionContext, run: RunState, tools: Mapping[str, Any]) -> None:
        self._ctx, self._run, self._tools = ctx, run, tools
        self.calls: list[ToolCall] = []
        self.waits: dict[str, Waitable[Any]] = {}
        self.interrupts: list[JsonValue] = []

    def add(self, interrupt: Interrupt[Any]) -> None:
        """Add the calls of an interrupt."""
        before = len(self.calls)
        match interrupt.value:
            case {"type": str(kind), "id": call_id, "tool": tool, "arguments": arguments} if (
                kind == PEER
            ):
                peer = self._run.tools[tool].peer.name
                self.calls.append(ToolCall(call_id, tool, ToolCallKind.PEER, arguments, peer))
            case {"type": str(kind), "index": int(index)} if kind == ASKED:
                for wait in self._run.waits[index]:
                    self._wait(interrupt, wait.peer, wait)
            case {"type": str(kind)} if kind == SPENT:
                pass  # `FrameworkAgent` asks a person
            case {"type": "tool_approval" as kind, "name": tool, "args": arguments}:
                self._approve(interrupt, tool, arguments)
            case {"action_requests": requests}:  # all calls of a turn
                kind = "approvals"
                for each in requests:
                    self._approve(interrupt, each["name"], each["args"])
            case value:
                kind = "question"
                prompt = value if isinstance(value, str) else encode_text(value)
                question = self._ctx.wait_for(tool_question(kind), prompt=prompt)
                self._wait(interrupt, kind, question)
        raw: list[JsonValue] = [
            [each.tool, arguments] for each, arguments in self._raw(interrupt, before)
        ]
        self.interrupts.append([interrupt.id, kind, len(self.calls) - before, raw])

    def _raw(self, interrupt: Interrupt[Any], before: int) -> Iterator[tuple[ToolCall, JsonValue]]:
        """The approvals among the new calls, with the arguments as the model has written them."""
        match interrupt.value:
            case {"type": "tool_approval", "args": arguments}:
                yield self.calls[before], encode(arguments)
            case {"action_requests": requests}:
                for call, each in zip(self.calls[before:], requests, strict=True):
                    yield call, encode(each["args"])

    def _approve(self, interrupt: Interrupt[Any], tool: str, arguments: Any) -> None:
        call_id = f"{interrupt.id}-{len(self.calls)}"
        schema = getattr(self._tools.get(tool), "tool_call_schema", None)
        shown = validate_arguments(schema, arguments)
        self.calls.append(ToolCall(call_id, tool, ToolCallKind.APPROVAL, shown))

    def _wait(self, interrupt: Interrupt[Any], name: str, wait: Waitable[Any]) -> None:
        call_id = f"{interrupt.id}-{len(self.calls)}"
        self.calls.append(ToolCall(call_id, name, ToolCallKind.WAIT, {}, name))
        self.waits[call_id] = wait


def encode_text(value: Any) -> str:
    """The text of an interrupt's value, for a person."""
    return TypeAdapter(JsonValue).dump_json(encode(value)).decode()


def _resume(history: History, answers: Sequence[Answer], run: RunState) -> dict[str, Any]:
    """The values that the interrupts of the last pause return, by their ids."""
    values: dict[str, Any] = {}
    remaining = iter(answers)
    earlier: Any = history.extra.get("approved", [])
    run.arguments += [(tool, raw, shown) for tool, raw, shown in map(decode, earlier)]
    stored: Any = history.extra["interrupts"]
    for interrupt_id, kind, count, raw in stored:
        own = [next(remaining) for _ in range(count)]
        for answer, (tool, arguments) in zip(own, raw, strict=False):
            if is_approved(answer)[0]:
                run.arguments.append((tool, decode(arguments), answer.call.arguments))
        if kind == PEER:
            run.answered[own[0].call.tool, own[0].call.id] += 1
            values[interrupt_id] = peer_result(own[0])
        elif kind == SPENT:
            values[interrupt_id] = True
        elif kind == ASKED:
            values[interrupt_id] = [encode_outcome(each.outcome).decode() for each in own]
        elif kind == "tool_approval":
            values[interrupt_id] = _decide(own[0])
        elif kind == "approvals":
            values[interrupt_id] = {"decisions": [_decide(each) for each in own]}
        elif isinstance(outcome := own[0].outcome, Failed):
            raise PeerFailed(kind, outcome)
        else:
            values[interrupt_id] = outcome.value
    return values


def _decide(answer: Answer) -> dict[str, str]:
    """The decision for LangChain's middleware."""
    approved, message = is_approved(answer)
    return {"type": "approve"} if approved else {"type": "reject", "message": message}


def _graphs(graph: CompiledStateGraph[Any, Any, Any, Any]) -> list[Any]:
    """A graph and its subgraphs."""
    return [graph, *(each for _, each in graph.get_subgraphs(recurse=True))]


def _find_tools(graph: CompiledStateGraph[Any, Any, Any, Any]) -> Iterator[tuple[str, Any]]:
    """The tools of a graph and its subgraphs, by name."""
    for node in (node for each in _graphs(graph) for node in each.nodes.values()):
        if isinstance(node.bound, ToolNode):
            yield from node.bound.tools_by_name.items()


@overload
def durable(
    graph: CompiledStateGraph[Any, Any, Any, Any],
    /,
    *,
    name: str | None = None,
    version: str = "1",
    output: type[Out] | TypeAdapter[Out] = ...,
    result: Callable[[Any], Out] | None = None,
    peers: Sequence[Addressable[Any, Any] | str] = (),
    context: Callable[[Context], Any] | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    description: str | None = None,
    conversations: Conversations | None = None,
) -> LangGraphAgent[str, Out]: ...
@overload
def durable(
    graph: CompiledStateGraph[Any, Any, Any, Any],
    /,
    *,
    input: type[In] | TypeAdapter[In],
    prompt: Callable[[In], str | Mapping[str, Any]],
    name: str | None = None,
    version: str = "1",
    output: type[Out] | TypeAdapter[Out] = ...,
    result: Callable[[Any], Out] | None = None,
    peers: Sequence[Addressable[Any, Any] | str] = (),
    context: Callable[[Context], Any] | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    description: str | None = None,
    conversations: Conversations | None = None,
) -> LangGraphAgent[In, Out]: ...
def durable(
    graph: CompiledStateGraph[Any, Any, Any, Any],
    /,
    *,
    input: Any = str,
    prompt: Callable[[Any], Any] | None = None,
    name: str | None = None,
    version: str = "1",
    output: Any = Any,
    result: Callable[[Any], Any] | None = None,
    peers: Sequence[Addressable[Any, Any] | str] = (),
    context: Callable[[Context], Any] | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    description: str | None = None,
    conversations: Conversations | None = None,
) -> LangGraphAgent[Any, Any]:
    """Make an agent or a graph of LangGraph an agent of the mesh.

        planner = create_agent(model, tools, middleware=[MeshpointDurability()], name="travel")
        travel = durable(
            planner,
            input=Trip,
            prompt=lambda trip: f"{trip.days} days in {trip.city}",
            output=str,
            peers=[flights, hotels],
        )

    Its model sees the peers as tools. When a turn calls some of them, the task pauses once, until
    all have answered. Each run of a node is a step: after a crash, recorded ones do not run again.
    For agents of `create_agent`, these are the requests to the model, each call of a tool, and the
    hooks of middleware. A tool in `interrupt_on` of `HumanInTheLoopMiddleware` asks the question
    `APPROVAL` first. Any other `interrupt` asks a question whose answer is its result.

    Args:
        graph: The agent or graph, compiled. It stays usable by itself. Meshpoint stores its state,
            in place of a checkpointer.
        input: The type of the requests. Default: a string, which is the prompt.
        prompt: Returns the prompt for a request, or the input of the graph.
        name: The name in the mesh. Default: the graph's own.
        version: The version of the stored state. Change it if the new graph cannot continue the
            tasks of the old one.
        output: The type of the result. Default: JSON.
        result: Returns the result, from the state with which the graph ends. Default: the
            structured response, or else the text of the last message. Without messages, the state.
        peers: The peers that the model may call: agents, `Peer`s, or names and patterns, such as
            "hotel-*", of agents to discover in each turn. The agent needs the middleware
            `MeshpointDurability`.
        context: Returns the runtime context of a segment, given the task's. It is not stored.
        stream: Send the text of models to the task's callers as it is written, and which tools
            run. The models must support streaming.
        on_peer_failure: "tell_model" makes a peer's failure an error of its tool; "fail" makes it
            a failure of the task.
        budget: What a task may use. It is checked before each request to a model.
        lifespan: Returns an async context manager, which each replica enters before its first
            task. What it yields is `ctx.resources`.
        description: What the agent does, for its callers.
        conversations: Where conversations are stored. A task with a `context_id` then begins with
            the messages of earlier ones of its requester and user, but with no other state.
            Default: each task sees only its own.

    Raises:
        ConfigurationError: The graph is not compiled or has no name, no agent in it offers peers,
            or a peer cannot be a tool.
    """
    if not isinstance(graph, CompiledStateGraph):
        problem = f"a {type(graph).__name__} is not a compiled StateGraph"
        raise ConfigurationError("durable", problem, "pass create_agent(…) or builder.compile()")
    chosen = name or graph.name
    if chosen in (None, "LangGraph"):
        raise ConfigurationError("durable", "the agent has no name", 'write name="travel"')
    return LangGraphAgent(
        graph,
        name=chosen,
        version=version,
        input=input,
        prompt=prompt,
        output=output,
        result=result,
        description=description,
        peers=peers,
        context=context,
        stream=stream,
        on_peer_failure=on_peer_failure,
        budget=budget,
        lifespan=lifespan,
        conversations=conversations,
    )


def wrap(found: object, name: str | None) -> LangGraphAgent[str, Any] | None:
    """Wrap a graph that an entrypoint names; see `meshpoint.agents.framework_objects`."""
    return durable(found, name=name) if isinstance(found, CompiledStateGraph) else None
