"""Signals: values that callers send to a task, which receives them in order."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

from pydantic import JsonValue, TypeAdapter

from meshpoint.model.calls import Call
from meshpoint.model.named_wait import NamedWait
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.model.waitable import Waitable, mark_used
from meshpoint.model.waits import SIGNAL_PREFIX

T = TypeVar("T")


class Signal(NamedWait[T]):
    """A typed signal, shared by the agent that receives it and the code that sends it.

        chat = Signal("chat", Line)
        line = await ctx.receive(chat)         # in the agent
        await task.signal(chat, Line("hello")) # in a caller

    Raises:
        ConfigurationError: the name or the type cannot be used.
    """

    _kind, _value_name, _prefix = "signal", "value", SIGNAL_PREFIX
    _late = "no signal {name!r} arrived in time"

    def __init__(self, name: str, value: type[T] | TypeAdapter[T]) -> None:
        super().__init__(name, value)


class ReceiveCall(Call):
    """A wait for a signal, as a `Call` of a pause."""


class ReceiveWait(Waitable[T]):
    """A wait for a signal. Await it, or pass it on like a peer call."""

    input: JsonValue = None

    def __init__(self, signal: Signal[T], timeout: timedelta | None) -> None:
        self._signal, self._timeout = signal, timeout

    @property
    def peer(self) -> str:
        """The reserved name of the signal."""
        return self._signal.peer

    def as_call(self, call_id: str) -> Call:
        """The wait as a `Call` of a pause."""
        mark_used(self)
        return ReceiveCall(call_id, self.peer, None, self._timeout)

    def read(self, outcome: Outcome, /) -> Ok[T] | Failed:
        """Convert the value to the declared type, or `Failed(INVALID)` if it does not fit."""
        return self._signal.read_outcome(outcome)

    def _error(self, failed: Failed) -> Exception:
        return self._signal.error_of(failed)

    def _describe_unused(self) -> str:
        return f"ctx.receive of signal {self._signal.name!r} was never awaited"

    def _describe_misuse(self, *, in_agent: bool) -> str:
        if in_agent:
            fix = 'return self.ask(state, {"line": ctx.receive(chat)}, then=…)'
            return f"only function agents (@agent) await a signal; in a StatefulAgent, {fix}"
        return "ctx.receive pauses a task; a script sends with task.signal(signal, value)"
