"""Typed handles to other agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast

from pydantic import JsonValue, TypeAdapter

from meshpoint.errors import AgentMisbehaved, ConfigurationError
from meshpoint.model.calls import MAX_DURATION, Call
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.model.messages import validate_agent_name
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

In = TypeVar("In")
Out = TypeVar("Out")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


@dataclass(frozen=True)  # with slots, PeerCall[int](...) raises: typing cannot store the parameter
class PeerCall(Generic[Out_co]):
    """A request to a peer that has not been sent yet; created by calling a `Peer`.

    `input` is validated JSON. Later changes to the object it was made from have no effect.
    """

    peer: str
    input: JsonValue
    timeout: timedelta | None
    idle_timeout: timedelta | None
    read: Callable[[Outcome], Ok[Out_co] | Failed]
    """Converts an outcome; a value that does not fit the declared output is `Failed(INVALID)`."""

    def as_call(self, call_id: str) -> Call:
        """Build the `Call` of a pause, with this id."""
        return Call(call_id, self.peer, self.input, self.timeout, self.idle_timeout)

    def with_artifacts(self) -> PeerCall[Ok[Out_co]]:
        """Return the same request, answered with the whole `Ok`.

        That gives access to the `value`, the `artifacts` and the token `usage`.
        """

        def read(outcome: Outcome) -> Ok[Ok[Out_co]] | Failed:
            answer = self.read(outcome)
            return Ok(answer, answer.artifacts, answer.usage) if isinstance(answer, Ok) else answer

        return PeerCall(self.peer, self.input, self.timeout, self.idle_timeout, read)


class Addressable(Protocol[In_contra, Out_co]):
    """Anything that requests can be sent to: an agent or a `Peer`."""

    @property
    def peer(self) -> Peer[In_contra, Out_co]:
        """The typed `Peer` with which others call it."""


class Peer(Generic[In_contra, Out_co]):
    """Another agent, with the types of its input and output.

    Call it to build a typed request, and send that with `ctx.call` or `ctx.gather` (function
    agents) or `self.ask` (stateful agents):

        flights = Peer("flights", FlightQuery, FlightQuote, timeout=timedelta(seconds=30))
        quote = await ctx.call(flights(FlightQuery(to="Oslo")))

    Programs outside the mesh pass it to `mesh.send` and `mesh.call`.

    Args:
        name: Name of the agent in the mesh.
        input: Type of its input: a pydantic model, a dataclass, a TypedDict or a builtin. Wrap any
            other type, such as a union: `TypeAdapter(A | B)`.
        output: Type of its output, likewise.
        timeout: Maximum duration of a call, counted from the caller's checkpoint, or from
            `mesh.send`. Default: none.
        idle_timeout: Fail a call if the peer gives no sign of life for this long; a peer that is
            alive sends one in time by itself. Default: the caller's `peer_timeout`, or none if
            there is a `timeout`.

    Raises:
        ConfigurationError: The name or a type cannot be used, or a timeout is not positive.
    """

    def __init__(
        self,
        name: str,
        input: type[In_contra] | TypeAdapter[In_contra],
        output: type[Out_co] | TypeAdapter[Out_co],
        *,
        timeout: timedelta | None = None,
        idle_timeout: timedelta | None = None,
    ) -> None:
        self.name = str(validate_agent_name(name))
        for option, duration in (("timeout", timeout), ("idle_timeout", idle_timeout)):
            if duration is not None and not timedelta() < duration <= MAX_DURATION:
                problem = f"{option} is {duration}"
                fix = "give a positive duration of at most ten years, or leave it out"
                if duration <= timedelta():
                    fix = "give a positive duration, or leave it out"
                raise ConfigurationError(f"peer {name!r}", problem, fix)
        self.timeout, self.idle_timeout = timeout, idle_timeout
        self._input: DeclaredType[Any] = DeclaredType(input, f"peer {name!r}, input")
        self._output: DeclaredType[Any] = DeclaredType(output, f"peer {name!r}, output")

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, {self._input.name}, {self._output.name})"

    @property
    def peer(self) -> Peer[In_contra, Out_co]:
        """This peer itself, so that a `Peer` is `Addressable` like an agent."""
        return self

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
            json = self.write(request)
        except TypeMismatch as error:
            raise AgentMisbehaved(f"input for peer {self.name!r}: {error}") from error
        return PeerCall(self.name, json, self.timeout, self.idle_timeout, self.read)

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
            value: Out_co = self._output.read(outcome.value)
        except TypeMismatch as error:
            message = f"output of peer {self.name!r}: {error}"
            return Failed(FailureKind.INVALID, message, outcome.usage)
        if value is outcome.value:
            return cast("Ok[Out_co]", outcome)
        return Ok(value, outcome.artifacts, outcome.usage)


def make_peer(name: str, input_: DeclaredType[In], output: DeclaredType[Out]) -> Peer[In, Out]:
    """Create a peer from types that are already declared, without timeouts."""
    peer: Peer[In, Out] = Peer.__new__(Peer)
    peer.name = str(validate_agent_name(name))
    peer.timeout = peer.idle_timeout = None
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
