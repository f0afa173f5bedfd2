"""The nodes of a graph as steps of a task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.errors import GraphBubbleUp
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel
from langgraph.types import interrupt
from pydantic import JsonValue

from meshpoint.frameworks.arguments import refuse_arguments
from meshpoint.frameworks.budget import BudgetReached, check_budget, count_request
from meshpoint.frameworks.langgraph.codec import decode, encode
from meshpoint.frameworks.langgraph.saver import MESSAGES
from meshpoint.frameworks.langgraph.waits import CHANNEL, SPENT, RunState, run_state
from meshpoint.frameworks.peers import PeerTools
from meshpoint.frameworks.progress import show_tool
from meshpoint.frameworks.steps import METADATA_KEY, record_step, recording_context, step_name
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.recorded_work import step_scope
from meshpoint.model.usage import Tokens

_MODEL_NODE = "model"
"""The node in which `create_agent` calls the model."""

_INTERRUPTED: dict[str, JsonValue] = {"$": "interrupted"}
"""The record of a node that waits."""

_outer_nodes: ContextVar[tuple[str, ...]] = ContextVar("meshpoint_langgraph_nodes", default=())


def record_nodes(
    graph: CompiledStateGraph[Any, Any, Any, Any], peers: PeerTools, **changes: Any
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """A copy of `graph` whose nodes are steps, also in subgraphs."""
    offered = peers if CHANNEL in graph.channels else None
    nodes = {name: _wrap(name, node, peers, offered) for name, node in graph.nodes.items()}
    return graph.copy({"nodes": nodes, **changes})


def _wrap(name: str, node: Any, peers: PeerTools, offered: PeerTools | None) -> Any:
    if isinstance(node.bound, CompiledStateGraph):
        inner = record_nodes(node.bound, peers)
        return node.copy({"bound": _Subgraph(name, inner), "subgraphs": [inner]})
    is_skipped = isinstance(node.bound, Pregel) or name.startswith("__")
    if is_skipped or (node.metadata or {}).get(METADATA_KEY) is False:
        return node
    if isinstance(node.bound, ToolNode):
        return node.copy({"bound": _ToolsNode(name, node.bound)})
    if name == _MODEL_NODE:
        return node.copy({"bound": _ModelNode(name, node.bound, offered)})
    return node.copy({"bound": _Node(name, node.bound)})


class _Node(Runnable[Any, Any]):
    """Runs a node as a step, or returns its recorded result."""

    def __init__(self, name: str, bound: Runnable[Any, Any]) -> None:
        self.node, self.bound = name, bound

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the node. Only `ainvoke` records."""
        return self.bound.invoke(input, config, **kwargs)

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        """Run the node, or return its recorded result."""
        task, run = recording_context(), run_state.get()
        if task is None or run is None:
            return await self.bound.ainvoke(input, config, **kwargs)
        return await self.run_in_task(
            task, run, input, config, lambda changed: self.bound.ainvoke(changed, config, **kwargs)
        )

    async def run_in_task(
        self,
        task: TaskExecutionContext,
        run: RunState,
        input: Any,
        config: RunnableConfig | None,
        call: Callable[[Any], Awaitable[Any]],
    ) -> Any:
        """Run the node as a step of `task`."""
        return decode(await _record(task, (self.node, *_index(config)), lambda: call(input)))


class _ModelNode(_Node):
    """Calls the model. With the middleware, it may call peers."""

    def __init__(self, name: str, bound: Runnable[Any, Any], peers: PeerTools | None) -> None:
        super().__init__(name, bound)
        self._peers = peers

    async def run_in_task(
        self,
        task: TaskExecutionContext,
        run: RunState,
        input: Any,
        config: RunnableConfig | None,
        call: Callable[[Any], Awaitable[Any]],
    ) -> Any:
        """Find the peers first, and record which of them the middleware has hidden."""
        try:
            check_budget()
        except BudgetReached:
            interrupt({"type": SPENT})
        if self._peers is not None:
            run.tools = await self._peers.offer(task, lambda name: False)

        async def run_model() -> Any:
            output = await call(input)
            return [output, sorted(run.hidden)]

        output, hidden = decode(await _record(task, (self.node, *_index(config)), run_model))
        run.hidden = set(hidden)
        return output


