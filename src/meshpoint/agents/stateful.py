"""Agents as classes: one handler for the request, and one for each kind of pause."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeAlias, TypeVar, get_args, get_origin

from pydantic import BaseModel, JsonValue, ValidationError

from meshpoint.agents.peer import Peer, make_peer
from meshpoint.agents.planning import build_plan
from meshpoint.errors import (
    AgentMisbehaved,
    ConfigurationError,
    IncompatibleState,
    InvalidInput,
    InvalidOutput,
    PeerFailed,
)
from meshpoint.model.calls import ALL, Done, Join, Paused
from meshpoint.model.cards import AgentSkill
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import UnsentCall
from meshpoint.model.declared_type import DeclaredType, TypeMismatch, first_problem, loggable_cause
from meshpoint.model.messages import validate_agent_name
from meshpoint.model.outcomes import Failed, Ok, Outcomes
from meshpoint.model.questions import Question
from meshpoint.model.signals import Signal
from meshpoint.model.subtasks import Migration
from meshpoint.ports.agent import Plan, ResumeFrom

In = TypeVar("In")
State = TypeVar("State")
Out = TypeVar("Out")
Answer = TypeVar("Answer")


class Replies(Outcomes):
    """One outcome per call, by the key given to `ask`, in call order.

    `replies["flight"]` is the outcome as received, with its value as JSON. The methods return
    typed values.
    """

    def outcome(
        self, key: str, asked: Peer[Any, Answer] | Question[Answer] | Signal[Answer]
    ) -> Ok[Answer] | Failed:
        """Return the typed outcome of a call to a peer, a question or a signal.

        A value that does not fit the declared type becomes `Failed(INVALID)`.

        Raises:
            AgentMisbehaved: No call has this key.
        """
        if key not in self:
            raise AgentMisbehaved(
                f"this pause has no call {key!r}; it has {', '.join(map(repr, self))}"
            )
        outcome = self[key]
        return asked.read(outcome) if isinstance(asked, Peer) else asked.read_outcome(outcome)

    def value(
        self, key: str, asked: Peer[Any, Answer] | Question[Answer] | Signal[Answer]
    ) -> Answer:
        """Return the typed result of a call to a peer, the answer to a question, or a signal.

        Raises:
            PeerFailed: The call has no result, or the question was rejected. If not caught, this
                fails the task with the message.
            TimeoutError: No answer or signal arrived in time.
            AgentMisbehaved: No call has this key.
        """
        outcome = self.outcome(key, asked)
        if not isinstance(outcome, Failed):
            return outcome.value
        if isinstance(asked, Peer):
            raise PeerFailed(asked.name, outcome)
        raise asked.error_of(outcome)

    @property
    def failed(self) -> dict[str, Failed]:
        """The calls without a result, in call order."""
        return {key: outcome for key, outcome in self.items() if isinstance(outcome, Failed)}


Handler: TypeAlias = Callable[
    [TaskExecutionContext, State, Replies], Awaitable[Paused | Done[Out]]
]


class _StoredState(BaseModel):
    """Content of `Paused.state`: the handler that continues, and its state."""

    format: str
    handler: str
    state: JsonValue


class _ValidatedPause(Paused):
    """A pause built by `ask`, whose state is known to be readable."""


@dataclass(frozen=True, slots=True)
class _Types:
    input: DeclaredType[Any]
    state: DeclaredType[Any]
    output: DeclaredType[Any]


class StatefulAgent(ABC, Generic[In, State, Out]):
    """An agent with an explicit state that is passed from handler to handler.

        class Travel(StatefulAgent[Trip, TravelState, Itinerary]):
            name = "travel"

            async def on_request(self, ctx, trip):
                quotes = {"flight": flights(trip)}
                return self.ask(TravelState(trip=trip), quotes, then=self.on_quotes)

            async def on_quotes(self, ctx, state, replies):
                return self.done(Itinerary(flight=replies.value("flight", flights)))

    Nothing runs again after a pause, except a handler whose replica died. One instance serves all
    tasks concurrently: keep what belongs to a task in its state, never on `self`.

    A new release reads the states of the old one as long as the handler still exists under its
    name and the state model accepts them (give new fields a default). Otherwise raise `version`,
    and list in `reads` the earlier versions that are still accepted, for example by a
    `model_validator(mode="before")`.

    Handlers may record work with `ctx.subtask`. The `subtasks`, `type`, `exclusive`, `preserve`,
    `migrations` and `config` of `@agent` are class attributes of the same names here (`type` is
    `operation_type`, `config` is `agent_config`).

    Raises:
        ConfigurationError: The class is defined without its three types, or instantiated without a
            name.
    """

    name: ClassVar[str]
    version: ClassVar[str] = "1"
    reads: ClassVar[tuple[str, ...]] = ()
    subtasks: ClassVar[tuple[str, ...]] = ()
    operation_type: ClassVar[str] = "agent"
    exclusive: ClassVar[bool] = False
    preserve: ClassVar[bool] = False
    migrations: ClassVar[tuple[Migration, ...]] = ()
    agent_config: ClassVar[Mapping[str, JsonValue]] = {}
    resume_from: ClassVar[ResumeFrom] = "start"
    merge_artifacts: ClassVar[bool] = True
    """Whether the artifacts of its peers' results are added to its own outcome."""
    skills: ClassVar[tuple[AgentSkill, ...]] = ()
    """What it can do, for its card."""

    plan: Plan
    _types: ClassVar[_Types | None] = None
    _declared_types: _Types

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._types = _resolve_types(cls)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Create an instance, or raise if the class has no valid name or lacks its types."""
        if not isinstance(getattr(cls, "name", None), str):
            raise ConfigurationError(
                "agent.name", f"{cls.__name__} has no name", 'write `name = "…"` in the class'
            )
        validate_agent_name(cls.name)
        if cls._types is None:
            _raise_missing_types(cls)
        instance = super().__new__(cls)
        instance._declared_types = cls._types
        instance.plan = build_plan(
            cls.name,
            cls.subtasks,
            cls.version,
            cls.migrations,
            type=cls.operation_type,
            exclusive=cls.exclusive,
            preserve=cls.preserve,
            config=cls.agent_config,
            resume_from=cls.resume_from,
        )
        return instance

    @property
    def peer(self) -> Peer[In, Out]:
        """This agent as a typed `Peer`, for its callers."""
        documented = vars(type(self)).get("__doc__")
        description = None if documented is None else inspect.cleandoc(documented)
        types = self._declared_types
        return make_peer(self.name, types.input, types.output, description)

    @property
    def state_format(self) -> str:
        """The format of states written by this version."""
        return f"{self.name}/{self.version}"

    @property
    def readable_formats(self) -> frozenset[str]:
        """The formats of states that this version can resume from."""
        return frozenset(f"{self.name}/{version}" for version in (self.version, *self.reads))

    @abstractmethod
    async def on_request(self, ctx: TaskExecutionContext, request: In, /) -> Paused | Done[Out]:
        """Handle a new request: return `self.ask(...)` or `self.done(...)`."""

    def ask(
        self,
        state: State,
        calls: Mapping[str, UnsentCall[Any]],
        *,
        then: Handler[State, Out],
        join: Join = ALL,
    ) -> Paused:
        """Build a pause that calls peers and waits for them.

        Return it from a handler; it has no effect by itself.

        Args:
            state: What `then` needs to know. It is serialized now: later changes have no effect.
            calls: The requests and sleeps, by a key of your choice under which `then` finds the
                outcomes.
            then: The method of this agent that continues.
            join: How many results to wait for.

        Raises:
            AgentMisbehaved: The state is not of the declared type, `then` is not a method of this
                agent, or there are no calls or fewer than the join needs.
        """
        requests = [call.as_call(key) for key, call in calls.items()]
        handler = getattr(then, "__name__", "")
        if getattr(self, handler, None) != then:
            raise AgentMisbehaved(
                f"{self.name}: `then` must be a method of the agent, as in then=self.on_replies"
            )
        try:
            state_json = self._declared_types.state.write(state, round_trip=True)
        except TypeMismatch as error:
            raise AgentMisbehaved(f"{self.name}: the state for {handler}: {error}") from error
        stored = _StoredState.model_construct(
            format=self.state_format, handler=handler, state=state_json
        )
        return _ValidatedPause(requests, stored.model_dump_json().encode(), join)

    def done(self, output: Out, *, artifacts: tuple[dict[str, JsonValue], ...] = ()) -> Done[Out]:
        """End the task with `output`. Return this from a handler."""
        return Done(output, artifacts)

    async def start(
        self, ctx: TaskExecutionContext, request: In | JsonValue
    ) -> Paused | Done[Out]:
        """Call `on_request` with the validated request; see `DurableAgent`."""
        received = self._parse_input(request)
        return self._validate_result(await self.on_request(ctx, received), "on_request")

    def check_input(self, request: object) -> None:
        """Check that `request` fits the declared input; see `ChecksInput`."""
        self._parse_input(request)

    def _parse_input(self, request: object) -> Any:
        try:
            return self._declared_types.input.read(request)
        except TypeMismatch as error:
            raise InvalidInput(f"input of {self.name}: {error}") from error

    async def resume(
        self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
    ) -> Paused | Done[Out]:
        """Call the handler that the stored state names; see `DurableAgent`."""
        stored = self._load_state(state)
        handler = getattr(self, stored.handler, None)
        if not callable(handler):
            raise IncompatibleState(f"{self.name} has no handler {stored.handler!r}")
        try:
            handler_state = self._declared_types.state.read(stored.state)
        except TypeMismatch as error:
            raise IncompatibleState(
                f"the state for {stored.handler} of {self.name}: {error}"
            ) from error
        return self._validate_result(
            await handler(ctx, handler_state, Replies(outcomes)), stored.handler
        )

    def _load_state(self, state: bytes) -> _StoredState:
        try:
            stored = _StoredState.model_validate_json(state)
        except ValidationError as error:
            raise IncompatibleState(
                f"not a state of {self.name}: {first_problem(error)}"
            ) from loggable_cause(error)
        if stored.format not in self.readable_formats:
            raise IncompatibleState(
                f"{self.name} reads {sorted(self.readable_formats)}, not {stored.format!r}"
            )
        return stored

    def _validate_result(self, result: object, handler: str) -> Paused | Done[Out]:
        if isinstance(result, _ValidatedPause):
            return result
        if not isinstance(result, Done):
            kind = type(result).__name__
            problem = (
                f"{self.name}.{handler} returned {kind}; "
                "return self.ask(...) or self.done(...) instead"
            )
            raise AgentMisbehaved(problem)
        try:
            return Done(self._declared_types.output.check(result.output), result.artifacts)
        except TypeMismatch as error:
            raise InvalidOutput(f"output of {self.name}: {error}") from error


def _resolve_types(cls: type[StatefulAgent[Any, Any, Any]]) -> _Types | None:
    """Return the types that `cls` sets for In, State and Out; `None` if one is a type variable."""
    found = _type_arguments(cls)
    if found is None:
        _raise_missing_types(cls)
    if any(_is_generic(argument) for argument in found):
        return None
    key = f"{cls.__module__}.{cls.__qualname__}"
    return _Types(*(DeclaredType(argument, key) for argument in found))


def _type_arguments(cls: type) -> tuple[Any, ...] | None:
    """Return the arguments of `StatefulAgent` as seen from `cls`, through any number of generic
    bases.
    """
    for base in (
        getattr(cls, "__orig_bases__", ()) if "__orig_bases__" in vars(cls) else cls.__bases__
    ):
        origin = get_origin(base) or base
        if origin is StatefulAgent:
            return get_args(base) or None
        if isinstance(origin, type) and issubclass(origin, StatefulAgent):
            inherited = _type_arguments(origin)
            if inherited is None:
                return None
            substitutions = dict(
                zip(getattr(origin, "__parameters__", ()), get_args(base), strict=False)
            )
            return tuple(_substitute(argument, substitutions) for argument in inherited)
    return None


def _is_generic(argument: Any) -> bool:
    """Whether `argument` is a type variable, or an alias such as `list[T]` that contains one."""
    return isinstance(argument, TypeVar) or (
        get_origin(argument) is not None and bool(argument.__parameters__)
    )


def _substitute(argument: Any, by_variable: Mapping[Any, Any]) -> Any:
    if isinstance(argument, TypeVar):
        return by_variable.get(argument, argument)
    if _is_generic(argument):
        return argument[
            tuple(by_variable.get(variable, variable) for variable in argument.__parameters__)
        ]
    return argument


def _raise_missing_types(cls: type) -> NoReturn:
    raise ConfigurationError(
        f"{cls.__module__}.{cls.__qualname__}",
        "does not declare its input, state and output types",
        f"write class {cls.__name__}(StatefulAgent[Input, State, Output])",
    )
