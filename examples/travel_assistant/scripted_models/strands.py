"""The script as a model of Strands."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from strands.models import Model
from strands.types.content import Messages
from strands.types.streaming import StreamEvent
from trips import next_turn


class ScriptedModel(Model):
    """A model that streams the script's turns."""

    def update_config(self, **model_config: Any) -> None:
        """It has no options."""

    def get_config(self) -> dict[str, Any]:
        """Its name."""
        return {"model_id": "scripted"}

    def structured_output(self, *args: Any, **kwargs: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The assistant answers with text."""
        raise NotImplementedError

    async def stream(
        self, messages: Messages, *args: Any, **kwargs: Any
    ) -> AsyncIterator[StreamEvent]:
        """The next turn, in one piece."""
        turn = next_turn(_results(messages))
        yield {"messageStart": {"role": "assistant"}}
        if isinstance(turn, str):
            yield {"contentBlockDelta": {"delta": {"text": turn}}}
            yield {"contentBlockStop": {}}
        for call in () if isinstance(turn, str) else turn:
            yield {
                "contentBlockStart": {
                    "start": {"toolUse": {"toolUseId": call.tool, "name": call.tool}}
                }
            }
            arguments = json.dumps(call.arguments)
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": arguments}}}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(turn, str) else "tool_use"}}


def _results(messages: Messages) -> dict[str, str]:
    """The results so far; the id of each call is the name of its tool."""
    found = [
        it["toolResult"] for message in messages for it in message["content"] if "toolResult" in it
    ]
    return {each["toolUseId"]: each["content"][0]["text"] for each in found}
