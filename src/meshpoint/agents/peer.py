"""Typed handles to other agents."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from types import EllipsisType
from typing import Any, Generic, Protocol, Self, TypeVar

from pydantic import JsonValue, TypeAdapter

from meshpoint.errors import AgentMisbehaved, ConfigurationError, InvalidInput, PeerFailed
from meshpoint.model.calls import MAX_DURATION, Call, to_timedelta
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.model.messages import validate_agent_name
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.retry_policy import (
    Duration,
    RetryPolicy,
    call_policy_problem,
    duration_problem,
)
from meshpoint.model.waitable import Waitable, mark_used

In = TypeVar("In")
Out = TypeVar("Out")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


@dataclass(frozen=True)  # with slots, PeerCall[int](...) raises: typing cannot store the parameter
class PeerCall(Waitable[Out_co]):
    """A request to a peer that has not been sent yet; created by calling a `Peer`.

    `input` is validated JSON. Later changes to the object it was made from have no effect.
    """

    peer: str
    input: JsonValue
    timeout: timedelta | None
    idle_timeout: timedelta | None
    retry: RetryPolicy | None
    read: Callable[[Outcome], Ok[Out_co] | Failed]
    """Converts an outcome; a value that does not fit the declared output is `Failed(INVALID)`."""

    def __hash__(self) -> int:
        """Hash without the input, which may be unhashable: `asyncio.gather` needs a hash."""
        return hash(self.peer)

    def as_call(self, call_id: str) -> Call:
        """Build the `Call` of a pause, with this id."""
        mark_used(self)
        return Call(call_id, self.peer, self.input, self.timeout, self.idle_timeout, self.retry)

    def with_artifacts(self) -> PeerCall[Ok[Out_co]]:
        """Return the same request, answered with the whole `Ok`.

        That gives access to the `value`, the `artifacts` and the token `usage`.
        """

        def read(outcome: Outcome) -> Ok[Ok[Out_co]] | Failed:
            answer = self.read(outcome)
            return Ok(answer, answer.artifacts, answer.usage) if isinstance(answer, Ok) else answer

        mark_used(self)
        return PeerCall(self.peer, self.input, self.timeout, self.idle_timeout, self.retry, read)

    def _error(self, failed: Failed) -> PeerFailed:
        return PeerFailed(self.peer, failed)

    def _describe_unused(self) -> str:
        return f"peer call {self.peer!r} was never awaited: nothing was sent"

    def _describe_misuse(self, *, in_agent: bool) -> str:
        if in_agent:
            fix = f'return self.ask(state, {{"f": {self.peer}(x)}}, then=…)'
            return f"only function agents (@agent) await peer calls; in a StatefulAgent, {fix}"
        return f"peer calls are awaited in agents; in a script, await mesh.call({self.peer}, x)"


class Addressable(Protocol[In_contra, Out_co]):
    """Anything that requests can be sent to: an agent or a `Peer`."""

    @property
    def peer(self) -> Peer[In_contra, Out_co]:
        """The typed `Peer` with which others call it."""


class Peer(Generic[In_contra, Out_co]):
    """Another agent, with the types of its input and output.

    Call it to build a typed request. Function agents await the request or pass it to `ctx.gather`;
    stateful agents pass it to `self.ask`:

        flights = Peer("flights", FlightQuery, FlightQuote, timeout=timedelta(seconds=30))
        quote = await flights(FlightQuery(to="Oslo"))

    Programs outside the mesh pass it to `mesh.send` and `mesh.call`.

    Args:
        name: Name of the agent in the mesh.
        input: Type of its input: a pydantic model, a dataclass, a TypedDict or a builtin. Wrap any
            other type, such as a union: `TypeAdapter(A | B)`.
        output: Type of its output, likewise.
        description: What it does, for models that choose between peers.
        timeout: Maximum duration of a call, as a `timedelta` or in seconds, counted from the
            caller's checkpoint, or from `mesh.send`. With `retry`, per attempt. Default: none.
        idle_timeout: Fail a call if the peer gives no sign of life for this long; a peer that is
            alive sends one in time by itself. Default: the caller's `peer_timeout`, or none if
            there is a `timeout`.
        retry: How calling agents retry after a failure. Each attempt is a separate task of the
            peer. Default: one attempt. `mesh.send` and `mesh.call` do not use it.

    Raises:
        ConfigurationError: The name or a type cannot be used, a timeout is not positive, or
            `retry` includes cancelled calls.
    """

    def __init__(
        self,
        name: str,
        input: type[In_contra] | TypeAdapter[In_contra],
        output: type[Out_co] | TypeAdapter[Out_co],
        *,
        description: str | None = None,
        timeout: Duration | None = None,
        idle_timeout: Duration | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.name = str(validate_agent_name(name))
        self.description = description
        self.timeout = _to_limit(timeout, "timeout", name)
        self.idle_timeout = _to_limit(idle_timeout, "idle_timeout", name)
        self.retry = _check_retry(retry, name)
        self._input: DeclaredType[Any] = DeclaredType(input, f"peer {name!r}, input")
        self._output: DeclaredType[Any] = DeclaredType(output, f"peer {name!r}, output")

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, {self._input.name}, {self._output.name})"

    @property
    def peer(self) -> Peer[In_contra, Out_co]:
        """This peer itself, so that a `Peer` is `Addressable` like an agent."""
        return self

    @property
    def input_schema(self) -> dict[str, Any]:
        """The JSON schema of its input."""
        return self._input.json_schema("validation")

    @property
    def output_schema(self) -> dict[str, Any]:
        """The JSON schema of its output."""
        return self._output.json_schema("serialization")

    def with_options(
        self,
        *,
        timeout: Duration | EllipsisType | None = ...,
        idle_timeout: Duration | EllipsisType | None = ...,
        retry: RetryPolicy | EllipsisType | None = ...,
    ) -> Self:
        """The same peer with other options. Omitted options stay; `None` removes one.

        Raises:
            ConfigurationError: A timeout is not positive, or `retry` includes cancelled calls.
        """
        changed = copy(self)
        if timeout is not ...:
            changed.timeout = _to_limit(timeout, "timeout", self.name)
        if idle_timeout is not ...:
            changed.idle_timeout = _to_limit(idle_timeout, "idle_timeout", self.name)
        if retry is not ...:
            changed.retry = _check_retry(retry, self.name)
        return changed

    @staticmethod
    def of(agent: Addressable[In, Out], /) -> Peer[In, Out]:
        """Return the typed peer for calls to an agent that this process can import."""
        return agent.peer

    def __call__(self, request: In_contra) -> PeerCall[Out_co]:
        """Build a request with this input.

        Raises:
            AgentMisbehaved: The input does not fit the declared type. The message names the field.
        """
        try:
            json = self._input.write(request)
        except TypeMismatch as error:
            raise AgentMisbehaved(f"input for peer {self.name!r}: {error}") from error
        call: PeerCall[Out_co] = object.__new__(PeerCall)
        call.__dict__.update(  # `__init__` takes twice as long: each replay makes all calls again
            peer=self.name,
            input=json,
            timeout=self.timeout,
            idle_timeout=self.idle_timeout,
            retry=self.retry,
            read=self.read,
        )
        return call

    def from_json(self, arguments: JsonValue) -> PeerCall[Out_co]:
        """Build a request from JSON, such as a model's arguments for a tool.

        Raises:
            InvalidInput: They do not fit the declared type. The message names the field.
        """
        try:
            json = self._input.write(self._input.read(arguments))
        except TypeMismatch as error:
            raise InvalidInput(f"input for peer {self.name!r}: {error}") from error
        return PeerCall(self.name, json, self.timeout, self.idle_timeout, self.retry, self.read)

    def write(self, request: In_contra) -> JsonValue:
        """Convert an input to JSON.

        Raises:
            TypeMismatch: It does not fit the declared type. The message names the field.
        """
        return self._input.write(request)

    def read(self, outcome: Outcome) -> Ok[Out_co] | Failed:
        """Convert the value of `outcome` to the declared output type.

        A value that does not fit becomes `Failed(INVALID)`.
        """
        if isinstance(outcome, Failed):
            return outcome
        try:
            value = self._output.read(outcome.value)
        except TypeMismatch as error:
            message = f"output of peer {self.name!r}: {error}"
            return Failed(FailureKind.INVALID, message, outcome.usage)
        if value is outcome.value:
            same: Ok[Any] = outcome
            return same
        return Ok(value, outcome.artifacts, outcome.usage)


def _to_limit(duration: Duration | None, option: str, peer: str) -> timedelta | None:
    if duration is None:
        return None
    problem = duration_problem(duration, option)
    if problem is None:
        limit = to_timedelta(duration, option)
        if timedelta() < limit <= MAX_DURATION:
            return limit
        size = "positive duration" if limit <= timedelta() else "duration of at most ten years"
        problem = f"{option} is {duration}", f"give a {size}, or leave it out"
    raise ConfigurationError(f"peer {peer!r}", *problem)


def _check_retry(policy: RetryPolicy | None, peer: str) -> RetryPolicy | None:
    if policy is not None and (problem := call_policy_problem(policy)) is not None:
        raise ConfigurationError(f"peer {peer!r}", *problem)
    return policy


def make_peer(
    name: str,
    input_: DeclaredType[In],
    output: DeclaredType[Out],
    description: str | None = None,
) -> Peer[In, Out]:
    """Create a peer from types that are already declared, without timeouts and retries."""
    peer: Peer[In, Out] = Peer.__new__(Peer)
    peer.name = str(validate_agent_name(name))
    peer.description = description
    peer.timeout = peer.idle_timeout = None
    peer.retry = None
    peer._input, peer._output = input_, output
    return peer


_JSON: DeclaredType[Any] = DeclaredType(Any, "untyped peer")
_JSON.name = "JSON"


def untyped_peer(name: str) -> Peer[Any, Any]:
    """Create a peer that takes anything that can become JSON, and returns JSON.

    Raises:
        ConfigurationError: The name cannot be used.
    """
    return make_peer(name, _JSON, _JSON)
