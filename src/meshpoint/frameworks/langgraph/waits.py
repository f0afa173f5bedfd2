"""What a graph waits for: peers that its model calls, and `ask` in its nodes and tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, TypeVar, overload

from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    ModelRequest,
    ModelResponse,
    ToolCallRequest,
)
from langchain.agents.middleware.types import PrivateStateAttr
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.types import Command, interrupt
from pydantic_core import to_json

from meshpoint.errors import AgentMisbehaved, InvalidInput
from meshpoint.frameworks.base import Answer, failure_text
from meshpoint.frameworks.peers import PeerTool
from meshpoint.model.outcomes import Failed, decode_outcome
from meshpoint.model.waitable import Waitable, mark_used

T = TypeVar("T")

CHANNEL = "meshpoint_durability"
"""A channel that is never written. It shows that a graph has the middleware."""
PEER, ASKED, SPENT = "meshpoint_peer", "meshpoint_ask", "meshpoint_budget"
"""Types of interrupts."""


@dataclass(slots=True)
class RunState:
    """What a run of a graph must remember until it pauses or ends.

    Attributes:
        tools: The peers of this turn of the model.
        stream: Whether the task's callers see which tools run.
        hidden: The names of peers that the model does not see, because it has a tool of that name.
        answered: The peer calls whose results this run has yet to read, by tool and id. A model
            may use an id again.
        waits: What `ask` waits for.
        arguments: The arguments of approved calls that have no result yet: the tool, the
            arguments before validation, and the approved ones.
    """

    tools: Mapping[str, PeerTool]
    stream: bool = True
    hidden: set[str] = field(default_factory=set)
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: list[tuple[Waitable[Any], ...]] = field(default_factory=list)
    arguments: list[tuple[str, Any, Any]] = field(default_factory=list)

    def is_peer(self, tool: str, call_id: str | None) -> bool:
        """Whether the model calls a peer."""
        return (tool in self.tools and tool not in self.hidden) or self.is_answered(tool, call_id)

    def is_answered(self, tool: str, call_id: str | None) -> bool:
        """Whether this run has the result of a peer call."""
        return self.answered[tool, call_id or ""] > 0

    def approved_arguments(self, tool: str, arguments: Any) -> Any:
        """The arguments that a person has approved, or the same ones."""
        found = (shown for name, raw, shown in self.arguments if (name, raw) == (tool, arguments))
        return next(found, arguments)

    def close(self, tool: str, arguments: Any) -> None:
        """Forget one approval, because the call has a result. It may have paused before that."""
        for index, (name, raw, _) in enumerate(self.arguments):
            if (name, raw) == (tool, arguments):
                del self.arguments[index]
                return


run_state: ContextVar[RunState | None] = ContextVar("meshpoint_langgraph_run", default=None)


class _State(AgentState[Any]):
    meshpoint_durability: NotRequired[Annotated[bool, PrivateStateAttr]]


class MeshpointDurability(AgentMiddleware[Any, Any]):
    """Offers the peers of a task to the model of an agent.

        planner = create_agent(model, tools, middleware=[MeshpointDurability()])
        travel = durable(planner, name="travel", peers=[flights, "hotel-*"])

    `durable` has the peers. Without it, the middleware changes nothing.
    """

    state_schema = _State

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelResponse[Any]],
    ) -> ModelResponse[Any]:
        """Change nothing: `durable` runs a graph with `ainvoke`."""
        return handler(request)

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """Add the peers to the tools of a request. The agent's own tools hide discovered peers."""
        if (run := run_state.get()) is None:
            return await handler(request)
        taken = {each.name for each in request.tools if isinstance(each, BaseTool)}
        if isinstance(output := request.response_format, ToolStrategy):
            taken |= {each.name for each in output.schema_specs}
        run.hidden = taken & run.tools.keys()
        peers = [_as_tool(tool) for name, tool in run.tools.items() if name not in taken]
        return await handler(request.override(tools=[*request.tools, *peers]))

    def wrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]],
    ) -> ToolMessage | Command[Any]:
        """Change nothing, as in `wrap_model_call`."""
        return handler(request)

    async def awrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]],
    ) -> ToolMessage | Command[Any]:
        """Wait for a peer that the model has called."""
        call, run = request.tool_call, run_state.get()
        name, call_id, arguments = call["name"], call["id"] or "", call["args"]
        if run is None or not run.is_peer(name, call_id):
            return await handler(request)
        is_answered = run.is_answered(name, call_id)
        if not is_answered:
            try:
                run.tools[name].check(arguments)
            except InvalidInput as error:
                return ToolMessage(str(error), name=name, tool_call_id=call_id, status="error")
        wait = {"type": PEER, "id": call_id, "tool": name, "arguments": arguments}
        content, is_error = interrupt(wait)
        if is_answered:
            run.answered[name, call_id] -= 1
        status = "error" if is_error else "success"
        return ToolMessage(content, name=name, tool_call_id=call_id, status=status)


def _as_tool(tool: PeerTool) -> BaseTool:
    async def never() -> None:
        raise AssertionError(f"the middleware answers calls of {tool.name}")

    return StructuredTool(
        name=tool.name, description=tool.description, args_schema=tool.schema, coroutine=never
    )


def peer_result(answer: Answer) -> list[Any]:
    """The content of a tool's message for an answer, and whether it is an error."""
    outcome = answer.outcome
    if isinstance(outcome, Failed):
        return [failure_text(outcome), True]
    value = outcome.value
    return [value if isinstance(value, str) else to_json(value).decode(), False]


@overload
def ask(call: Waitable[T], /) -> T: ...
@overload
def ask(
    first: Waitable[Any], second: Waitable[Any], /, *more: Waitable[Any]
) -> tuple[Any, ...]: ...
def ask(*calls: Waitable[Any]) -> Any:
    """Wait for peers or people, in a node or a tool of a graph.

        quote = ask(flights(trip))
        quote, room = ask(flights(trip), hotels(trip))

    The task pauses until all have answered. Then the node or tool runs again from its start, and
    `ask` returns the results: do paid work in an earlier node.

    Raises:
        PeerFailed: A call has no result.
        AgentMisbehaved: The graph was not wrapped by `durable`.
    """
    for call in calls:
        mark_used(call)
    if (run := run_state.get()) is None:
        raise AgentMisbehaved("ask works in a graph that durable(graph, …) runs as a task")
    run.waits.append(calls)
    outcomes = interrupt({"type": ASKED, "index": len(run.waits) - 1})
    results = [_read(call, outcome) for call, outcome in zip(calls, outcomes, strict=True)]
    return results[0] if len(results) == 1 else tuple(results)


def _read(call: Waitable[Any], encoded: str) -> Any:
    outcome = call.read(decode_outcome(encoded.encode()))
    if isinstance(outcome, Failed):
        raise call._error(outcome)
    return outcome.value
