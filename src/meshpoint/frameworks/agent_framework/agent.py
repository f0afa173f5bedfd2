"""`durable`: an agent of Agent Framework as an agent of the mesh."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import Any, ClassVar, TypeAlias, TypeVar, overload

from agent_framework import (
    Agent,
    AgentResponse,
    AgentSession,
    ChatMiddlewareLayer,
    Content,
    FunctionInvocationLayer,
    Message,
    MiddlewareFailure,
    normalize_messages,
)
from pydantic import BaseModel, JsonValue, TypeAdapter
from pydantic_core import from_json, to_json

from meshpoint.agents.peer import Addressable
from meshpoint.errors import (
    AgentFailed,
    AgentMisbehaved,
    ConfigurationError,
    IncompatibleState,
    MeshpointError,
)
from meshpoint.frameworks.agent_framework.requests import RecordRequests
from meshpoint.frameworks.agent_framework.segment import (
    Segment,
    Stopped,
    calls_of,
    dump_session,
)
from meshpoint.frameworks.agent_framework.tools import RecordTools, text_result
from meshpoint.frameworks.base import (
    Answer,
    FrameworkAgent,
    MakeLifespan,
    OnPeerFailure,
    failure_text,
    is_approved,
)
from meshpoint.frameworks.budget import Budget
from meshpoint.frameworks.history import History, ToolCallKind, Turn
from meshpoint.model.calls import Done
from meshpoint.model.context import Context, TaskExecutionContext
from meshpoint.model.declared_type import TypeMismatch
from meshpoint.model.outcomes import Failed
from meshpoint.ports.conversations import Conversations

In = TypeVar("In")
Out = TypeVar("Out")
Prompt: TypeAlias = str | Content | Message | Sequence[str | Content | Message]
"""What a run of Agent Framework takes."""

_LIBRARY = "agent-framework-core"
_VERSION = installed_version(_LIBRARY)
_NEEDED = {
    "function_call": ("call_id", "name"),
    "function_result": ("call_id",),
}
"""Texts that contents need, by their types."""


class AgentFrameworkAgent(FrameworkAgent[In, Out]):
    """An agent of Agent Framework as a `DurableAgent`; see `durable`."""

    framework: ClassVar[str] = "agent-framework"
    library_name: ClassVar[str] = f"{_LIBRARY} "
    wait_hint: ClassVar[str] = (
        "a tool cannot wait: list its peers in durable(peers=[…]), so that the model calls them; "
        'for people, write approval_mode="always_require", or a FunctionTool without a function'
    )

    def __init__(
        self,
        agent: Agent[Any],
        *,
        name: str,
        state: Callable[[Context], Mapping[str, Any]] | None,
        stream: bool,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self.wrapped, self._state, self._stream = agent, state, stream
        self._is_text = options["output"] is str

    @property
    def library(self) -> str:
        """The installed version of Agent Framework."""
        return _VERSION

    async def run(
        self, ctx: TaskExecutionContext, prompt: Any, history: History, answers: Sequence[Answer]
    ) -> Done[Out] | Turn:
        """Run the agent until it has answered, or waits; see `FrameworkAgent`."""
        messages = self._read_messages(history)
        if not history.extra:
            messages += normalize_messages(prompt)
        segment = self._open_segment(messages, history, answers)
        session = self._open_session(ctx, history)
        agent = copy.copy(self.wrapped)
        agent.context_providers = list(agent.context_providers)  # a run adds to them
        options: Any = {}
        if history.extra and "turn" not in history.extra and _requires_tool(agent):
            options = {"tool_choice": "auto"}  # the framework requires a tool in one request only
        try:
            response = await agent.run(
                segment.messages,
                session=session,
                middleware=segment.middleware,
                options=options,
                client_kwargs=segment.client_options,
            )
            if not segment.must_stop:
                segment.end_turn(response.messages)
                history.end(lambda: _dump(segment.messages))
                return Done(self._read_output(response))
        except Stopped:
            pass
        except MiddlewareFailure as error:
            if isinstance(error.__cause__, MeshpointError):
                raise error.__cause__ from None
            raise
        extra: dict[str, JsonValue] = {"counters": segment.dump_counters()}
        if segment.turn:
            extra |= {"turn": len(segment.turn), "results": segment.results}
        if session.state:
            extra["session"] = dump_session(session)
        calls = [] if segment.needs_budget else _in_order(segment)
        return Turn(_dump(segment.messages), calls, segment.offered, extra)

    def find_damage(self, message: JsonValue) -> str | None:
        """Check the fields of a message: the framework reads one without them."""
        if not isinstance(message, dict):
            return "is no object"
        if not isinstance(message.get("role"), str):
            return "has no role"
        contents = message.get("contents")
        if not isinstance(contents, list):
            return "has no contents"
        for content in contents:
            if not (isinstance(content, dict) and isinstance(content.get("type"), str)):
                return "has a content without a type"
            if needed := _NEEDED.get(str(content["type"])):
                missing = [name for name in needed if not isinstance(content.get(name), str)]
                if missing:
                    return f"has a {content['type']} without {missing[0]!r}"
        return None

    def _open_segment(
        self, messages: list[Message], history: History, answers: Sequence[Answer]
    ) -> Segment:
        """Continue from the last pause.

        Raises:
            IncompatibleState: Its turn has other calls.
        """
        length: Any = history.extra.get("turn", 0)
        before, turn = messages[: len(messages) - length], messages[len(messages) - length :]
        counters: Any = history.extra.get("counters", {})
        settled: Any = history.extra.get("results", {})
        results, approved = {}, {}
        for answer in answers:
            call, outcome = answer.call, answer.outcome
            if call.kind is ToolCallKind.APPROVAL:
                is_allowed, reason = is_approved(answer)
                if is_allowed:
                    approved[call.id] = call.arguments  # what the question has shown
                else:
                    results[call.id] = text_result(reason)
            elif isinstance(outcome, Failed):
                results[call.id] = text_result(failure_text(outcome))
            else:
                results[call.id] = text_result(_as_text(outcome.value))
        if not {answer.call.id for answer in answers} <= {call.call_id for call in calls_of(turn)}:
            raise IncompatibleState("its history waits for other calls")
        segment = Segment(
            self.tools,
            stream=self._stream,
            messages=before,
            turn=turn,
            settled=settled,
            answers=results,
            approved=approved,
            counters=counters,
        )
        segment.middleware = [RecordTools(segment), RecordRequests(segment)]
        return segment

    def _open_session(self, ctx: TaskExecutionContext, history: History) -> AgentSession:
        """The session of the last pause, or a new one.

        Raises:
            IncompatibleState: The session cannot be read.
        """
        if (stored := history.extra.get("session")) is not None:
            try:
                return AgentSession.from_dict(from_json(to_json(stored)))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise self.refuse_history(history, f"cannot read it: {error}") from error
        session = AgentSession(session_id=str(ctx.task_id))
        if self._state is not None and not history.extra:
            session.state.update(copy.deepcopy(dict(self._state(ctx))))
        return session

    def _read_messages(self, history: History) -> list[Message]:
        """Read the messages of the last pause.

        Raises:
            IncompatibleState: This version of Agent Framework cannot read them, or would lose a
                part.
        """
        try:
            messages = [Message.from_dict(each) for each in from_json(to_json(history.messages))]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.refuse_history(history, f"cannot read it: {error}") from error
        self.check_complete(history, lambda: _dump(messages))
        return messages

    def _read_output(self, response: AgentResponse[Any]) -> Any:
        """The output: the last text of the agent.

        Raises:
            AgentFailed: It does not fit the output's type.
            AgentMisbehaved: The agent has no answer, because it needs input.
        """
        if requests := response.user_input_requests:
            kinds = sorted({each.type for each in requests})
            raise AgentMisbehaved(f"a task cannot wait for the input that it needs: {kinds}")
        said = (each.text for each in reversed(response.messages) if each.role == "assistant")
        text = next((each for each in said if each), "")
        if self._is_text:
            return text
        try:
            return self._output.read(json.loads(text))
        except (ValueError, TypeMismatch) as error:
            raise AgentFailed(f"output of {self.name}: {error}") from error


def _requires_tool(agent: Agent[Any]) -> bool:
    choice: Any = agent.default_options.get("tool_choice")
    return (choice.get("mode") if isinstance(choice, Mapping) else choice) == "required"


def _in_order(segment: Segment) -> list[Any]:
    ids = [call.call_id for call in calls_of(segment.turn)]
    return sorted(segment.waits.values(), key=lambda call: ids.index(call.id))


def _dump(messages: Sequence[Message]) -> list[Any]:
    return [each.to_dict() for each in messages]


def _as_text(value: JsonValue) -> str:
    return value if isinstance(value, str) else to_json(value).decode()


@overload
def durable(
    agent: Agent[Any],
    /,
    *,
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    state: Callable[[Context], Mapping[str, Any]] | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    conversations: Conversations | None = None,
) -> AgentFrameworkAgent[str, str]: ...
@overload
def durable(
    agent: Agent[Any],
    /,
    *,
    output: type[Out] | TypeAdapter[Out],
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    state: Callable[[Context], Mapping[str, Any]] | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    conversations: Conversations | None = None,
) -> AgentFrameworkAgent[str, Out]: ...
@overload
def durable(
    agent: Agent[Any],
    /,
    *,
    input: type[In] | TypeAdapter[In],
    prompt: Callable[[In], Prompt],
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    state: Callable[[Context], Mapping[str, Any]] | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    conversations: Conversations | None = None,
) -> AgentFrameworkAgent[In, str]: ...
@overload
def durable(
    agent: Agent[Any],
    /,
    *,
    input: type[In] | TypeAdapter[In],
    prompt: Callable[[In], Prompt],
    output: type[Out] | TypeAdapter[Out],
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    state: Callable[[Context], Mapping[str, Any]] | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    conversations: Conversations | None = None,
) -> AgentFrameworkAgent[In, Out]: ...
def durable(
    agent: Agent[Any],
    /,
    *,
    input: Any = str,
    prompt: Callable[[Any], Prompt] | None = None,
    output: Any = str,
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    state: Callable[[Context], Mapping[str, Any]] | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    conversations: Conversations | None = None,
) -> AgentFrameworkAgent[Any, Any]:
    """Make an agent of Microsoft Agent Framework an agent of the mesh.

        travel = durable(
            planner,
            input=Trip,
            prompt=lambda trip: f"{trip.days} days in {trip.city}",
            peers=[flights, hotels],
        )

    Its model sees the peers as tools. When a turn calls some of them, the task pauses once, until
    all have answered. Model requests and the agent's own tools are steps, also in agents that are
    tools: after a crash, recorded ones do not run again. A tool with
    `approval_mode="always_require"` asks the question `APPROVAL` first. A `FunctionTool` without a
    function asks a question with the tool's name, whose answer is its result.

    Args:
        agent: The agent. It stays usable by itself.
        input: The type of the requests. Default: a string, which is the prompt.
        prompt: Returns the prompt for a request.
        output: The type of the result, which the model writes as JSON. Default: its text.
        name: The name in the mesh. Default: the agent's own.
        version: The version of the stored state. Change it if the new agent cannot continue the
            conversations of the old one.
        peers: The peers that the model may call: agents, `Peer`s, or names and patterns, such as
            "hotel-*", of agents to discover in each turn.
        state: Returns the state that the session of a task begins with, given its context.
        budget: What the task may use, across pauses and replicas.
        lifespan: Returns an async context manager, which each replica enters before its first
            task. What it yields is `ctx.resources`.
        stream: Send the text of the model to the task's callers as it is written. The model must
            support streaming.
        on_peer_failure: "tell_model" makes a peer's failure an error of its tool; "fail" makes it
            a failure of the task.
        conversations: Where conversations are stored. A task with a `context_id` then begins with
            the messages of earlier ones of its requester and user, but with a new session.
            Default: each task sees only its own.

    Raises:
        ConfigurationError: It is not an agent, or has no name, its client cannot be recorded, the
            output's type is missing, or a peer cannot be a tool.
    """
    if not isinstance(agent, Agent):
        problem = f"a {type(agent).__name__} is not an Agent of Agent Framework"
        raise ConfigurationError("durable", problem, "pass Agent(…)")
    chosen = name or agent.name
    if chosen is None:
        raise ConfigurationError("durable", "the agent has no name", 'write name="travel"')
    key = f"durable({chosen!r})"
    _check_client(agent, key)
    if output is str and agent.default_options.get("response_format") is not None:
        raise ConfigurationError(key, "the agent has a response_format", "write output=")
    return AgentFrameworkAgent(
        agent,
        name=chosen,
        version=version,
        input=input,
        prompt=prompt,
        output=output,
        description=agent.description,
        peers=peers,
        state=state,
        budget=budget,
        lifespan=lifespan,
        stream=stream,
        on_peer_failure=on_peer_failure,
        conversations=conversations,
    )


def _check_client(agent: Agent[Any], key: str) -> None:
    client: Any = agent.client
    if not (
        isinstance(client, FunctionInvocationLayer)
        and isinstance(client, ChatMiddlewareLayer)
        and client.function_invocation_configuration.get("enabled", True)
    ):
        problem = f"a {type(client).__name__} does not call tools and middleware"
        fix = "use a client with FunctionInvocationLayer and ChatMiddlewareLayer"
        raise ConfigurationError(key, problem, fix)
    if agent.default_options.get("conversation_id") is not None:
        problem = "the agent continues a conversation that its provider stores"
        raise ConfigurationError(key, problem, "remove conversation_id: the task has the messages")
    if agent.require_per_service_call_history_persistence:
        problem = "the agent stores its history after each request"
        fix = "remove require_per_service_call_history_persistence: the task has the messages"
        raise ConfigurationError(key, problem, fix)


def wrap(found: object, name: str | None) -> AgentFrameworkAgent[str, Any] | None:
    """Wrap an agent that an entrypoint names; see `meshpoint.agents.framework_objects`."""
    if not isinstance(found, Agent):
        return None
    schema = found.default_options.get("response_format")
    if schema is None:
        return durable(found, name=name)
    # A schema may also be a dict.
    is_type = isinstance(schema, type) and issubclass(schema, BaseModel)
    return durable(found, name=name, output=TypeAdapter(schema if is_type else JsonValue))
