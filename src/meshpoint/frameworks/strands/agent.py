"""`durable`: an agent of Strands as an agent of the mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict
from importlib.metadata import version as installed_version
from typing import Any, ClassVar, TypeVar, overload
from weakref import WeakKeyDictionary, WeakSet

from pydantic import BaseModel, TypeAdapter, ValidationError
from strands import Agent
from strands.agent.agent_result import AgentResult
from strands.handlers.callback_handler import PrintingCallbackHandler, null_callback_handler
from strands.interrupt import Interrupt
from strands.multiagent.base import MultiAgentBase
from strands.types.agent import Limits
from strands.types.content import ContentBlock
from strands.types.exceptions import EventLoopException, SnapshotException
from strands.types.tools import ToolUse

from meshpoint.agents.peer import Addressable
from meshpoint.errors import AgentFailed, ConfigurationError
from meshpoint.frameworks.base import Answer, FrameworkAgent, MakeLifespan, OnPeerFailure
from meshpoint.frameworks.budget import Budget, BudgetReached
from meshpoint.frameworks.history import History, Turn
from meshpoint.frameworks.strands.conversation import Conversation
from meshpoint.frameworks.strands.recording import Recorder, Spent, tool_uses
from meshpoint.frameworks.strands.waits import OpenCalls, give_answers, sort_interrupts
from meshpoint.model.calls import Done
from meshpoint.model.context import Context, TaskExecutionContext
from meshpoint.model.declared_type import first_problem, loggable_cause
from meshpoint.ports.conversations import Conversations

In = TypeVar("In")
Out = TypeVar("Out")
OutModel = TypeVar("OutModel", bound=BaseModel)

_LIBRARY = "strands-agents"
_VERSION = installed_version(_LIBRARY)
_NO_NAME = "Strands Agents"
"""The name of an agent without a name."""


class StrandsAgent(FrameworkAgent[In, Out]):
    """An agent of Strands as a `DurableAgent`; see `durable`."""

    framework: ClassVar[str] = "strands"
    library_name: ClassVar[str] = f"{_LIBRARY} "
    wait_hint: ClassVar[str] = (
        "a tool cannot wait: list its peers in durable(peers=[…]), so that the model calls them; "
        "for people, write tool_context.interrupt(…)"
    )

    def __init__(
        self,
        wrapped: Agent | Callable[[], Agent],
        *,
        name: str,
        invocation_state: Callable[[Context], Mapping[str, Any]] | None,
        limits: Limits | None,
        stream: bool,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self._key = f"durable({name!r})"
        self._is_text = options["output"] is str
        self._output_model = None if self._is_text else options["output"]
        self.wrapped, self._stream, self._invocation_state = wrapped, stream, invocation_state
        self._limits: Limits = limits or {}
        self._check_limits()
        if isinstance(wrapped, Agent):
            self._check_agent(wrapped)
            self._blank = wrapped.take_snapshot(preset="session")

    @property
    def library(self) -> str:
        """The installed version of Strands."""
        return _VERSION

    def _check_limits(self) -> None:
        if not isinstance(self._limits, Mapping):
            problem = f"limits is {self._limits!r}"
            raise ConfigurationError(self._key, problem, 'write limits={"turns": 30}')
        if unknown := self._limits.keys() - Limits.__annotations__:
            names = ", ".join(Limits.__annotations__)
            raise ConfigurationError(self._key, f"no limit is called {min(unknown)!r}", names)
        for name, limit in self._limits.items():
            if type(limit) is not int or limit < 1:
                problem = f"the limit of {name} is {limit!r}"
                raise ConfigurationError(self._key, problem, "write a positive integer")

    def _check_agent(self, agent: object) -> None:
        if not isinstance(agent, Agent):
            problem = f"a {type(agent).__name__} is not an agent of Strands"
            raise ConfigurationError(self._key, problem, "return Agent(…)")
        for attribute, problem, fix in _UNSUPPORTED:
            if getattr(agent, attribute, None):
                raise ConfigurationError(self._key, problem, fix)
        for tool in agent.tool_registry.registry.values():
            if getattr(tool, "_preserve_context", False):
                problem = f"the agent {tool.tool_name!r} in tools= has preserve_context=True"
                raise ConfigurationError(self._key, problem, "remove it")
        if agent.model.stateful:
            problem = "its model keeps the conversation at the provider"
            raise ConfigurationError(self._key, problem, "let the model be stateless")
        if self._is_text and getattr(agent, "_default_structured_output_model", None):
            problem = "the agent has a structured_output_model"
            raise ConfigurationError(self._key, problem, "write output=")

    def _check_new(self, agent: Agent) -> None:
        """Check that no other run has had the agent, or an agent that is its tool."""
        agents = _find_agents(agent)
        if used := [each.name for each in agents if each in _used]:
            problem = f"the agent {used[0]!r} has the conversation of another run"
            raise ConfigurationError(self._key, problem, "build each agent in the function")
        _used.update(agents)

    @asynccontextmanager
    async def _open_agent(self) -> AsyncIterator[Agent]:
        """An agent that no other run uses."""
        if isinstance(self.wrapped, Agent):
            locks = _locks.setdefault(self.wrapped, WeakKeyDictionary())
            async with locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                before = self.wrapped.take_snapshot(preset="session")
                self.wrapped.load_snapshot(self._blank)
                try:
                    with _silence(self.wrapped):
                        yield self.wrapped
                finally:
                    self.wrapped.load_snapshot(before)
            return
        agent = self.wrapped()
        self._check_agent(agent)
        self._check_new(agent)
        try:
            with _silence(agent):
                yield agent
        finally:
            agent.cleanup()

    async def run(
        self, ctx: TaskExecutionContext, prompt: Any, history: History, answers: Sequence[Answer]
    ) -> Done[Out] | Turn:
        """Run the agent until it has answered, or waits; see `FrameworkAgent`."""
        async with self._open_agent() as agent:
            conversation = self._read_conversation(agent, history)
            used = (*history.messages, *agent.messages)
            spent: Any = history.extra.get("spent", {})
            recorder = Recorder(
                agent,
                self.tools,
                stream=self._stream,
                limits=self._limits,
                spent=Spent(**spent),
                used_ids=[call["toolUseId"] for each in used for call in tool_uses(each)],
            )
            recorder.keep_decisions(history.extra.get("decisions", {}))
            if answers:
                prompt = give_answers(history, answers, recorder)
            waiting = OpenCalls(ctx, recorder)
            try:
                with recorder.use():
                    result, interrupts = await self._run_agent(ctx, agent, prompt)
                if result.stop_reason != "interrupt":
                    messages = conversation.dump_last()
                    history.end(lambda: messages)
                    return Done(self._read_output(result))
                for use, interrupt in sort_interrupts(agent, interrupts):
                    waiting.add(use, interrupt)
            except BudgetReached:
                pass  # `FrameworkAgent` asks a person
            messages, extra = conversation.dump()
            extra |= {"spent": asdict(recorder.spent), "approvals": waiting.approvals}
            if decisions := recorder.open_decisions():
                extra["decisions"] = decisions
            return Turn(messages, waiting.calls, recorder.offered, extra, waiting.waits)

    async def _run_agent(
        self, ctx: TaskExecutionContext, agent: Agent, prompt: Any
    ) -> tuple[AgentResult, list[tuple[ToolUse | None, Interrupt]]]:
        """Run the agent. Returns its result, and the interrupts with the calls that led to them.

        `prompt` is `None` if the next request to the model is due.
        """
        state = {} if self._invocation_state is None else dict(self._invocation_state(ctx))
        interrupts = dict[str, tuple[ToolUse | None, Interrupt]]()
        running: Any = agent.stream_async(
            prompt, invocation_state=state, structured_output_model=self._output_model
        )
        try:
            async with aclosing(running):
                async for event in running:
                    if (found := event.get("tool_interrupt_event")) is not None:
                        for each in found["interrupts"]:
                            interrupts[each.id] = (found["tool_use"], each)
        except EventLoopException as error:  # the form of any error after the first turn
            raise error.original_exception from None
        result: AgentResult = event["result"]
        for each in result.interrupts or ():
            interrupts.setdefault(each.id, (None, each))
        return result, [*interrupts.values()]

    def _read_conversation(self, agent: Agent, history: History) -> Conversation:
        """Read the conversation of the last pause, and give it to the agent.

        Raises:
            IncompatibleState: This version of Strands cannot read it, or would lose a part.
        """
        conversation = Conversation(agent, history)
        if not history.messages:
            return conversation
        try:
            self.check_complete(history, conversation.read_again)
            conversation.load()
        except ValidationError as error:
            problem = f"cannot read it: {first_problem(error)}"
            raise self.refuse_history(history, problem) from loggable_cause(error)
        except (ValueError, KeyError, TypeError, SnapshotException) as error:
            raise self.refuse_history(history, f"cannot load it: {error}") from error
        return conversation

    def _read_output(self, result: AgentResult) -> Any:
        """The text of the last message, or the structured output.

        Raises:
            AgentFailed: There is no structured output.
        """
        if self._is_text:
            return str(result).rstrip("\n")
        if result.structured_output is None:
            raise AgentFailed(f"the model has returned no structured output: {result.stop_reason}")
        return result.structured_output


_locks: WeakKeyDictionary[Agent, WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]]
_locks = WeakKeyDictionary()
"""Two wrapped agents may share an agent of Strands."""
_used: WeakSet[Agent] = WeakSet()
"""The agents that functions have built."""


def _find_agents(agent: Agent) -> list[Agent]:
    """The agent, and the agents that are its tools, and theirs."""
    found, left = list[Agent](), [agent]
    while left:
        each = left.pop()
        if each not in found:
            found.append(each)
            tools = each.tool_registry.registry.values()
            nested = (getattr(tool, "agent", None) for tool in tools)
            left += [one for one in nested if isinstance(one, Agent)]
    return found


_UNSUPPORTED = (
    ("_session_manager", "its session manager would keep the conversation", "remove it"),
    ("_background_tasks", "its background tasks would not survive a crash", "remove them"),
    ("_checkpointing", "checkpointing=True stops it after each turn", "remove it"),
)
"""Attributes of an agent that cannot be a task, the problem, and what to do."""


@contextmanager
def _silence(agent: Agent) -> Iterator[None]:
    """Do not print what the model writes, which is the default of Strands."""
    handler = agent.callback_handler
    if isinstance(handler, PrintingCallbackHandler):
        agent.callback_handler = null_callback_handler
    try:
        yield
    finally:
        agent.callback_handler = handler


@overload
def durable(
    agent: Agent | Callable[[], Agent],
    /,
    *,
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    invocation_state: Callable[[Context], Mapping[str, Any]] | None = None,
    limits: Limits | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    description: str | None = None,
    conversations: Conversations | None = None,
) -> StrandsAgent[str, str]: ...
@overload
def durable(
    agent: Agent | Callable[[], Agent],
    /,
    *,
    output: type[OutModel],
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    invocation_state: Callable[[Context], Mapping[str, Any]] | None = None,
    limits: Limits | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    description: str | None = None,
    conversations: Conversations | None = None,
) -> StrandsAgent[str, OutModel]: ...
@overload
def durable(
    agent: Agent | Callable[[], Agent],
    /,
    *,
    input: type[In] | TypeAdapter[In],
    prompt: Callable[[In], str | list[ContentBlock]],
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    invocation_state: Callable[[Context], Mapping[str, Any]] | None = None,
    limits: Limits | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    description: str | None = None,
    conversations: Conversations | None = None,
) -> StrandsAgent[In, str]: ...
@overload
def durable(
    agent: Agent | Callable[[], Agent],
    /,
    *,
    input: type[In] | TypeAdapter[In],
    prompt: Callable[[In], str | list[ContentBlock]],
    output: type[OutModel],
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    invocation_state: Callable[[Context], Mapping[str, Any]] | None = None,
    limits: Limits | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    description: str | None = None,
    conversations: Conversations | None = None,
) -> StrandsAgent[In, OutModel]: ...
def durable(
    agent: Agent | Callable[[], Agent],
    /,
    *,
    input: Any = str,
    prompt: Callable[[Any], str | list[ContentBlock]] | None = None,
    output: Any = str,
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    invocation_state: Callable[[Context], Mapping[str, Any]] | None = None,
    limits: Limits | None = None,
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    description: str | None = None,
    conversations: Conversations | None = None,
) -> StrandsAgent[Any, Any]:
    """Make an agent of Strands an agent of the mesh.

        def build_planner() -> Agent:
            return Agent(model, tools=[visas], callback_handler=None)

        travel = durable(
            build_planner,
            name="travel",
            input=Trip,
            prompt=lambda trip: f"{trip.days} days in {trip.city}",
            peers=[flights, hotels],
        )

    Its model sees the peers as tools. When a turn calls some of them, the task pauses once, until
    all have answered. The conversation is part of the task. Model requests and tools are steps:
    after a crash, recorded ones do not run again. A call that `HumanInTheLoop`, or another handler
    of `interventions=`, wants confirmed asks the question `APPROVAL` first. Any other interrupt
    asks a question with its name, whose answer is its response.

    Args:
        agent: A function that returns a new agent for each run. Or an agent: it has one
            conversation, so a replica runs its tasks one after another between their pauses.
        input: The type of the requests. Default: a string, which is the prompt.
        prompt: Returns the prompt for a request.
        output: The type of the result, a model of Pydantic. Default: the text of the last message.
        name: The name in the mesh. Default: the agent's. A function needs one.
        version: The version of the stored state. Change it if the new agent cannot continue the
            conversations of the old one.
        peers: The peers that the model may call: agents, `Peer`s, or names and patterns, such as
            "hotel-*", of agents to discover in each turn.
        invocation_state: Returns the invocation state of a run, given the task's context. It is
            not stored.
        limits: Limits of the whole task, across pauses and replicas.
        budget: What the task may use, across pauses and replicas.
        lifespan: Returns an async context manager, which each replica enters before its first
            task. What it yields is `ctx.resources`.
        stream: Send the text of the model to the task's callers as it is written, and which tools
            run.
        on_peer_failure: "tell_model" makes a peer's failure an error of its tool; "fail" makes it
            a failure of the task.
        description: What the agent does, for its callers. Default: the agent's.
        conversations: Where conversations are stored. A task with a `context_id` then begins with
            the messages of earlier ones of its requester and user, but with no other state.
            Default: each task sees only its own.

    Raises:
        ConfigurationError: It is not an agent or a function, it has no name, it keeps its
            conversation elsewhere, or a peer cannot be a tool.
    """
    if not callable(agent) or isinstance(agent, MultiAgentBase):
        problem = f"a {type(agent).__name__} is not an agent of Strands"
        raise ConfigurationError("durable", problem, "pass a function that returns Agent(…)")
    chosen = name or (agent.name if isinstance(agent, Agent) else _NO_NAME)
    if chosen == _NO_NAME:
        raise ConfigurationError("durable", "the agent has no name", 'write name="travel"')
    if output is not str and not (isinstance(output, type) and issubclass(output, BaseModel)):
        problem = f"output is {output!r}, not a model of Pydantic"
        raise ConfigurationError(f"durable({chosen!r})", problem, "write output=Plan")
    return StrandsAgent(
        agent,
        name=chosen,
        version=version,
        input=input,
        prompt=prompt,
        output=output,
        description=description or (agent.description if isinstance(agent, Agent) else None),
        peers=peers,
        invocation_state=invocation_state,
        limits=limits,
        budget=budget,
        lifespan=lifespan,
        stream=stream,
        on_peer_failure=on_peer_failure,
        conversations=conversations,
    )


def wrap(found: object, name: str | None) -> StrandsAgent[str, Any] | None:
    """Wrap an agent that an entrypoint names; see `meshpoint.agents.framework_objects`."""
    if not isinstance(found, Agent):
        return None
    output = getattr(found, "_default_structured_output_model", None)
    return (
        durable(found, name=name) if output is None else durable(found, name=name, output=output)
    )
