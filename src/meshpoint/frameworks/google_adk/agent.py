"""`durable`: an agent of ADK as an agent of the mesh."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from importlib.metadata import version as installed_version
from typing import Any, ClassVar, TypeVar, overload

from google.adk.agents import BaseAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App, ResumabilityConfig
from google.adk.artifacts import BaseArtifactService
from google.adk.auth.credential_service.base_credential_service import BaseCredentialService
from google.adk.events import Event
from google.adk.memory import BaseMemoryService
from google.adk.runners import Runner
from google.adk.sessions import Session
from google.genai import types
from pydantic import JsonValue, TypeAdapter, ValidationError

from meshpoint.agents.peer import Addressable
from meshpoint.errors import (
    AgentFailed,
    AgentMisbehaved,
    ConfigurationError,
    IncompatibleState,
    MeshpointError,
)
from meshpoint.frameworks.base import (
    Answer,
    FrameworkAgent,
    MakeLifespan,
    OnPeerFailure,
    failure_text,
    is_approved,
)
from meshpoint.frameworks.budget import Budget, BudgetReached
from meshpoint.frameworks.google_adk.recording import Recorder
from meshpoint.frameworks.google_adk.session import (
    CONFIRMATION,
    OpenCalls,
    TaskSession,
    dump_event,
    read_events,
    state_after,
)
from meshpoint.frameworks.history import History, ToolCall, ToolCallKind, Turn
from meshpoint.frameworks.progress import show_tool
from meshpoint.model.calls import Done
from meshpoint.model.context import Context, TaskExecutionContext
from meshpoint.model.declared_type import TypeMismatch, first_problem, loggable_cause
from meshpoint.model.outcomes import Failed
from meshpoint.ports.conversations import Conversations

In = TypeVar("In")
Out = TypeVar("Out")

_LIBRARY = "google-adk"
_VERSION = installed_version(_LIBRARY)


class GoogleADKAgent(FrameworkAgent[In, Out]):
    """An agent of ADK as a `DurableAgent`; see `durable`."""

    framework: ClassVar[str] = "google-adk"
    library_name: ClassVar[str] = f"{_LIBRARY} "
    wait_hint: ClassVar[str] = (
        "a tool cannot wait: list its peers in durable(peers=[…]), so that the model calls them; "
        "for people, write require_confirmation=True, or use a LongRunningFunctionTool"
    )

    def __init__(
        self,
        app: App,
        *,
        root: BaseAgent,
        name: str,
        state: Callable[[Context], Mapping[str, Any]] | None,
        run_config: RunConfig | None,
        stream: bool,
        services: Mapping[str, Any],
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self._is_text = options["output"] is str
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ADK calls it experimental
            resumable = ResumabilityConfig(is_resumable=True)
        # Without it, ADK asks the model again before the peers have answered.
        self._app = app.model_copy(update={"resumability_config": resumable})
        self.wrapped, self._stream, self._state, self._services = root, stream, state, services
        # ADK gets whole responses, also if the callers see their fragments.
        whole = {"streaming_mode": RunConfig().streaming_mode}
        self._run_config = (run_config or RunConfig()).model_copy(update=whole)
        self._offered_to = frozenset(each.name for each in _walk(root))

    @property
    def library(self) -> str:
        """The installed version of ADK."""
        return _VERSION

    async def run(
        self, ctx: TaskExecutionContext, prompt: Any, history: History, answers: Sequence[Answer]
    ) -> Done[Out] | Turn:
        """Run the agent until it has answered, or waits; see `FrameworkAgent`."""
        events = self._read_events(history)
        recorder = Recorder(
            self.tools,
            session_id=str(ctx.task_id),
            root=self.wrapped.name,
            offered_to=self._offered_to,
            stream=self._stream,
            requests=int(str(history.extra.get("requests", 0))),
            max_requests=self._run_config.max_llm_calls,
            used_ids=(
                call.id for event in events for call in event.get_function_calls() if call.id
            ),
        )
        start: dict[str, Any] = {}
        if answers:
            events, start["new_message"] = _answer(events, answers, recorder)
        elif history.extra:  # the budget has stopped the last request to the model
            start["invocation_id"] = events[-1].invocation_id
        else:
            start["new_message"] = _user_message(prompt)
            if self._state is not None:
                start["state_delta"] = copy.deepcopy(dict(self._state(ctx)))
        session = self._open_session(ctx, events)
        is_stopped = False
        try:
            await self._run_agent(ctx, session, recorder, start)
        except BudgetReached:
            is_stopped = True
        added = session.events[len(history.messages) :]
        waiting = OpenCalls(session.events)
        if not (waiting.calls or is_stopped):
            history.end(lambda: [*history.messages, *map(dump_event, added)])
            return Done(self._read_output(added))
        if len({event.branch for event in waiting.turns}) > 1:
            raise AgentMisbehaved(
                "agents that run in parallel wait for peers at the same time: let only one wait"
            )
        calls = [] if is_stopped else _tool_calls(waiting, recorder)
        messages = [*history.messages, *map(dump_event, added)]
        extra: dict[str, JsonValue] = {"requests": recorder.requests}
        return Turn(messages, calls, recorder.offered, extra)

    async def _run_agent(
        self,
        ctx: TaskExecutionContext,
        session: Session,
        recorder: Recorder,
        start: Mapping[str, Any],
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the class of an agent
            root = self.wrapped.clone()
        update = {"root_agent": root, "plugins": [recorder, *self._app.plugins]}
        runner = Runner(
            app=self._app.model_copy(update=update),
            session_service=TaskSession(session),
            **self._services,
        )
        running = runner.run_async(
            user_id=session.user_id,
            session_id=session.id,
            run_config=self._run_config.model_copy(),
            **start,
        )
        try:
            async with aclosing(running):
                async for event in running:
                    if self._stream:
                        await _report_tools(ctx, event)
        except RuntimeError as error:  # ADK's form of an error in a plugin
            if isinstance(error.__cause__, MeshpointError):
                raise error.__cause__ from None
            raise

    def find_damage(self, message: JsonValue) -> str | None:
        """Check the author of an event: ADK reads any object."""
        if not isinstance(message, dict):
            return "is no object"
        author = message.get("author")
        return None if isinstance(author, str) and author else "has no author"

    def _open_session(self, ctx: TaskExecutionContext, events: list[Event]) -> Session:
        return Session(
            id=str(ctx.task_id),
            app_name=self._app.name,
            user_id=ctx.a2a_context.user_id or "user",
            state=state_after(events),
            events=list(events),
        )

    def _read_events(self, history: History) -> list[Event]:
        """Read the events of the last pause.

        Raises:
            IncompatibleState: This version of ADK cannot read them, or would lose a part.
        """
        try:
            events = read_events(history.messages)
        except ValidationError as error:
            problem = f"cannot read it: {first_problem(error)}"
            raise self.refuse_history(history, problem) from loggable_cause(error)
        self.check_complete(history, lambda: [dump_event(each) for each in events])
        return events

    def _read_output(self, events: Sequence[Event]) -> Any:
        """The output: the last text of an agent, or what a task has finished with.

        Raises:
            AgentFailed: The model has returned an error.
        """
        for event in reversed(events):
            if event.error_code is not None:
                raise AgentFailed(f"the model failed: {event.error_code}: {event.error_message}")
            text = _text_of(event)
            if event.author != "user" and (text or event.output is not None):
                return self._convert(text if event.output is None else event.output)
        return self._convert("")

    def _convert(self, output: Any) -> Any:
        if self._is_text:
            return output
        try:
            return self._output.read(json.loads(output) if isinstance(output, str) else output)
        except (ValueError, TypeMismatch) as error:
            raise AgentFailed(f"output of {self.name}: {error}") from error


def _walk(agent: BaseAgent) -> Iterator[BaseAgent]:
    yield agent
    for each in agent.sub_agents:
        yield from _walk(each)


def _text_of(event: Event) -> str:
    parts = (event.content.parts if event.content else None) or ()
    return "".join(part.text for part in parts if part.text and not part.thought)


def _user_message(prompt: Any) -> types.Content:
    if isinstance(prompt, types.Content):
        return prompt
    return types.Content(role="user", parts=[types.Part(text=prompt)])


def _answer(
    events: list[Event], answers: Sequence[Answer], recorder: Recorder
) -> tuple[list[Event], types.Content]:
    """The events of a session with the results of its calls, and the message that continues it.

    Raises:
        IncompatibleState: The session waits for other calls.
    """
    waiting = OpenCalls(events)
    if [call.id for call in waiting.calls] != [each.call.id for each in answers]:
        raise IncompatibleState("its session waits for other calls")
    results, decisions = dict[str, dict[str, Any]](), dict[str, bool]()
    for answer in answers:
        call, outcome = answer.call, answer.outcome
        if call.kind is ToolCallKind.APPROVAL:
            decisions[call.id], reason = is_approved(answer)
            if decisions[call.id]:
                recorder.approved[call.id] = call.arguments  # what the question has shown
            else:
                recorder.refused[call.id] = reason
        elif isinstance(outcome, Failed):
            results[call.id] = {"error": failure_text(outcome)}
        else:
            value = outcome.value
            results[call.id] = value if isinstance(value, dict) else {"result": value}
    message = waiting.results(results)
    if not decisions:
        return events, message
    if message.parts:  # ADK shows the model no message with decisions, so they need two
        turn = waiting.turns[-1]
        event = Event(
            author="user", content=message, invocation_id=turn.invocation_id, branch=turn.branch
        )
        events = [*events, event]
    return events, waiting.decisions(decisions)


def _tool_calls(waiting: OpenCalls, recorder: Recorder) -> list[ToolCall]:
    calls = []
    for call in waiting.calls:
        assert call.id is not None
        assert call.name is not None
        arguments = recorder.shown.get(call.id, dict(call.args or {}))
        peer = recorder.offered.get(call.name)
        if call.id in waiting.confirmations:
            kind, peer = ToolCallKind.APPROVAL, None
        else:
            kind = ToolCallKind.QUESTION if peer is None else ToolCallKind.PEER
        name = None if peer is None else peer.peer.name
        calls.append(ToolCall(call.id, call.name, kind, arguments, name))
    return calls


async def _report_tools(ctx: TaskExecutionContext, event: Event) -> None:
    """Report to the callers of the task which tools run."""
    for call in event.get_function_calls():
        if call.name != CONFIRMATION:
            await show_tool(ctx, call.name or "", "called")
    for response in event.get_function_responses():
        await show_tool(ctx, response.name or "", "answered")


@overload
def durable(
    agent: BaseAgent | App,
    /,
    *,
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    state: Callable[[Context], Mapping[str, Any]] | None = None,
    run_config: RunConfig | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    artifact_service: BaseArtifactService | None = None,
    memory_service: BaseMemoryService | None = None,
    credential_service: BaseCredentialService | None = None,
    conversations: Conversations | None = None,
) -> GoogleADKAgent[str, str]: ...
@overload
def durable(
    agent: BaseAgent | App,
    /,
    *,
    output: type[Out] | TypeAdapter[Out],
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    state: Callable[[Context], Mapping[str, Any]] | None = None,
    run_config: RunConfig | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    artifact_service: BaseArtifactService | None = None,
    memory_service: BaseMemoryService | None = None,
    credential_service: BaseCredentialService | None = None,
    conversations: Conversations | None = None,
) -> GoogleADKAgent[str, Out]: ...
@overload
def durable(
    agent: BaseAgent | App,
    /,
    *,
    input: type[In] | TypeAdapter[In],
    prompt: Callable[[In], str | types.Content],
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    state: Callable[[Context], Mapping[str, Any]] | None = None,
    run_config: RunConfig | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    artifact_service: BaseArtifactService | None = None,
    memory_service: BaseMemoryService | None = None,
    credential_service: BaseCredentialService | None = None,
    conversations: Conversations | None = None,
) -> GoogleADKAgent[In, str]: ...
@overload
def durable(
    agent: BaseAgent | App,
    /,
    *,
    input: type[In] | TypeAdapter[In],
    prompt: Callable[[In], str | types.Content],
    output: type[Out] | TypeAdapter[Out],
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    state: Callable[[Context], Mapping[str, Any]] | None = None,
    run_config: RunConfig | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    artifact_service: BaseArtifactService | None = None,
    memory_service: BaseMemoryService | None = None,
    credential_service: BaseCredentialService | None = None,
    conversations: Conversations | None = None,
) -> GoogleADKAgent[In, Out]: ...
def durable(
    agent: BaseAgent | App,
    /,
    *,
    input: Any = str,
    prompt: Callable[[Any], str | types.Content] | None = None,
    output: Any = str,
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    state: Callable[[Context], Mapping[str, Any]] | None = None,
    run_config: RunConfig | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    artifact_service: BaseArtifactService | None = None,
    memory_service: BaseMemoryService | None = None,
    credential_service: BaseCredentialService | None = None,
    conversations: Conversations | None = None,
) -> GoogleADKAgent[Any, Any]:
    """Make an agent or an app of ADK an agent of the mesh.

        travel = durable(
            planner,
            input=Trip,
            prompt=lambda trip: f"{trip.days} days in {trip.city}",
            peers=[flights, hotels],
        )

    Its model sees the peers as tools, as do the models of its sub-agents. When a turn calls some
    of them, the task pauses once, until all have answered. The session is part of the task. Model
    requests and tools are steps: after a crash, recorded ones do not run again. A tool with
    `require_confirmation` asks the question `APPROVAL` first. A long-running tool that returns
    nothing asks a question with the tool's name, whose answer is its result.

    Args:
        agent: The agent, or the app. It stays usable by itself.
        input: The type of the requests. Default: a string, which is the prompt.
        prompt: Returns the prompt for a request.
        output: The type of the result, which the model writes as JSON. Default: its text.
        name: The name in the mesh. Default: the agent's, or the app's.
        version: The version of the stored state. Change it if the new agent cannot continue the
            sessions of the old one.
        peers: The peers that the model may call: agents, `Peer`s, or names and patterns, such as
            "hotel-*", of agents to discover in each turn.
        state: Returns the state that the session of a task begins with, given its context.
        run_config: Options of each run. `max_llm_calls` holds for the whole task, across pauses
            and replicas. `streaming_mode` has no effect.
        budget: What the task may use, across pauses and replicas.
        lifespan: Returns an async context manager, which each replica enters before its first
            task. What it yields is `ctx.resources`.
        stream: Send the text of the model to the task's callers as it is written. The model must
            support streaming.
        on_peer_failure: "tell_model" makes a peer's failure an error of its tool; "fail" makes it
            a failure of the task.
        artifact_service: Where the agent's artifacts are.
        memory_service: Where the agent's memories are.
        credential_service: Where the credentials of its tools are.
        conversations: Where conversations are stored. The session of a task with a `context_id`
            then begins with the events and the state of earlier ones of its requester and user.
            Default: each task has a new session.

    Raises:
        ConfigurationError: It is not an agent or an app, the output's type is missing, or a peer
            cannot be a tool.
    """
    if isinstance(agent, App):
        app, root = agent, agent.root_agent
    elif not isinstance(agent, BaseAgent):
        problem = f"a {type(agent).__name__} is not an agent or an App of ADK"
        raise ConfigurationError("durable", problem, "pass LlmAgent(…)")
    else:
        app, root = App(name=agent.name, root_agent=agent), agent
    chosen = name or app.name
    key = f"durable({chosen!r})"
    if not isinstance(root, BaseAgent):
        fix = "give it an agent, for example an LlmAgent"
        raise ConfigurationError(key, f"the app's root is a {type(root).__name__}", fix)
    if output is str and getattr(root, "output_schema", None) is not None:
        raise ConfigurationError(key, "the agent has an output_schema", "write output=")
    return GoogleADKAgent(
        app,
        root=root,
        name=chosen,
        version=version,
        input=input,
        prompt=prompt,
        output=output,
        description=root.description or None,
        peers=peers,
        state=state,
        run_config=run_config,
        budget=budget,
        lifespan=lifespan,
        stream=stream,
        on_peer_failure=on_peer_failure,
        services={
            "artifact_service": artifact_service,
            "memory_service": memory_service,
            "credential_service": credential_service,
        },
        conversations=conversations,
    )


def wrap(found: object, name: str | None) -> GoogleADKAgent[str, Any] | None:
    """Wrap an object that an entrypoint names; see `meshpoint.agents.framework_objects`."""
    if not isinstance(found, BaseAgent | App):
        return None
    root = found.root_agent if isinstance(found, App) else found
    schema = getattr(root, "output_schema", None)
    if schema is None:
        return durable(found, name=name)
    # A schema may also be a dict in the form of Google's API.
    is_type = not isinstance(schema, dict | types.Schema)
    return durable(found, name=name, output=TypeAdapter(schema if is_type else JsonValue))
