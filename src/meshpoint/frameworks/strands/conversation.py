"""The conversation of a task: what a pause stores of an agent, and how the next run gets it."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue, TypeAdapter
from pydantic_core import to_jsonable_python
from strands import Agent, Snapshot
from strands.types.content import Messages
from strands.types.session import decode_bytes_values, encode_bytes_values

from meshpoint.frameworks.history import History, Message
from meshpoint.frameworks.strands.recording import PEER

_MESSAGES: TypeAdapter[Messages] = TypeAdapter(Messages)


class Conversation:
    """The messages of a task, and the last part of them, which its agent has now.

    A conversation manager removes earlier messages from the agent. They stay in the history, so
    that a pause need not write the others again.
    """

    def __init__(self, agent: Agent, history: History) -> None:
        self._agent, self._history = agent, history
        self._skipped = int(str(history.extra.get("skipped", 0)))
        self._before: list[Message] = history.messages[self._skipped :]
        self._removed = agent.conversation_manager.removed_message_count

    def load(self) -> None:
        """Give the agent what the last pause has stored, or the messages of earlier tasks.

        Raises:
            Exception: Strands cannot load it.
        """
        if not self._history.extra:
            self.read_again()
            self._agent.messages = decode_bytes_values(self._before)
            return
        stored: dict[str, Any] = decode_bytes_values(dict(self._history.extra))
        messages: list[Any] = decode_bytes_values(self._before)
        data = {**stored["data"], "messages": messages}
        if (interrupts := stored.get("interrupts")) is not None:
            results = interrupts.pop("results", None)
            data["interrupt_state"] = {**interrupts, "activated": True}
            if results is not None:
                data["interrupt_state"]["pending_tool_execution"] = {
                    "assistant_message": messages[-1],
                    "completed_tool_results": results,
                }
        schema = stored["schema"]
        self._agent.load_snapshot(Snapshot("agent", schema, data=data, app_data={}))
        self._removed = self._agent.conversation_manager.removed_message_count

    def read_again(self) -> list[Message]:
        """The messages as the installed version of Strands reads them."""
        read = _MESSAGES.validate_python(decode_bytes_values(self._history.messages))
        messages: list[Message] = _encode(_MESSAGES.dump_python(read))
        return messages

    def dump(self) -> tuple[list[Message], dict[str, JsonValue]]:
        """The messages of the task, and what else the next run needs."""
        snapshot = self._agent.take_snapshot(
            include=["messages", "state", "conversation_manager_state", "interrupt_state"]
        )
        now = _encode(snapshot.data.pop("messages"))
        interrupts = _dump_interrupts(snapshot.data.pop("interrupt_state"))
        messages = self._add(now)
        extra: dict[str, JsonValue] = {
            "schema": snapshot.schema_version,
            "data": _encode(snapshot.data),
            "skipped": len(messages) - len(now),
        }
        if interrupts is not None:
            extra["interrupts"] = interrupts
        return messages, extra

    def dump_last(self) -> list[Message]:
        """The messages that the agent has now, with which the next task continues."""
        messages: list[Message] = _encode(self._agent.messages)
        return messages

    def _add(self, now: list[Message]) -> list[Message]:
        """All messages of the task, or only the agent's if it has changed earlier ones."""
        removed = self._agent.conversation_manager.removed_message_count - self._removed
        kept = self._before[removed:]
        if not kept or now[: len(kept)] != kept:
            return now
        return [*self._history.messages, *now[len(kept) :]]


def _encode(value: Any) -> Any:
    return to_jsonable_python(encode_bytes_values(value))


def _dump_interrupts(state: dict[str, Any]) -> JsonValue:
    """The open interrupts, without the message with their calls. `None` if there is no interrupt.

    Interrupts for peers are left out: their calls are in the history.
    """
    if not state["activated"]:
        return None
    interrupts = {key: each for key, each in state["interrupts"].items() if each["name"] != PEER}
    context = {key: each for key, each in state["context"].items() if key != "responses"}
    stored = {"interrupts": interrupts, "context": context}
    if (pending := state.get("pending_tool_execution")) is not None:
        stored["results"] = pending["completed_tool_results"]
    dumped: JsonValue = to_jsonable_python(encode_bytes_values(stored), fallback=str)
    return dumped
