"""`durable`: an agent of the OpenAI Agents SDK as an agent of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version as installed_version
from typing import Any, ClassVar, overload

from agents import (
    Agent,
    AgentOutputSchemaBase,
    FunctionTool,
    ItemHelpers,
    RunConfig,
    RunContextWrapper,
    RunHooks,
    Runner,
    RunState,
    ToolApprovalItem,
    TResponseInputItem,
)
from agents.lifecycle import RunHooksBase
from agents.result import RunResult
from agents.run import DEFAULT_MAX_TURNS
from pydantic import JsonValue, TypeAdapter
from typing_extensions import TypeVar

from meshpoint.agents.peer import Addressable
from meshpoint.errors import ConfigurationError, IncompatibleState, InvalidInput
from meshpoint.frameworks.base import (
    Answer,
    FrameworkAgent,
    MakeLifespan,
    OnPeerFailure,
    is_approved,
)
from meshpoint.frameworks.budget import Budget
from meshpoint.frameworks.history import History, ToolCall, ToolCallKind, Turn
from meshpoint.frameworks.openai_agents.context import StoredContext
from meshpoint.frameworks.openai_agents.recording import (
    STOP,
    RecordingModel,
    Run,
    current_run,
    fits,
    install,
    read_arguments,
    validate,
    walk,
)
from meshpoint.frameworks.openai_agents.state import (
    dump_items,
    dump_state,
    load_state,
    read_earlier,
    with_distinct_calls,
)
from meshpoint.frameworks.peers import PeerTool
from meshpoint.frameworks.progress import show_tool
from meshpoint.model.calls import Done
from meshpoint.model.context import Context, TaskExecutionContext
from meshpoint.ports.conversations import Conversations

In = TypeVar("In")
Out = TypeVar("Out", default=Any)

_LIBRARY = "openai-agents"
_VERSION = installed_version(_LIBRARY)
_NEEDED: dict[str, dict[str, Any]] = {
    "message": {"role": str, "content": str | list},
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "function_call_output": {"call_id": str, "output": str | list},
}
"""Fields of the most common items, by their type, and the types of the fields."""
_CONTEXT = "stored_context"
"""Key of the stored context of a run."""


class OpenAIAgentsAgent(FrameworkAgent[In, Out]):
    """An agent of the OpenAI Agents SDK as a `DurableAgent`; see `durable`."""

    framework: ClassVar[str] = "openai-agents"
    library_name: ClassVar[str] = f"{_LIBRARY} "
    wait_hint: ClassVar[str] = (
        "a tool cannot wait: list its peers in durable(peers=[…]), so that the model calls them; "
        "for people, write needs_approval=True"
    )

    def __init__(
        self,
        wrapped: Agent[Any],
        *,
        name: str,
        context: Callable[[Context], Any] | None,
        store_context: bool,
        run_config: RunConfig | None,
        hooks: RunHooks[Any] | None,
        max_turns: int | None,
        stream: bool,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        _check_options(self.name, context, store_context, run_config, hooks, max_turns)
        self.wrapped, self._context, self._hooks = wrapped, context, hooks
        self._store_context = store_context
        self._max_turns, self._stream = max_turns, stream
        config = run_config or RunConfig()
        self._run_config = RecordingModel(config.model_provider, config.model).use_in(config)
        for agent in walk(wrapped):
            self.tools.check_names([each.name for each in agent.tools])

    @property
    def library(self) -> str:
        """The installed version of the SDK."""
        return _VERSION

    async def run(
        self, ctx: TaskExecutionContext, prompt: Any, history: History, answers: Sequence[Answer]
    ) -> Done[Out] | Turn:
        """Run the agent until it has an output, or waits; see `FrameworkAgent`."""
        for agent in walk(self.wrapped, into_tools=True):
            install(agent)
        earlier = self._read_earlier(history)
        context = None if self._context is None else self._context(ctx)
        stored = StoredContext(context) if self._store_context else None
        if stored is not None and (earlier_context := history.extra.get(_CONTEXT)) is not None:
            stored.load(earlier_context)
        run = Run(
            self.tools,
            self._stream,
            {answer.call.id: answer for answer in answers},
            {*_used_ids([*history.messages, *with_distinct_calls(earlier), history.extra])},
            frozenset(id(each) for each in walk(self.wrapped)),
            self.tools.known,
            self.budget is not None and self.budget.when_exceeded == "ask",
            stored,
        )
        token = current_run.set(run)
        try:
            state = await self._open_state(context, prompt, history, answers)
            result = await self._run_until_all_fit(run, state)
            if not result.interruptions:
                history.end(lambda: dump_items(result, earlier))
                return Done(result.final_output)
            messages, extra = dump_state(result.to_state(), earlier)
            if stored is not None:
                extra[_CONTEXT] = stored.dump()
            if result.interruptions[0].name == STOP:
                if isinstance(turns := extra["max_turns"], int):
                    extra["max_turns"] = turns + 1  # the stop has used one
                return Turn(messages, [], extra=extra)
            calls = [
                _tool_call(run, index, each) for index, each in enumerate(result.interruptions)
            ]
            if self._stream:
                for call in calls:
                    await show_tool(ctx, call.tool, "called")
            return Turn(messages, calls, run.offered, extra)
        finally:
            current_run.reset(token)

    async def _run_until_all_fit(self, run: Run, state: RunState[Any]) -> RunResult:
        """Run the agent. Calls with arguments that do not fit do not wait: they fail at once."""
        while True:
            result: RunResult = await Runner.run(
                self.wrapped, state, hooks=self._hooks, run_config=self._run_config
            )
            misfits = [each for each in result.interruptions if not _can_wait(run, each)]
            if not misfits:
                return result
            state = result.to_state()
            for each in misfits:
                state.approve(each)

    async def _open_state(
        self,
        context: Any,
        prompt: Any,
        history: History,
        answers: Sequence[Answer],
    ) -> RunState[Any]:
        """The state that a run starts with.

        Raises:
            IncompatibleState: This version of the SDK cannot read it, or would lose a part.
        """
        if not history.extra:
            if history.messages:
                earlier = with_distinct_calls(history.messages)
                prompt = [*earlier, *ItemHelpers.input_to_new_input_list(prompt)]
            wrapper = RunContextWrapper(context=context)
            return RunState(wrapper, prompt, self.wrapped, self._max_turns)
        try:
            extra = {key: each for key, each in history.extra.items() if key != _CONTEXT}
            state = await load_state(self.wrapped, history.messages, extra, context)
        except Exception as error:  # of any type, depending on what is stored
            raise self.refuse_history(history, f"cannot read it: {error}") from error
        self.check_complete(history, lambda: dump_state(state, read_earlier(history))[0])
        waiting = state.get_interruptions()
        if waiting and waiting[0].name == STOP:  # a person has allowed more requests
            state.approve(waiting[0])
            return state
        ids = [_call_id(index, each) for index, each in enumerate(waiting)]
        if ids != [answer.call.id for answer in answers]:
            raise IncompatibleState("its run waits for other calls")
        for interruption, answer in zip(waiting, answers, strict=True):
            if answer.call.kind is ToolCallKind.APPROVAL:
                approved, message = is_approved(answer)
                if not approved:
                    state.reject(interruption, rejection_message=message)
                    continue
            state.approve(interruption)
        return state

    def find_damage(self, message: JsonValue) -> str | None:
        """Check the fields that each item needs: the SDK sends others to the model."""
        if not isinstance(message, dict):
            return "is no object"
        kind = message.get("type", "message")
        if not isinstance(kind, str):
            return f"has the type {kind!r}"
        needed = _NEEDED.get(kind, {})
        for name, type_ in needed.items():
            if not isinstance(message.get(name), type_):
                return f"is a {kind} without {name!r}"
        return None

    def _read_earlier(self, history: History) -> list[JsonValue]:
        """Read the items of earlier tasks. The SDK sends fields that it does not know.

        Raises:
            IncompatibleState: One is no item.
        """
        earlier = read_earlier(history)
        for each in earlier:
            if not (isinstance(each, dict) and each.keys() & {"type", "role"}):
                raise self.refuse_history(history, "cannot read an item of an earlier task")
        return earlier


def _used_ids(stored: JsonValue) -> Iterator[str]:
    """The ids of the calls in a stored run, also of agents as tools that wait."""
    if isinstance(stored, list):
        for each in stored:
            yield from _used_ids(each)
    elif isinstance(stored, dict):
        if isinstance(call := stored.get("call_id"), str):
            yield call
        for each in stored.values():
            yield from _used_ids(each)


def _call_id(index: int, interruption: ToolApprovalItem) -> str:
    return interruption.call_id or str(index)


def _can_wait(run: Run, interruption: ToolApprovalItem) -> bool:
    """Whether the arguments of a call fit."""
    peer = _find_peer(run, interruption)
    if peer is None:
        return fits(_find_tool(run, interruption), interruption.arguments)
    try:
        peer.check(read_arguments(interruption.arguments))
    except InvalidInput:
        return False
    return True


def _find_peer(run: Run, interruption: ToolApprovalItem) -> PeerTool | None:
    is_offered = id(interruption.agent) in run.offered_to
    return run.offered.get(interruption.name or "") if is_offered else None


def _find_tool(run: Run, interruption: ToolApprovalItem) -> FunctionTool | None:
    return run.tools.get((id(interruption.agent), interruption.name or ""))


def _tool_call(run: Run, index: int, interruption: ToolApprovalItem) -> ToolCall:
    call_id, name = _call_id(index, interruption), interruption.name or "tool"
    if (peer := _find_peer(run, interruption)) is not None:
        arguments = read_arguments(interruption.arguments)
        return ToolCall(call_id, name, ToolCallKind.PEER, arguments, peer.peer.name)
    shown = validate(_find_tool(run, interruption), interruption.arguments)
    return ToolCall(call_id, name, ToolCallKind.APPROVAL, shown)


def _check_options(
    name: str,
    context: Any,
    store_context: bool,
    run_config: object,
    hooks: object,
    max_turns: object,
) -> None:
    """Refuse options that the SDK would fail on in the first task.

    Raises:
        ConfigurationError: One is wrong.
    """
    key = f"durable({name!r})"
    if not (context is None or callable(context)):
        problem = f"context is a {type(context).__name__}"
        raise ConfigurationError(key, problem, "write context=lambda ctx: …")
    if store_context and context is None:
        raise ConfigurationError(key, "store_context=True without context=", "write context=…")
    if not (run_config is None or isinstance(run_config, RunConfig)):
        raise ConfigurationError(key, f"run_config is {run_config!r}", "write RunConfig(…)")
    if not (hooks is None or isinstance(hooks, RunHooksBase)):
        raise ConfigurationError(key, f"hooks is {hooks!r}", "pass an object of RunHooks")
    is_number = isinstance(max_turns, int) and not isinstance(max_turns, bool)
    if not (max_turns is None or (is_number and max_turns > 0)):  # type: ignore[operator]
        raise ConfigurationError(key, f"max_turns is {max_turns!r}", "write max_turns=10")


@overload
def durable(
    agent: Agent[Any],
    /,
    *,
    name: str | None = None,
    version: str = "1",
    output: type[Out] | TypeAdapter[Out] = ...,
    peers: Sequence[Addressable[Any, Any] | str] = (),
    context: Callable[[Context], Any] | None = None,
    store_context: bool = False,
    run_config: RunConfig | None = None,
    hooks: RunHooks[Any] | None = None,
    max_turns: int | None = DEFAULT_MAX_TURNS,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    description: str | None = None,
    conversations: Conversations | None = None,
) -> OpenAIAgentsAgent[str, Out]: ...
@overload
def durable(
    agent: Agent[Any],
    /,
    *,
    input: type[In] | TypeAdapter[In],
    prompt: Callable[[In], str | list[TResponseInputItem]],
    name: str | None = None,
    version: str = "1",
    output: type[Out] | TypeAdapter[Out] = ...,
    peers: Sequence[Addressable[Any, Any] | str] = (),
    context: Callable[[Context], Any] | None = None,
    store_context: bool = False,
    run_config: RunConfig | None = None,
    hooks: RunHooks[Any] | None = None,
    max_turns: int | None = DEFAULT_MAX_TURNS,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    description: str | None = None,
    conversations: Conversations | None = None,
) -> OpenAIAgentsAgent[In, Out]: ...
def durable(
    agent: Agent[Any],
    /,
    *,
    input: Any = str,
    prompt: Callable[[Any], Any] | None = None,
    name: str | None = None,
    version: str = "1",
    output: Any = None,
    peers: Sequence[Addressable[Any, Any] | str] = (),
    context: Callable[[Context], Any] | None = None,
    store_context: bool = False,
    run_config: RunConfig | None = None,
    hooks: RunHooks[Any] | None = None,
    max_turns: int | None = DEFAULT_MAX_TURNS,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    description: str | None = None,
    conversations: Conversations | None = None,
) -> OpenAIAgentsAgent[Any, Any]:
    """Make an agent of the OpenAI Agents SDK an agent of the mesh.

        travel = durable(
            planner,
            input=Trip,
            prompt=lambda trip: f"{trip.days} days in {trip.city}",
            peers=[flights, hotels],
        )

    Its model sees the peers as tools, as do the models of the agents that it hands over to. When a
    turn calls some of them, the task pauses once, until all have answered. Model requests and
    function tools are steps: after a crash, recorded ones do not run again. This also holds in
    agents that are tools, unless `as_tool` has a `run_config` of its own. A tool with
    `needs_approval` asks the question `APPROVAL` first.

    Args:
        agent: The agent. It stays usable by itself.
        input: The type of the requests. Default: a string, which is the prompt.
        prompt: Returns the prompt for a request, or the input items of the run.
        name: The name in the mesh. Default: the agent's own.
        version: The version of the stored state. Change it if the new agent cannot continue the
            tasks of the old one.
        output: The type of the result. Default: the agent's output type, or JSON if it has
            handoffs.
        peers: The peers that the models may call: agents, `Peer`s, or names and patterns, such as
            "hotel-*", of agents to discover in each turn.
        context: Returns the context of a segment's run, given the task's.
        store_context: Store what the run keeps in the context. It must be a model of Pydantic, a
            dataclass or a `dict`, of values that survive JSON. Default: each segment begins with
            what `context` returns.
        run_config: The configuration of the runs.
        hooks: The hooks of the runs. After a crash, they may be called again.
        max_turns: Maximum turns of the whole task, across pauses and replicas.
        stream: Send the text of the model to the task's callers as it is written, and say which
            tools run. The model must support streaming.
        on_peer_failure: "tell_model" makes a peer's failure the result of its tool; "fail" makes
            it a failure of the task.
        budget: How many requests, tokens and how much money the task may use, and whether to ask
            a person for more.
        lifespan: Returns an async context manager, which each replica enters before its first
            task. What it yields is `ctx.resources`.
        description: What the agent does, for its callers. Default: its `handoff_description`.
        conversations: Where conversations are stored. A task with a `context_id` then begins with
            the items of earlier ones of its requester and user, also if another agent has ended
            these after a handoff. Default: each task sees only its own.

    Raises:
        ConfigurationError: It is not an agent, or a peer cannot be a tool.
    """
    if not isinstance(agent, Agent):
        problem = f"a {type(agent).__name__} is not an agent of the OpenAI Agents SDK"
        raise ConfigurationError("durable", problem, "pass Agent(…)")
    return OpenAIAgentsAgent(
        agent,
        name=name or agent.name,
        version=version,
        input=input,
        prompt=prompt,
        output=_output_type(agent) if output is None else output,
        description=description or agent.handoff_description,
        peers=peers,
        context=context,
        store_context=store_context,
        run_config=run_config,
        hooks=hooks,
        max_turns=max_turns,
        stream=stream,
        on_peer_failure=on_peer_failure,
        budget=budget,
        lifespan=lifespan,
        conversations=conversations,
    )


def wrap(found: object, name: str | None) -> OpenAIAgentsAgent[str, Any] | None:
    """Wrap an agent that an entrypoint names; see `meshpoint.agents.framework_objects`."""
    return durable(found, name=name) if isinstance(found, Agent) else None


def _output_type(agent: Agent[Any]) -> Any:
    if agent.handoffs or isinstance(agent.output_type, AgentOutputSchemaBase):
        return Any
    return str if agent.output_type is None else agent.output_type
