"""What questions and signals have in common."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from pydantic import JsonValue, TypeAdapter

from meshpoint.errors import ConfigurationError, PeerFailed, WaitTimeout
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.model.messages import is_agent_name
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

T = TypeVar("T")


class NamedWait(Generic[T]):
    """A name, and the type of the value that a task waits for under it."""

    _kind: ClassVar[str]
    _value_name: ClassVar[str]
    _prefix: ClassVar[str]  # of the reserved name
    _late: ClassVar[str]  # the text of a timeout

    def __init__(self, name: str, type_: type[T] | TypeAdapter[T]) -> None:
        if not is_agent_name(name):
            problem = f"{name!r} is not a valid {self._kind} name"
            fix = "use letters, digits, '_' and '-' (63 at most)"
            raise ConfigurationError(self._kind, problem, fix)
        self.name = name
        self._type: DeclaredType[Any] = DeclaredType(
            type_, f"{self._kind} {name!r}, {self._value_name}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._type.name})"

    @property
    def peer(self) -> str:
        """The reserved name that a wait has in place of a peer."""
        return f"{self._prefix}{self.name}"

    def write(self, value: T) -> JsonValue:
        """Convert a value to JSON.

        Raises:
            TypeMismatch: It does not fit the declared type.
        """
        return self._type.write(value)

    def read(self, value: JsonValue) -> T:
        """Convert JSON to a value.

        Raises:
            TypeMismatch: It does not fit the declared type.
        """
        read: T = self._type.read(value)
        return read

    def read_outcome(self, outcome: Outcome, /) -> Ok[T] | Failed:
        """Convert an outcome to the declared type, or `Failed(INVALID)` if it does not fit."""
        if isinstance(outcome, Failed):
            return outcome
        try:
            return Ok(self.read(outcome.value))
        except TypeMismatch as error:
            return Failed(FailureKind.INVALID, str(error))

    def error_of(self, failed: Failed) -> Exception:
        """The exception that a wait raises for this failure."""
        if failed.kind is FailureKind.TIMEOUT:
            return WaitTimeout(self._late.format(name=self.name))
        return PeerFailed(self.name, failed, self._kind)
