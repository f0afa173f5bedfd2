"""What an agent of Strands waits for: peers that its model calls, and interrupts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import JsonValue
from pydantic_core import to_json
from strands import Agent
from strands.interrupt import Interrupt
from strands.types.tools import ToolResult, ToolUse
from strands.vended_interventions.hitl import HumanInTheLoop

from meshpoint.errors import PeerFailed
from meshpoint.frameworks.approval import APPROVAL, prompt_text, validate_arguments
from meshpoint.frameworks.base import Answer, failure_text, is_approved, tool_question
from meshpoint.frameworks.history import History, ToolCall, ToolCallKind
from meshpoint.frameworks.strands.recording import PEER, Recorder, error_result, tool_uses
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Failed
from meshpoint.model.waitable import Waitable


class OpenCalls:
    """The tool calls and waits for the interrupts of a pause.

    Attributes:
        calls: The calls, in the order of `add`. A call that waits for a person has the id of its
            interrupt.
        waits: The waits of interrupts without a kind of their own.
        approvals: The calls of the model that wait for approval, by the ids of the interrupts.
    """

    def __init__(self, ctx: TaskExecutionContext, recorder: Recorder) -> None:
        self._ctx, self._recorder = ctx, recorder
        self._confirming = _find_confirming(recorder.root)
        self.calls: list[ToolCall] = []
        self.waits: dict[str, Waitable[Any]] = {}
        self.approvals: dict[str, JsonValue] = {}

    def add(self, use: ToolUse | None, interrupt: Interrupt) -> None:
        """Add an interrupt, and the model's call that has led to it, if any."""
        is_nested = interrupt.id in self._recorder.nested
        asks_approval = interrupt.name in self._confirming
        if use is not None and interrupt.name == PEER and not is_nested:
            peer = self._recorder.offered[use["name"]].peer.name
            call = ToolCall(use["toolUseId"], use["name"], ToolCallKind.PEER, use["input"], peer)
        elif (
            asks_approval and not is_nested and use is not None and isinstance(use["input"], dict)
        ):
            tool = self._recorder.root.tool_registry.registry.get(use["name"])
            schema = getattr(getattr(tool, "_metadata", None), "input_model", None)
            shown = validate_arguments(schema, use["input"])
            call = ToolCall(interrupt.id, use["name"], ToolCallKind.APPROVAL, shown)
            self.approvals[interrupt.id] = use["toolUseId"]
        else:
            question = APPROVAL if asks_approval else tool_question(interrupt.name)
            kind = ToolCallKind.APPROVAL if asks_approval else ToolCallKind.WAIT
            call = ToolCall(interrupt.id, question.name, kind, {})
            prompt = prompt_text(interrupt.reason)
            self.waits[interrupt.id] = self._ctx.wait_for(question, prompt=prompt)
        self.calls.append(call)


def _find_confirming(agent: Agent) -> set[str]:
    """The names of handlers whose interrupts are answered with yes or no."""
    registry = getattr(agent, "_intervention_registry", None)
    return {HumanInTheLoop.name, *(each.name for each in getattr(registry, "handlers", ()))}


def sort_interrupts(
    agent: Agent, found: Sequence[tuple[ToolUse | None, Interrupt]]
) -> list[tuple[ToolUse | None, Interrupt]]:
    """Put interrupts into the order of the calls that have led to them."""
    calls = tool_uses(agent.messages[-1])
    places = {call["toolUseId"]: place for place, call in enumerate(calls)}
    last = len(places)
    return sorted(
        found, key=lambda each: places.get(each[0]["toolUseId"], last) if each[0] else -1
    )


def give_answers(
    history: History, answers: Sequence[Answer], recorder: Recorder
) -> list[dict[str, Any]]:
    """Give the recorder the answers to calls, and return the responses to interrupts.

    Raises:
        PeerFailed: A question of the agent's own code has no answer.
    """
    approvals: Any = history.extra.get("approvals", {})
    responses = []
    for answer in answers:
        call, outcome = answer.call, answer.outcome
        if call.kind is ToolCallKind.PEER:
            recorder.answers[call.id] = _result_of(answer)
            continue
        response: Any
        if call.kind is ToolCallKind.APPROVAL:
            response, reason = is_approved(answer)
            if (use := approvals.get(call.id)) is not None and response:
                recorder.approved[use] = call.arguments  # what the question has shown
            elif use is not None:
                recorder.refused[use] = reason
        elif isinstance(outcome, Failed):
            raise PeerFailed(call.tool, outcome)
        else:  # Strands would ask again if there is no response
            response = False if outcome.value is None else outcome.value
        responses.append({"interruptResponse": {"interruptId": call.id, "response": response}})
    return responses


def _result_of(answer: Answer) -> ToolResult:
    call, outcome = answer.call.id, answer.outcome
    if isinstance(outcome, Failed):
        return error_result(call, failure_text(outcome))
    value = outcome.value
    text = value if isinstance(value, str) else to_json(value).decode()
    return {"toolUseId": call, "status": "success", "content": [{"text": text}]}
