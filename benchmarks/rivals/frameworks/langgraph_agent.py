"""The agent in LangChain, on LangGraph, for every contender. Meshpoint is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from benchmarks.rivals import job

_USAGE: Any = {"input_tokens": 10, "output_tokens": 10, "total_tokens": 20}


class CountingModel(BaseChatModel):
    """Calls the peer until there are as many answers as the prompt says, then answers."""

    @property
    def _llm_type(self) -> str:
        return "script"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """The model itself: its answers do not depend on the tools."""
        return self

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        raise NotImplementedError

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt = next(each.text for each in messages if isinstance(each, HumanMessage))
        answers = [str(each.text) for each in messages if isinstance(each, ToolMessage)]
        message = AIMessage(job.summary(answers), usage_metadata=_USAGE)
        if len(answers) < int(prompt):
            call: Any = {"name": "peer", "args": {"request": job.QUESTION}}
            call["id"] = f"call-{len(answers)}"
            message = AIMessage("", tool_calls=[call], usage_metadata=_USAGE)
        return ChatResult(generations=[ChatGeneration(message=message)])


def make_agent(**options: Any) -> Any:
    """Build the agent. `options` are passed to `create_agent`, for example its tools."""
    return create_agent(CountingModel(), name="root", **options)
