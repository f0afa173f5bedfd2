"""Peers as a toolset of Pydantic AI, and deferred tool calls as waits of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue
from pydantic_ai.exceptions import CallDeferred, ModelRetry, ToolFailed
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.tools import (
    DeferredToolRequests,
    DeferredToolResults,
    RunContext,
    ToolApproved,
    ToolDefinition,
    ToolDenied,
)
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
from pydantic_core import SchemaValidator, core_schema, to_jsonable_python

from meshpoint.errors import InvalidInput
from meshpoint.frameworks.base import Answer, failure_text, is_approved
from meshpoint.frameworks.history import ToolCall, ToolCallKind
from meshpoint.frameworks.peers import PeerTool, PeerTools
from meshpoint.frameworks.steps import recording_context
from meshpoint.model.outcomes import Failed

_MAX_RETRIES = 2
"""How often a model may correct its arguments for one peer before the run fails."""
_ANY_OBJECT = SchemaValidator(core_schema.dict_schema(keys_schema=core_schema.str_schema()))


@dataclass(slots=True)
class RunState:
    """What a run of an agent must remember until it pauses or ends.

    Attributes:
        validated: The validated arguments of tool calls, by their ids.
        tools: The peers that the model was offered last.
        step: The step of the run in which it was offered them.
    """

    validated: dict[str, dict[str, Any]] = field(default_factory=dict)
    tools: Mapping[str, PeerTool] = field(default_factory=dict)
    step: int | None = None
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


class PeerToolset(AbstractToolset[Any]):
    """Tools that wait for peers.

    A call with arguments that do not fit goes back to the model. Others end the run with
    `DeferredToolRequests`, together with the other calls of their turn.
    """

    def __init__(self, tools: PeerTools) -> None:
        self._tools = tools

    @property
    def id(self) -> str:
        """The toolset's id, unique within an agent."""
        return "meshpoint-peers"

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        """The tools of this turn of the model."""
        return {
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
            for name, tool in (await self._offer(ctx)).items()
        }

    async def _offer(self, ctx: RunContext[Any]) -> Mapping[str, PeerTool]:
        run, task = run_state.get(), recording_context()
        if run is None or task is None:
            return self._tools.known
        async with run.lock:  # Pydantic AI may list the tools of a turn several times
            if run.step != ctx.run_step:
                run.tools, run.step = await self._tools.offer(task), ctx.run_step
        return run.tools

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """Defer the call.

        Raises:
            CallDeferred: Always, if the arguments fit.
            ModelRetry: They do not.
        """
        run = run_state.get()
        tools = self._tools.known if run is None else run.tools
        try:
            tools[name].check(tool_args)
        except InvalidInput as error:
            raise ModelRetry(str(error)) from error
        raise CallDeferred


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
        arguments = _to_json(run.validated.get(call.tool_call_id) or call.args_as_dict())
        peer = tool.peer.name if tool is not None and kind is ToolCallKind.PEER else None
        calls.append(ToolCall(call.tool_call_id, call.tool_name, kind, arguments, peer))
    return calls


def _to_json(arguments: dict[str, Any]) -> dict[str, JsonValue]:
    converted: dict[str, JsonValue] = to_jsonable_python(arguments, fallback=repr)
    return converted


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
