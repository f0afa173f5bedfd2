"""`durable`: an agent of Pydantic AI as an agent of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from importlib.metadata import version as installed_version
from typing import Any, ClassVar, TypeVar, overload

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_ai import Agent, UsageLimits
from pydantic_ai._output import OutputSchema
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.conversation import Conversation
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter
from pydantic_ai.models import Model
from pydantic_ai.tools import DeferredToolRequests, RunContext
from pydantic_ai.usage import RunUsage

from meshpoint.agents.peer import Addressable
from meshpoint.errors import ConfigurationError
from meshpoint.frameworks.base import Answer, FrameworkAgent, MakeLifespan, OnPeerFailure
from meshpoint.frameworks.budget import Budget, BudgetReached
from meshpoint.frameworks.history import History, Turn
from meshpoint.frameworks.pydantic_ai.durability import MeshpointDurability
from meshpoint.frameworks.pydantic_ai.toolset import deferred_results, find_calls, open_run
from meshpoint.model.calls import Done
from meshpoint.model.context import Context, TaskExecutionContext
from meshpoint.model.declared_type import first_problem, loggable_cause
from meshpoint.ports.conversations import Conversations

In = TypeVar("In")
Out = TypeVar("Out")
Deps = TypeVar("Deps")

_LIBRARY = "pydantic-ai-slim"
_VERSION = installed_version(_LIBRARY)
_USAGE: TypeAdapter[RunUsage] = TypeAdapter(RunUsage)


class PydanticAIAgent(FrameworkAgent[In, Out]):
    """An agent of Pydantic AI as a `DurableAgent`; see `durable`."""

    framework: ClassVar[str] = "pydantic-ai"
    library_name: ClassVar[str] = f"{_LIBRARY} "
    wait_hint: ClassVar[str] = (
        "a tool cannot wait: list its peers in durable(peers=[…]), so that the model calls them; "
        "for people, write requires_approval=True, or raise CallDeferred"
    )

    def __init__(
        self,
        wrapped: AbstractAgent[Any, Out],
        *,
        deps: Callable[[Context], Any] | None,
        usage_limits: UsageLimits | None,
        stream: bool,
        peers: Sequence[Addressable[Any, Any] | str],
        on_peer_failure: OnPeerFailure,
        models: Mapping[str, Model] | None,
        name: str,
        **options: Any,
    ) -> None:
        super().__init__(name, peers=peers, on_peer_failure=on_peer_failure, **options)
        self.wrapped, self._deps, self._usage_limits = wrapped, deps, usage_limits
        self._durability = MeshpointDurability(
            peers=peers,
            stream=stream,
            on_peer_failure=on_peer_failure,
            models=models,
            name=name,
        )
        self._durability.use_peers(self.tools)
        key = f"durable({name!r})"
        if MeshpointDurability.from_agent(wrapped) is not None:
            fix = "give the peers to durable(), or call it in a function agent"
            raise ConfigurationError(key, "the agent has MeshpointDurability already", fix)
        outputs = _list_outputs(wrapped)
        self._can_defer = DeferredToolRequests in outputs
        self._run_output_type = [*outputs, DeferredToolRequests]
        try:
            self._durability.for_agent(wrapped)
        except UserError as error:
            raise ConfigurationError(key, str(error), "change the agent") from error

    @property
    def library(self) -> str:
        """The installed version of Pydantic AI."""
        return _VERSION

    async def run(
        self, ctx: TaskExecutionContext, prompt: Any, history: History, answers: Sequence[Answer]
    ) -> Done[Out] | Turn:
        """Run the agent until it has an output, or waits; see `FrameworkAgent`."""
        with open_run() as run:
            try:
                agent, output_type = self._deferring()
                result = await agent.run(
                    prompt,
                    output_type=output_type,
                    conversation=self._read_conversation(history) if history.messages else None,
                    deferred_tool_results=deferred_results(answers) if answers else None,
                    deps=None if self._deps is None else self._deps(ctx),
                    usage_limits=self._usage_limits,
                    capabilities=[self._durability],
                )
            except BudgetReached:
                if run.request is None:
                    raise
                return _stop(run.request)
            messages, output = result.all_messages(), result.output
            if not isinstance(output, DeferredToolRequests):
                history.end(lambda: _dump(messages))
                return Done(output)
            calls = find_calls(output, messages, run)
        extra = _extra(result.usage, result.conversation.conversation_id)
        return Turn(_dump(messages), calls, run.tools, extra)

    def _deferring(self) -> tuple[AbstractAgent[Any, Any], Any]:
        """The agent, and the output types of a run that can end with deferred calls.

        With validators, Pydantic AI refuses output types for one run, so they belong to a copy of
        the agent, which shares the rest with it. Wrappers of agents cannot be copied.
        """
        if self._can_defer:
            return self.wrapped, None
        if not (isinstance(self.wrapped, Agent) and self.wrapped._output_validators):
            return self.wrapped, self._run_output_type
        copied = copy(self.wrapped)
        copied._output_type = self._run_output_type
        copied._output_schema = OutputSchema.build(self._run_output_type)
        return copied, None

    def _read_conversation(self, history: History) -> Conversation:
        """Read the messages and the usage of the last pause.

        Raises:
            IncompatibleState: This version of Pydantic AI cannot read them, or would lose a part.
        """
        try:
            messages = ModelMessagesTypeAdapter.validate_python(history.messages)
            usage = _USAGE.validate_python(history.extra.get("usage", {}))
        except ValidationError as error:
            problem = f"cannot read it: {first_problem(error)}"
            raise self.refuse_history(history, problem) from loggable_cause(error)
        self.check_complete(history, lambda: _dump(messages))
        conversation = Conversation(messages=messages, usage=usage)
        found = history.extra.get("conversation") or messages[-1].conversation_id
        if found is not None:
            conversation.conversation_id = str(found)
        return conversation


def _stop(request: RunContext[Any]) -> Turn:
    """The turn of a run that must not send its next request yet."""
    return Turn(_dump(request.messages), [], extra=_extra(request.usage, request.conversation_id))


def _extra(usage: RunUsage, conversation_id: str | None) -> dict[str, JsonValue]:
    dumped: JsonValue = _USAGE.dump_python(usage, mode="json")
    return {"usage": dumped, "conversation": conversation_id}


def _dump(messages: list[ModelMessage]) -> list[Any]:
    # pydantic 2.12.0 warns of usages that are complete.
    dumped: list[Any] = ModelMessagesTypeAdapter.dump_python(messages, mode="json", warnings=False)
    return dumped


@overload
def durable(
    agent: AbstractAgent[Deps, Out],
    /,
    *,
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    deps: Callable[[Context], Deps] | None = None,
    usage_limits: UsageLimits | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    models: Mapping[str, Model] | None = None,
    conversations: Conversations | None = None,
) -> PydanticAIAgent[str, Out]: ...
@overload
def durable(
    agent: AbstractAgent[Deps, Out],
    /,
    *,
    input: type[In] | TypeAdapter[In],
    prompt: Callable[[In], str],
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    deps: Callable[[Context], Deps] | None = None,
    usage_limits: UsageLimits | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    models: Mapping[str, Model] | None = None,
    conversations: Conversations | None = None,
) -> PydanticAIAgent[In, Out]: ...
def durable(
    agent: AbstractAgent[Any, Any],
    /,
    *,
    input: Any = str,
    prompt: Callable[[Any], str] | None = None,
    name: str | None = None,
    version: str = "1",
    peers: Sequence[Addressable[Any, Any] | str] = (),
    deps: Callable[[Context], Any] | None = None,
    usage_limits: UsageLimits | None = None,
    stream: bool = True,
    on_peer_failure: OnPeerFailure = "tell_model",
    budget: Budget | None = None,
    lifespan: MakeLifespan | None = None,
    models: Mapping[str, Model] | None = None,
    conversations: Conversations | None = None,
) -> PydanticAIAgent[Any, Any]:
    """Make an agent of Pydantic AI an agent of the mesh.

        travel = durable(
            planner,
            input=Trip,
            prompt=lambda trip: f"{trip.days} days in {trip.city}",
            peers=[flights, hotels],
        )

    Its model sees the peers as tools. When a turn calls some of them, the task pauses once, until
    all have answered. Model requests and the agent's own tools are steps: after a crash, recorded
    ones do not run again. A tool with `requires_approval` asks the question `APPROVAL` first. A
    tool that raises `CallDeferred` asks a question with the tool's name, whose answer is its
    result.

    Args:
        agent: The agent. It stays usable by itself.
        input: The type of the requests. Default: a string, which is the prompt.
        prompt: Returns the prompt for a request.
        name: The name in the mesh. Default: the agent's own.
        version: The version of the stored state. Change it if the new agent cannot continue the
            conversations of the old one.
        peers: The peers that the model may call: agents, `Peer`s, or names and patterns, such as
            "hotel-*", of agents to discover in each turn.
        deps: Returns the dependencies of a segment, given its context. They are not stored.
        usage_limits: Limits of the whole task, across pauses and replicas. After a crash, they may
            miss what agents in tools have used; `budget` does not.
        stream: Send the text of the model to the task's callers as it is written. The model must
            support streaming.
        on_peer_failure: "tell_model" makes a peer's failure an error of its tool; "fail" makes it
            a failure of the task.
        budget: How many requests, tokens and how much money the task may use, and whether to ask
            a person for more.
        lifespan: Returns an async context manager, which each replica enters before its first
            task. What it yields is `ctx.resources`.
        models: Model objects other than the agent's own, by names of your choice, for example the
            models of a `ModelFallback`. Models given as strings need not be listed.
        conversations: Where conversations are stored. A task with a `context_id` then sees the
            messages of earlier ones of its requester and user. Default: each task sees only its
            own.

    Raises:
        ConfigurationError: It is not an agent, or has no name or no model, a toolset has no id, or
            a peer cannot be a tool.
    """
    if not isinstance(agent, AbstractAgent):
        problem = f"a {type(agent).__name__} is not an agent of Pydantic AI"
        raise ConfigurationError("durable", problem, "pass Agent(…)")
    chosen = name or agent.name
    if chosen is None:
        raise ConfigurationError("durable", "the agent has no name", 'write name="travel"')
    return PydanticAIAgent(
        agent,
        name=chosen,
        version=version,
        input=input,
        prompt=prompt,
        output=_output_type(agent),
        description=_description(agent),
        peers=peers,
        deps=deps,
        usage_limits=usage_limits,
        stream=stream,
        on_peer_failure=on_peer_failure,
        budget=budget,
        lifespan=lifespan,
        models=models,
        conversations=conversations,
    )


def wrap(found: object, name: str | None) -> PydanticAIAgent[str, Any] | None:
    """Wrap an agent that an entrypoint names; see `meshpoint.agents.framework_objects`."""
    return durable(found, name=name) if isinstance(found, AbstractAgent) else None


def _output_type(agent: AbstractAgent[Any, Any]) -> Any:
    """The type of the output, for the agent's own peer. JSON if it is not a plain type."""
    outputs = [each for each in _list_outputs(agent) if each is not DeferredToolRequests]
    return outputs[0] if len(outputs) == 1 and isinstance(outputs[0], type) else Any


def _list_outputs(agent: AbstractAgent[Any, Any]) -> list[Any]:
    declared: Any = agent.output_type
    return list(declared) if isinstance(declared, list | tuple) else [declared]


def _description(agent: AbstractAgent[Any, Any]) -> str | None:
    described = getattr(agent, "description", None)
    return described if isinstance(described, str) else None
