"""Peers as a toolset of Pydantic AI, and deferred tool calls as waits of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue
from pydantic_ai.exceptions import CallDeferred, ModelRetry, ToolFailed
from pydantic_ai.messages import ToolCallPart
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
from meshpoint.frameworks.peers import PeerTool
from meshpoint.model.outcomes import Failed

_MAX_RETRIES = 2
"""How often a model may correct its arguments for one peer before the run fails."""
_ANY_OBJECT = SchemaValidator(core_schema.dict_schema(keys_schema=core_schema.str_schema()))


class PeerToolset(AbstractToolset[Any]):
    """Tools that wait for peers.

    A call with arguments that do not fit goes back to the model. Others end the run with
    `DeferredToolRequests`, together with the other calls of their turn.
    """

    def __init__(self, tools: Sequence[PeerTool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @property
    def id(self) -> str:
        """The toolset's id, unique within an agent."""
        return "meshpoint-peers"

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        """All tools."""
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
            for name, tool in self._tools.items()
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """Defer the call.

        Raises:
            CallDeferred: Always, if the arguments fit.
            ModelRetry: They do not.
        """
        try:
            self._tools[name].check(tool_args)
        except InvalidInput as error:
            raise ModelRetry(str(error)) from error
        raise CallDeferred


def tool_calls(
    requests: DeferredToolRequests,
    order: Sequence[str],
    peers: Mapping[str, PeerTool],
    validated: Mapping[str, dict[str, Any]],
) -> list[ToolCall]:
    """The deferred calls of a run, in the order of the tool call ids in `order`.

    `validated` has the arguments by tool call id.
    """
    approvals = {call.tool_call_id for call in requests.approvals}

    def kind(call: ToolCallPart) -> ToolCallKind:
        if call.tool_call_id in approvals:
            return ToolCallKind.APPROVAL
        return ToolCallKind.PEER if call.tool_name in peers else ToolCallKind.QUESTION

    calls = {call.tool_call_id: call for call in (*requests.calls, *requests.approvals)}
    ids = [each for each in order if each in calls]
    ids += [each for each in calls if each not in ids]
    return [
        ToolCall(
            each,
            calls[each].tool_name,
            kind(calls[each]),
            _to_json(validated.get(each, calls[each].args_as_dict())),
        )
        for each in ids
    ]


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
