"""One run of an agent of Agent Framework, from one pause to the next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from time import perf_counter
from typing import Any, TypeAlias

from agent_framework import AgentSession, ChatResponse, Content, Message, _tools
from pydantic import JsonValue
from pydantic_core import from_json, to_json

from meshpoint.errors import AgentMisbehaved
from meshpoint.frameworks.history import ToolCall
from meshpoint.frameworks.peers import PeerTool, PeerTools
from meshpoint.frameworks.steps import StateChanges

Next: TypeAlias = Callable[[], Awaitable[None]]
"""What a middleware calls to continue."""

_LOOP_STATE = getattr(_tools, "_FUNCTION_INVOCATION_BUDGET_STATE_KEY", "")
_LOOP_COUNTERS = ("attempt_count", "total_function_calls")
_STARTED, _ELAPSED = "start_time", "elapsed_seconds"
"""Keys of when the loop has started, in this process, and of how long it ran before a pause."""

scope: ContextVar[tuple[str, ...]] = ContextVar("meshpoint_agent_framework_scope", default=())
"""The calls of agents as tools that the running code is part of."""


class Stopped(BaseException):
    """Stops the framework, because the task must wait.

    It is no `Exception`, so that no middleware makes it an answer.
    """


class Segment:
    """One run of an agent, from the messages of the last pause to the next one.

    Agent Framework calls the model and the tools in turn. If calls of a turn must wait, they leave
    their results empty, and the run stops before the next request to the model. The next segment
    repeats this turn: the framework gets the stored response of the model, and the stored results
    of all its calls.

    Args:
        peers: The peers.
        stream: Whether to send the text of the model to the task's callers.
        messages: The messages before this run, without the turn to repeat.
        turn: The response to repeat. Empty if the model must answer first.
        settled: The recorded results of its calls, by id.
        answers: The results of its calls that the task has waited for, by id.
        approved: The arguments of its calls that a person has approved, by id.
        counters: The counters of the framework's own limits, such as `max_iterations`.

    Attributes:
        messages: All messages so far. If the run has stopped in a turn, they end with its
            response.
        turn: The response to the latest request.
        results: The recorded results of calls in this turn, by id.
        waits: The calls in this turn that must wait, by id.
        offered: The peers that the model was offered last, by the names of their tools.
        needs_budget: Whether a person must allow the next request.
        middleware: What records the run of an agent.
        changes: The changes of tools to the states of sessions.
    """

    def __init__(
        self,
        peers: PeerTools,
        *,
        stream: bool,
        messages: Sequence[Message],
        turn: Sequence[Message] = (),
        settled: Mapping[str, JsonValue],
        answers: Mapping[str, JsonValue],
        approved: Mapping[str, dict[str, JsonValue]],
        counters: Mapping[str, JsonValue],
    ) -> None:
        self.peers, self.stream = peers, stream
        self.messages, self.turn = list(messages), list[Message]()
        self.results: dict[str, JsonValue] = {}
        self.waits: dict[str, ToolCall] = {}
        self.offered: Mapping[str, PeerTool] = peers.known
        self.needs_budget = False
        self.middleware = list[Any]()
        self._repeated, self.settled = list(turn), settled
        self.answers, self.approved = answers, approved
        self.counters, self._loop = dict(counters), dict[str, Any](counters)
        elapsed: Any = self._loop.pop(_ELAPSED, 0)
        self._elapsed = float(elapsed)
        if not turn:
            self._count_elapsed()
        self.changes = StateChanges()

    @property
    def must_stop(self) -> bool:
        """Whether the run must not send its next request."""
        return self.needs_budget or bool(self.waits)

    @property
    def client_options(self) -> dict[str, Any]:
        """Options of the run for the client, whose counters continue."""
        return {_LOOP_STATE: self._loop} if _LOOP_STATE else {}

    def _keep_counters(self) -> None:
        """Keep the counters as they were before the latest request."""
        counters: dict[str, Any] = {
            name: self._loop[name] for name in _LOOP_COUNTERS if name in self._loop
        }
        if "attempt_count" in counters:
            counters["attempt_count"] -= 1
        self.counters = counters

    def _count_elapsed(self) -> None:
        """Count the time before the last pause.

        If the time is over, the framework drops the calls in the next response. So it must not
        know before it has the calls of the turn to repeat.
        """
        if self._elapsed:
            self._loop[_STARTED] = self._loop.get(_STARTED, perf_counter()) - self._elapsed
            self._elapsed = 0.0

    def dump_counters(self) -> dict[str, JsonValue]:
        """The counters for the next segment, and how long the loop has run in the task.

        The time between two segments does not count.
        """
        started = self._loop.get(_STARTED)
        if not isinstance(started, int | float):
            return self.counters
        return {**self.counters, _ELAPSED: perf_counter() - started + self._elapsed}

    def end_turn(self, sent: Iterable[Message]) -> None:
        """Add the results of the turn, which are among the messages of the next request.

        Raises:
            Stopped: No request may follow.
        """
        if self.must_stop:
            raise Stopped("the task waits")
        ids = {each.call_id for each in calls_of(self.turn)}
        contents = [
            content for message in sent if message.role == "tool" for content in message.contents
        ]
        results = [
            each for each in contents if each.type == "function_result" and each.call_id in ids
        ]
        if results:
            self.messages.append(Message("tool", results))
        self.turn, self.results = [], {}

    def repeat_turn(self) -> ChatResponse[Any] | None:
        """The response of the turn that the last pause has stopped."""
        turn, self._repeated = self._repeated, []
        return ChatResponse(messages=turn) if turn else None

    def begin_turn(self, response: ChatResponse[Any]) -> None:
        """Keep the response to a request."""
        self._keep_counters()
        self._count_elapsed()
        self.turn = list(response.messages)
        self.messages += self.turn

    def stop_for_budget(self) -> None:
        """Stop before the next request, because a person must allow it."""
        if not self.turn:
            self._keep_counters()
        self.needs_budget = True

    def has_result(self, call: str) -> bool:
        """Whether a call of the repeated turn has a result."""
        return call in self.settled or call in self.answers

    def arguments(self, call: str) -> dict[str, Any]:
        """The arguments of a call as the model wrote them."""
        found = [each for each in calls_of(self.turn) if each.call_id == call]
        if not found:
            raise AgentMisbehaved(f"a middleware has replaced the call {call!r} of the model")
        return dict(found[0].parse_arguments() or {})


def dump_session(session: AgentSession) -> dict[str, Any]:
    """A copy of a session as JSON.

    Raises:
        AgentMisbehaved: A value in its state is not JSON, and not of a registered type.
    """
    try:
        dumped: dict[str, Any] = from_json(to_json(session.to_dict()))
    except (TypeError, ValueError) as error:
        problem = f"the state of the session cannot be stored: {error}"
        raise AgentMisbehaved(problem) from error
    return dumped


def calls_of(messages: Iterable[Message]) -> list[Content]:
    """The calls in `messages` that are the agent's to make, not its provider's."""
    return [
        content
        for message in messages
        for content in message.contents
        if content.type == "function_call" and not (content.informational_only or content.hosted)
    ]
