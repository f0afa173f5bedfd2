"""The values of a graph as JSON."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from langchain_core.messages import BaseMessage, message_to_dict, messages_from_dict
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Command, Interrupt, Send
from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from meshpoint.frameworks.arguments import storable_arguments

_TAG = "$"
"""Key that marks a value with a type of its own."""
_SERIALIZER = JsonPlusSerializer()


def encode(value: Any) -> JsonValue:
    """Convert a value to JSON. Values of other types are serialized as LangGraph does.

    Raises:
        TypeError: LangGraph cannot write it.
    """
    match value:
        case None | bool() | int() | str():
            if value is None or type(value) in (bool, int, str):
                return value
        case list() if type(value) is list:
            return [encode(each) for each in value]
        case tuple() if type(value) is tuple:
            return {_TAG: "tuple", "value": [encode(each) for each in value]}
        case dict() if type(value) is dict and _TAG not in value:
            if all(type(key) is str for key in value):
                return {key: encode(each) for key, each in value.items()}
        case BaseMessage():
            return {_TAG: "message", "value": encode_message(value)}
        case Command():
            fields = {name: getattr(value, name) for name in ("graph", "update", "resume", "goto")}
            return {_TAG: "command", "value": {k: encode(v) for k, v in fields.items() if v}}
        case Send(timeout=None):
            return {_TAG: "send", "node": value.node, "value": encode(value.arg)}
        case Interrupt(response_schema=None):
            return {_TAG: "interrupt", "id": value.id, "value": encode(value.value)}
    kind, written = _SERIALIZER.dumps_typed(value)
    return {_TAG: kind, "value": b64encode(written).decode()}


def decode(value: Any) -> Any:
    """Convert JSON that `encode` has written to the value."""
    match value:
        case list():
            return [decode(each) for each in value]
        case {"$": "tuple", "value": items}:
            return tuple(decode(each) for each in items)
        case {"$": "message", "value": message}:
            return decode_messages([message])[0]
        case {"$": "command", "value": fields}:
            return Command(**{name: decode(each) for name, each in fields.items()})
        case {"$": "send", "node": node, "value": argument}:
            return Send(node, decode(argument))
        case {"$": "interrupt", "id": interrupt_id, "value": shown}:
            return Interrupt(decode(shown), interrupt_id)
        case {"$": kind, "value": written}:
            return _SERIALIZER.loads_typed((kind, b64decode(written)))
        case dict():
            return {key: decode(each) for key, each in value.items()}
    return value


def encode_message(message: BaseMessage) -> dict[str, Any]:
    """Convert a message to JSON, in the form of LangChain."""
    written = message_to_dict(message)
    data = written["data"]
    if calls := data.get("tool_calls"):
        data["tool_calls"] = [{**call, "args": storable_arguments(call["args"])} for call in calls]
    if data.get("artifact") is not None:  # may be any object
        data["artifact"] = encode(getattr(message, "artifact", None))
    empty: tuple[Any, ...] = (None, [], {})  # the defaults of all fields but the content
    written["data"] = {k: v for k, v in data.items() if k == "content" or v not in empty}
    json: dict[str, Any] = to_jsonable_python(written)
    return json


def decode_messages(written: list[Any]) -> list[BaseMessage]:
    """Convert JSON to messages.

    Raises:
        ValueError: This version of LangChain cannot read them.
    """
    messages = messages_from_dict(written)
    for message in messages:
        if (artifact := getattr(message, "artifact", None)) is not None:
            message.artifact = decode(artifact)  # type: ignore[attr-defined]  # of ToolMessage
    return messages
