"""Peers as a toolset of Pydantic AI, and deferred tool calls as waits of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue
from pydantic_ai.exceptions import CallDeferred, ModelRetry, ToolFailed
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.output import ToolOutput
from pydantic_ai.tools import (
    DeferredToolRequests,
    DeferredToolResults,
    RunContext,
    ToolApproved,
    ToolDefinition,
    ToolDenied,
)
from pydantic_ai.toolsets import ToolsetTool, WrapperToolset
from pydantic_core import SchemaValidator, core_schema, to_jsonable_python

from meshpoint.errors import InvalidInput
from meshpoint.frameworks.base import Answer, failure_text, is_approved
from meshpoint.frameworks.history import ToolCall, ToolCallKind
from meshpoint.frameworks.peers import PeerTool, PeerTools
from meshpoint.frameworks.steps import recording_context
from meshpoint.model.outcomes import Failed

_MAX_RETRIES = 2
"""How often a model may correct its arguments for one peer before the run fails."""
_OUTPUT_TOOL = "final_result"
"""Prefix of the names that Pydantic AI gives to the tools of output types."""
_ANY_OBJECT = SchemaValidator(core_schema.dict_schema(keys_schema=core_schema.str_schema()))


@dataclass(frozen=True, slots=True)
class Validated:
    """The validated arguments of a tool call, and a function that validates them again."""

    arguments: dict[str, Any]
    read: Callable[[Any], Any]

    def as_json(self) -> dict[str, JsonValue] | None:
        """The arguments as JSON, or `None` if reading it back gives others.

        Secrets are masked in JSON, and fields may be left out or have other names.
        """
        try:
            json: dict[str, JsonValue] = to_jsonable_python(self.arguments, round_trip=True)
            return json if bool(self.read(json) == self.arguments) else None
        except Exception:  # the types of a tool may raise any
            return None


@dataclass(slots=True)
class RunState:
    """What a run of an agent must remember until it pauses or ends.

    Attributes:
        validated: The validated arguments of tool calls, by their ids.
        tools: The peers that the model was offered last.
        step: The step of the run in which it was offered them.
        request: The context of the latest request to the model.
    """

    validated: dict[str, Validated] = field(default_factory=dict)
    tools: Mapping[str, PeerTool] = field(default_factory=dict)
    step: int | None = None
    request: RunContext[Any] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


run_state: ContextVar[RunState | None] = ContextVar("meshpoint_pydantic_ai_run", default=None)


@contextmanager
def open_run() -> Iterator[RunState]:
    """A block in which an agent runs."""
    state = RunState()
    token = run_state.set(state)
    try:
        yield state
    finally:
        run_state.reset(token)


@dataclass
class PeerToolset(WrapperToolset[Any]):
    """The tools of an agent, and tools that wait for peers.

    A call of a peer with arguments that do not fit goes back to the model. Others end the run with
    `DeferredToolRequests`, together with the other calls of their turn.
    """

    peers: PeerTools

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        """The tools of this turn of the model.

        Raises:
            ConfigurationError: A typed peer has the name of another tool.
        """
        tools = await super().get_tools(ctx)
        self.peers.check_names(tools)
        peers = {
            name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=name,
                    description=tool.description,
                    parameters_json_schema=tool.schema,
                ),
                max_retries=_MAX_RETRIES,
                args_validator=_ANY_OBJECT,
            )
            for name, tool in (await self._offer(ctx, tools.keys())).items()
        }
        return tools | peers

    async def _offer(
        self, ctx: RunContext[Any], own_tools: Collection[str]
    ) -> Mapping[str, PeerTool]:
        run, task = run_state.get(), recording_context()
        if run is None or task is None:
            return self.peers.known
        async with run.lock:  # Pydantic AI may list the tools of a turn several times
            if run.step != ctx.run_step:
                taken = {*own_tools, *_output_tools(ctx)}

                def is_taken(name: str) -> bool:
                    return name in taken or name.startswith(_OUTPUT_TOOL)

                run.tools, run.step = await self.peers.offer(task, is_taken), ctx.run_step
        return run.tools

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """Defer the call.

        Raises:
            CallDeferred: Always for a peer, if the arguments fit.
            ModelRetry: They do not.
        """
        if not isinstance(tool.toolset, PeerToolset):
            return await super().call_tool(name, tool_args, ctx, tool)
        run = run_state.get()
        tools = self.peers.known if run is None else run.tools
        try:
            tools[name].check(tool_args)
        except InvalidInput as error:
            raise ModelRetry(str(error)) from error
        raise CallDeferred


def _output_tools(ctx: RunContext[Any]) -> set[str | None]:
    """The names that the agent has given to the tools of its outputs."""
    declared: Any = None if ctx.agent is None else ctx.agent.output_type
    outputs = declared if isinstance(declared, list | tuple) else [declared]
    return {each.name for each in outputs if isinstance(each, ToolOutput)}


def find_calls(
    requests: DeferredToolRequests, messages: Sequence[ModelMessage], run: RunState
) -> list[ToolCall]:
    """The deferred calls of the latest turn in `messages`, in call order."""
    response = next(each for each in reversed(messages) if isinstance(each, ModelResponse))
    deferred = {each.tool_call_id for each in (*requests.calls, *requests.approvals)}
    approvals = {each.tool_call_id for each in requests.approvals}
    calls = []
    for call in response.tool_calls:
        if call.tool_call_id not in deferred:
            continue
        tool = run.tools.get(call.tool_name)
        if call.tool_call_id in approvals:
            kind = ToolCallKind.APPROVAL
        else:
            kind = ToolCallKind.QUESTION if tool is None else ToolCallKind.PEER
        validated = run.validated.get(call.tool_call_id)
        arguments = None if validated is None else validated.as_json()
        if arguments is None:
            arguments = call.args_as_dict()
        peer = tool.peer.name if tool is not None and kind is ToolCallKind.PEER else None
        calls.append(ToolCall(call.tool_call_id, call.tool_name, kind, arguments, peer))
    return calls


def deferred_results(answers: Sequence[Answer]) -> DeferredToolResults:
    """The results of the calls that a run has deferred."""
    results = DeferredToolResults()
    for answer in answers:
        call, outcome = answer.call, answer.outcome
        if call.kind is ToolCallKind.APPROVAL:
            approved, message = is_approved(answer)
            results.approvals[call.id] = (
                ToolApproved(override_args=dict(call.arguments))  # what the question has shown
                if approved
                else ToolDenied(message)
            )
        elif isinstance(outcome, Failed):
            results.calls[call.id] = ToolFailed(failure_text(outcome))
        else:
            results.calls[call.id] = outcome.value
    return results
