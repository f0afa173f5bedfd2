"""The script as a chat client of Microsoft Agent Framework."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any

from agent_framework import (
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    Message,
    ResponseStream,
)
from trips import next_turn


class ScriptedClient(FunctionInvocationLayer[Any], ChatMiddlewareLayer[Any], BaseChatClient[Any]):
    """A client that answers with the script's turns."""

    def _inner_get_response(
        self,
        *,
        messages: Sequence[Message],
        stream: bool,
        options: Mapping[str, Any],
        **kwargs: Any,
    ) -> Awaitable[ChatResponse[Any]] | ResponseStream[ChatResponseUpdate, ChatResponse[Any]]:
        if stream:
            return self._build_response_stream(_stream(messages))
        return _respond(messages)


async def _respond(messages: Sequence[Message]) -> ChatResponse[Any]:
    return ChatResponse(messages=Message("assistant", _next_contents(messages)))


async def _stream(messages: Sequence[Message]) -> AsyncIterator[ChatResponseUpdate]:
    yield ChatResponseUpdate(contents=_next_contents(messages), role="assistant")


def _next_contents(messages: Sequence[Message]) -> list[Content]:
    contents = [content for message in messages for content in message.contents]
    names = {each.call_id: each.name for each in contents if each.type == "function_call"}
    results = {
        names[each.call_id] or "": str(each.result)
        for each in contents
        if each.type == "function_result"
    }
    turn = next_turn(results)
    if isinstance(turn, str):
        return [Content.from_text(turn)]
    return [
        Content.from_function_call(call.tool, call.tool, arguments=call.arguments) for call in turn
    ]
