"""A typed handle on another agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from pydantic import JsonValue, TypeAdapter

from meshpoint.errors import AgentMisbehaved, ConfigurationError
from meshpoint.model.calls import LONGEST, Call
from meshpoint.model.ids import agent_name
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.typed import DoesNotFit, Typed

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


@dataclass(frozen=True)  # with slots, PeerCall[int](...) raises: typing cannot note the parameter
class PeerCall(Generic[Out_co]):
    """A request to a peer that was not sent yet; made by calling a `Peer`.

    `input` is valid and already JSON: changing the object it was made from changes nothing.
    """

    peer: str
    input: JsonValue
    timeout: timedelta | None
    idle_timeout: timedelta | None
    read: Callable[[Outcome], Ok[Out_co] | Failed]
    """What an outcome of this call means: a value that does not fit the declared output is `Failed(INVALID)`."""

    def as_call(self, call_id: str) -> Call:
        """The request as a pause carries it."""
        return Call(call_id, self.peer, self.input, self.timeout, self.idle_timeout)

    def with_artifacts(self) -> PeerCall[Ok[Out_co]]:
        """The same request, answered by the whole `Ok`: its `value`, `artifacts` and token `usage`."""

        def read(outcome: Outcome) -> Ok[Ok[Out_co]] | Failed:
            answer = self.read(outcome)
            return Ok(answer, answer.artifacts, answer.usage) if isinstance(answer, Ok) else answer

        return PeerCall(self.peer, self.input, self.timeout, self.idle_timeout, read)


class Peer(Generic[In_contra, Out_co]):
    """Another agent, with the types of its input and output.

    Calling it gives a typed request, which `ctx.call` and `ctx.gather` (function agents) or `self.ask` (stateful
    agents) send:

        flights = Peer("flights", FlightQuery, FlightQuote, timeout=timedelta(seconds=30))
        quote = await ctx.call(flights(FlightQuery(to="Oslo")))

    Args:
        name: the agent's name in the mesh.
        input: what it takes: a pydantic model, a dataclass, a TypedDict or a builtin; anything else, such as a
            union, as `TypeAdapter(A | B)`.
        output: what it answers, likewise.
        timeout: how long a call may take, from the caller's checkpoint; None: the caller's `peer_timeout`.
        idle_timeout: fail a call when the peer has sent no status update for that long.

    Raises:
        ConfigurationError: the name or a type cannot be used, or a timeout is not positive.
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
        self.name = str(agent_name(name))
        for option, duration in (("timeout", timeout), ("idle_timeout", idle_timeout)):
            if duration is not None and not timedelta() < duration <= LONGEST:
                problem = f"{option} is {duration}"
                fix = "give a positive duration of at most ten years, or leave it out"
                if duration <= timedelta():
                    fix = "give a positive duration, or leave it out"
                raise ConfigurationError(f"peer {name!r}", problem, fix)
        self.timeout, self.idle_timeout = timeout, idle_timeout
        self._input: Typed[Any] = Typed(input, f"peer {name!r}, input")
        self._output: Typed[Any] = Typed(output, f"peer {name!r}, output")

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, {self._input.name}, {self._output.name})"

    def __call__(self, request: In_contra) -> PeerCall[Out_co]:
        """A request with this input.

        Raises:
            AgentMisbehaved: the input is not of the declared type; names the field.
        """
        try:
            json = self._input.write(request)
        except DoesNotFit as error:
            raise AgentMisbehaved(f"input for peer {self.name!r}: {error}") from error
        return PeerCall(self.name, json, self.timeout, self.idle_timeout, self.read)

    def read(self, outcome: Outcome) -> Ok[Out_co] | Failed:
        """`outcome` with its value as the declared output; one that does not fit is `Failed(INVALID)`."""
        if isinstance(outcome, Failed):
            return outcome
        try:
            return Ok(self._output.read(outcome.value), outcome.artifacts, outcome.usage)
        except DoesNotFit as error:
            message = f"output of peer {self.name!r}: {error}"
            return Failed(FailureKind.INVALID, message, outcome.usage)
