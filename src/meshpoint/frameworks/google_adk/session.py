"""The session of a task: its events are the history of the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.adk.events import Event
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import ListSessionsResponse
from google.genai import types
from pydantic import JsonValue
from pydantic_core import to_json

CONFIRMATION = "adk_request_confirmation"
"""The function that ADK calls to ask whether a tool may run."""


class TaskSession(BaseSessionService):
    """The only session of a run."""

    def __init__(self, session: Session) -> None:
        self.session = session

    async def create_session(self, **options: Any) -> Session:
        """Return the session."""
        return self.session

    async def get_session(self, **options: Any) -> Session:
        """Return the session."""
        return self.session

    async def list_sessions(self, **options: Any) -> ListSessionsResponse:
        """List the session."""
        return ListSessionsResponse(sessions=[self.session])

    async def delete_session(self, **options: Any) -> None:
        """Do nothing: the session ends with the task."""


def dump_event(event: Event) -> JsonValue:
    """Convert an event to JSON."""
    # Without the fields that are not set, other versions of ADK can read it.
    dumped: JsonValue = event.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped


def read_events(messages: Sequence[JsonValue]) -> list[Event]:
    """Read what `dump_event` has written.

    Raises:
        ValidationError: This version of ADK cannot read it.
    """
    return [Event.model_validate_json(to_json(each)) for each in messages]


def state_after(events: Sequence[Event]) -> dict[str, Any]:
    """The state of a session with these events."""
    state: dict[str, Any] = {}
    for event in events:
        state.update(event.actions.state_delta)
    return state


class OpenCalls:
    """The tool calls in a session that have no result yet.

    Attributes:
        calls: In call order. A call that waits for an approval is the original one.
        turns: The events with these calls.
        responses: All results in the session, by the ids of their calls.
        confirmations: The calls that ask for approval, by the ids of the original calls.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.responses: dict[str | None, types.FunctionResponse] = {
            response.id: response
            for event in events
            for response in event.get_function_responses()
        }
        self.confirmations: dict[str, types.FunctionCall] = {}
        self.turns: list[Event] = []
        waiting = set[str | None]()
        for event in events:
            for call in event.get_function_calls():
                if call.id in self.responses or call.id not in (event.long_running_tool_ids or ()):
                    continue
                original = _original_id(call)
                if original is not None:
                    self.confirmations[original] = call
                waiting.add(original or call.id)
        for event in events:
            if any(call.id in waiting for call in event.get_function_calls()):
                self.turns.append(event)
        self.calls = [
            call
            for event in self.turns
            for call in event.get_function_calls()
            if call.id in waiting
        ]

    def results(self, results: Mapping[str, dict[str, Any]]) -> types.Content:
        """The results of all calls of the turns, in call order.

        It repeats results that the session has, because ADK puts later results after them.

        Args:
            results: By the ids of the calls that have waited for one.
        """
        parts = []
        for call in (each for event in self.turns for each in event.get_function_calls()):
            response = self.responses.get(call.id)
            if call.id is not None and call.id in results:
                parts.append(_response(call, results[call.id]))
            elif response is not None and call.id not in self.confirmations:
                parts.append(types.Part(function_response=response))
        return types.Content(role="user", parts=parts)

    def decisions(self, approved: Mapping[str, bool]) -> types.Content:
        """What people have decided, by the ids of the calls that have waited for approval."""
        parts = [
            _response(
                self.confirmations[call],
                {"confirmed": decision, "payload": _requested_payload(self.confirmations[call])},
            )
            for call, decision in approved.items()
        ]
        return types.Content(role="user", parts=parts)


def _original_id(call: types.FunctionCall) -> str | None:
    if call.name != CONFIRMATION:
        return None
    original: str | None = (call.args or {}).get("originalFunctionCall", {}).get("id")
    return original


def _response(call: types.FunctionCall, result: dict[str, Any]) -> types.Part:
    response = types.FunctionResponse(id=call.id, name=call.name, response=result)
    return types.Part(function_response=response)


def _requested_payload(confirmation: types.FunctionCall) -> Any:
    """What a tool has asked a person to confirm, in addition to its arguments."""
    return (confirmation.args or {}).get("toolConfirmation", {}).get("payload")