class _ToolsNode(_Node):
    """Runs tools. A call of a peer is no step: there is nothing to record."""

    def __init__(self, name: str, bound: ToolNode) -> None:
        super().__init__(name, bound)
        self._messages: str = getattr(bound, "_messages_key", MESSAGES)

    async def run_in_task(
        self,
        task: TaskExecutionContext,
        run: RunState,
        input: Any,
        config: RunnableConfig | None,
        call: Callable[[Any], Awaitable[Any]],
    ) -> Any:
        """Run a tool as a step, with the arguments that a person has approved, if any."""
        match input:
            case [{"type": "tool_call", "args": arguments, "id": call_id, "name": tool}] if (
                problem := refuse_arguments(arguments)
            ):
                refused = ToolMessage(problem, name=tool, tool_call_id=call_id, status="error")
                return {self._messages: [refused]}
            case [{"type": "tool_call", "name": tool, "args": arguments, "id": call_id}]:
                input = [{**input[0], "args": run.approved_arguments(tool, arguments)}]
            case _:  # all calls of a message
                return await super().run_in_task(task, run, input, config, call)

        async def run_tool() -> Any:
            if run.stream and not run.is_answered(tool, call_id):
                await show_tool(task, tool, "called")
            output = await call(input)
            if run.stream:
                await show_tool(task, tool, "answered")
            return output

        if run.is_peer(tool, call_id):
            return await run_tool()
        output = decode(await _record(task, ("tool", tool, *_index(config)), run_tool))
        run.close(tool, arguments)
        return output


async def _record(
    task: TaskExecutionContext, name: tuple[str, ...], call: Callable[[], Awaitable[Any]]
) -> JsonValue:
    """Run `call` as a step, or return its recorded result, as JSON.

    If it was interrupted in an earlier run of the segment, it is called again, as it will be when
    the task resumes.
    """
    step, reason = step_name(*_outer_nodes.get(), *name), None

    async def run() -> JsonValue:
        nonlocal reason
        try:
            return encode(await call())
        except GraphBubbleUp as raised:
            reason = raised
            return dict(_INTERRUPTED)

    recorded = await record_step(task, step, run)
    if reason is not None:
        raise reason
    if recorded == _INTERRUPTED:
        with step_scope(step):
            return encode(await call())
    return recorded


class _Subgraph(Runnable[Any, Any]):
    """Runs a subgraph, whose nodes are steps."""

    def __init__(self, name: str, bound: CompiledStateGraph[Any, Any, Any, Any]) -> None:
        self.node, self.bound = name, bound

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the subgraph."""
        return self.bound.invoke(input, config, **kwargs)

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        """Run the subgraph. Names of steps begin with the name of its node."""
        token = _outer_nodes.set((*_outer_nodes.get(), self.node, *_index(config)))
        try:
            return await self.bound.ainvoke(input, config, **kwargs)
        finally:
            _outer_nodes.reset(token)


def _index(config: RunnableConfig | None) -> tuple[str, ...]:
    """The position of this run if the graph has sent the node several inputs at once."""
    match ((config or {}).get("metadata") or {}).get("langgraph_path"):
        case ("__pregel_push", int(index), *_):
            return (str(index),)
    return ()


class RequestCounter(BaseCallbackHandler):
    """Counts the requests to models and their tokens, and checks the budget before each."""

    run_inline = True
    raise_error = True

    def __init__(self, task: TaskExecutionContext) -> None:
        self._task = task

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        """Check the budget."""
        check_budget()

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        """Count a request and its tokens."""
        message = getattr(response.generations[0][0], "message", None)
        if not isinstance(message, AIMessage):
            return
        usage: Any = message.usage_metadata or {}
        details = usage.get("input_token_details", {})
        tokens = Tokens(
            input=usage.get("input_tokens", 0),
            output=usage.get("output_tokens", 0),
            cached=details.get("cache_read", 0),
        )
        model = message.response_metadata.get("model_name") or "unknown"
        count_request(self._task, model, tokens)
