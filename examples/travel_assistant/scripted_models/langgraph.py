"""The script as a model of LangChain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from trips import next_turn


class ScriptedModel(BaseChatModel):
    """A model that answers with the script's turns."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """Pass the tools with each request."""
        return self.bind(tools=tools)

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        results = {
            each.name or "": each.text for each in messages if isinstance(each, ToolMessage)
        }
        turn = next_turn(results)
        if isinstance(turn, str):
            message = AIMessage(turn)
        else:
            calls: list[Any] = [
                {"name": call.tool, "args": call.arguments, "id": call.tool} for call in turn
            ]
            message = AIMessage("", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])
