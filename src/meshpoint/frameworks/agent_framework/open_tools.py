"""Tools whose calls must wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_framework import FunctionTool
from pydantic import JsonValue, ValidationError
from pydantic_core import to_jsonable_python

from meshpoint.frameworks.peers import PeerTool


async def _leave_open(**arguments: Any) -> None:
    """Return nothing. The task waits for the result."""


class OpenTool(FunctionTool):
    """A tool whose calls must wait: a peer, or a tool that a person approves or answers."""

    def __init__(
        self,
        name: str,
        description: str,
        schema: Any,
        *,
        peer: PeerTool | None = None,
        original: FunctionTool | None = None,
    ) -> None:
        super().__init__(
            name=name,
            description=description,
            func=_leave_open,
            input_model=schema,
            kind=None if original is None else original.kind,
            additional_properties=None if original is None else original.additional_properties,
        )
        self._peer, self._original = peer, original

    @property
    def peer(self) -> PeerTool | None:
        """The peer that it calls."""
        return self._peer

    @property
    def is_own(self) -> bool:
        """Whether it stands for a tool of the agent itself."""
        return self._original is not None

    @property
    def original(self) -> FunctionTool:
        """The agent's own tool."""
        assert self._original is not None
        return self._original


def open_peer(peer: PeerTool) -> OpenTool:
    return OpenTool(peer.name, peer.description, peer.schema, peer=peer)


def open_own(tool: Any) -> Any:
    if not isinstance(tool, FunctionTool):
        return tool
    if tool.approval_mode != "always_require" and not tool.declaration_only:
        return tool
    schema = tool.input_model or tool.parameters()
    return OpenTool(tool.name, tool.description, schema, original=tool)


def arguments_as_json(
    tool: FunctionTool, arguments: Mapping[str, Any], written: Mapping[str, Any]
) -> dict[str, JsonValue]:
    """The arguments of a call as JSON.

    What JSON does not keep, such as a secret, is shown as the model wrote it.
    """
    shown: dict[str, JsonValue] = to_jsonable_python(dict(arguments), round_trip=True)
    model = tool.input_model
    for name in shown if model is not None else ():
        assert model is not None
        try:
            read = model.model_validate({**written, name: shown[name]}).model_dump()
            is_kept = bool(read[name] == arguments[name])
        except ValidationError:
            is_kept = False
        if not is_kept:
            shown[name] = written[name]
    return shown
