"""Requests to the model as steps, and peers as its tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from agent_framework import (
    ChatContext,
    ChatMiddleware,
    ChatResponse,
    ChatResponseUpdate,
    ResponseStream,
)
from pydantic import JsonValue
from pydantic_core import from_json, to_json

from meshpoint.frameworks.agent_framework.open_tools import OpenTool, open_own, open_peer
from meshpoint.frameworks.agent_framework.segment import (
    Next,
    Segment,
    Stopped,
    calls_of,
    scope,
)
from meshpoint.frameworks.budget import BudgetReached, check_budget, count_request
from meshpoint.frameworks.progress import show_text
from meshpoint.frameworks.steps import record_step, recording_context, step_name
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.usage import Tokens


class RecordRequests(ChatMiddleware):
    """Records each request to the model as a step, and offers the peers."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    async def process(self, context: ChatContext, call_next: Next) -> None:
        """Send a request, or return its recorded response.

        Raises:
            BudgetExceeded: See `check_budget`.
            ConfigurationError: A typed peer has the name of another tool.
            Stopped: The task must wait.
        """
        task = recording_context()
        if task is None:
            await call_next()
            return
        response = await (self._nested if scope.get() else self._answer)(task, context, call_next)
        context.result = _as_stream(response) if context.stream else response

    async def _nested(
        self, task: TaskExecutionContext, context: ChatContext, call_next: Next
    ) -> ChatResponse[Any]:
        check_budget()
        return await self._record(task, context, call_next)

    async def _answer(
        self, task: TaskExecutionContext, context: ChatContext, call_next: Next
    ) -> ChatResponse[Any]:
        segment = self._segment
        segment.end_turn(context.messages)
        repeated = segment.repeat_turn()
        if repeated is None:
            try:
                check_budget()
            except BudgetReached as error:
                segment.stop_for_budget()
                raise Stopped("a person must allow the request") from error
        await self._offer(task, context, repeated)
        response = repeated or await self._record(task, context, call_next)
        segment.begin_turn(response)
        return response

    async def _offer(
        self, task: TaskExecutionContext, context: ChatContext, repeated: ChatResponse[Any] | None
    ) -> None:
        """Replace the tools of the run. The framework looks them up in the same list."""
        options: Any = context.options
        tools = options.get("tools") or []
        own = [
            each.original if isinstance(each, OpenTool) else each
            for each in tools
            if not isinstance(each, OpenTool) or each.is_own
        ]
        names = {str(getattr(each, "name", "")) for each in own}
        self._segment.peers.check_names(names)
        offered = await self._segment.peers.offer(task, names.__contains__)
        self._segment.offered = offered
        # A call that has a result may be of a tool or peer that is gone.
        gone = {
            call.name or ""
            for call in calls_of(repeated.messages if repeated else ())
            if self._segment.has_result(call.call_id or "")
        }
        gone -= names | offered.keys()
        tools[:] = [
            *map(open_own, own),
            *map(open_peer, offered.values()),
            *(OpenTool(name, "", {"type": "object"}) for name in sorted(gone)),
        ]
        options["tools"] = tools

    async def _record(
        self, task: TaskExecutionContext, context: ChatContext, call_next: Next
    ) -> ChatResponse[Any]:
        is_nested = bool(scope.get())

        async def request() -> JsonValue:
            shows = self._segment.stream and not is_nested
            response = await _send(task, context, call_next, shows_text=shows)
            sent = [*self._segment.messages, *context.messages]
            _set_ids(response, {each.call_id for each in calls_of(sent)}, len(sent))
            response.conversation_id = None  # each request has all messages
            usage: Any = response.usage_details or {}
            tokens = Tokens(
                input=usage.get("input_token_count") or 0,
                output=usage.get("output_token_count") or 0,
                cached=usage.get("cache_read_input_token_count") or 0,
            )
            count_request(task, response.model or "unknown", tokens)
            dumped: JsonValue = response.to_dict()
            return dumped

        recorded = await record_step(task, step_name("model", *scope.get()), request)
        return ChatResponse.from_dict(from_json(to_json(recorded)))


async def _send(
    task: TaskExecutionContext, context: ChatContext, call_next: Next, *, shows_text: bool
) -> ChatResponse[Any]:
    """Send a request. If `shows_text`, the task's callers get the text as it is written."""
    was_stream, context.stream = context.stream, shows_text
    try:
        await call_next()
        if not isinstance(context.result, ResponseStream):
            return context.result  # type: ignore[return-value]  # no middleware has removed it
        async for update in context.result:
            await show_text(task, update.text)
        return await context.result.get_final_response()
    finally:
        context.stream = was_stream


def _as_stream(
    response: ChatResponse[Any],
) -> ResponseStream[ChatResponseUpdate, ChatResponse[Any]]:
    async def updates() -> AsyncIterator[ChatResponseUpdate]:
        for update in response.to_updates():
            yield update

    return ResponseStream(updates(), finalizer=ChatResponse.from_updates)


def _set_ids(response: ChatResponse[Any], used: set[str | None], number: int) -> None:
    """Give new ids to calls without an id, and to calls that repeat an id in `used` or here."""
    for index, call in enumerate(calls_of(response.messages)):
        if not call.call_id or call.call_id in used:
            call.call_id = f"call-{number}-{index}"
            while call.call_id in used:  # a model may have chosen this one
                call.call_id += "-"
            call.id = None
        used.add(call.call_id)
        call.id = call.id or call.call_id  # the framework would choose a random one
