"""The result of a peer call: exactly one `Ok` or `Failed` each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from meshpoint.model.error_text import make_storable
from meshpoint.model.usage import TokenUsage

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class FailureKind(StrEnum):
    """Why a call has no result."""

    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    UNDELIVERABLE = "undeliverable"
    INVALID = "invalid"


@dataclass(frozen=True)  # no slots: typing sets __orig_class__, so Ok[int](...) would raise
class Ok(Generic[_T_co]):
    """A peer's result, with the artifacts it produced and the tokens it used."""

    value: _T_co
    artifacts: tuple[dict[str, JsonValue], ...] = ()
    usage: TokenUsage = field(default_factory=TokenUsage)
    traceparent: str | None = field(default=None, kw_only=True, compare=False, repr=False)
    """Trace context of the segment that answered, as in W3C's header `traceparent`."""

    @classmethod
    def without_usage(cls, value: _T, artifacts: tuple[dict[str, JsonValue], ...] = ()) -> Ok[_T]:
        """Build a result that used no tokens. Its `usage` is created when it is first read.

        For replays: they build hundreds of results whose usage is never read, and creating it
        would take most of the time.
        """
        outcome: Ok[Any] = object.__new__(cls)
        fields = outcome.__dict__
        fields["value"], fields["artifacts"] = value, artifacts
        return outcome

    if not TYPE_CHECKING:  # it would let type checkers accept every attribute

        def __getattr__(self, name: str) -> TokenUsage:
            if name != "usage":
                raise AttributeError(f"'Ok' object has no attribute {name!r}")
            return self.__dict__.setdefault("usage", TokenUsage())


@dataclass(frozen=True, slots=True)
class Failed:
    """A call without a result: `kind` is for code, `message` for people.

    Messages longer than `MAX_ERROR_TEXT_LENGTH` are cut, with a note. `artifacts` is empty, except
    in the row of a rejected question. `traceparent` is the trace context of the segment that
    answered.
    """

    kind: FailureKind
    message: str = ""
    usage: TokenUsage = field(default_factory=TokenUsage)
    artifacts: tuple[dict[str, JsonValue], ...] = field(default=(), kw_only=True, repr=False)
    traceparent: str | None = field(default=None, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (message := make_storable(self.message)) is not self.message:
            object.__setattr__(self, "message", message)


@dataclass(frozen=True, slots=True)
class AdvisedFailure(Failed):
    """A task's failure, with advice for a requester that retries the call.

    The advice is part of the response. Requesters do not record it with the outcome.

    Attributes:
        retryable: `False` if another attempt cannot succeed.
        retry_after: seconds that must pass before another attempt, `None` for no minimum.
    """

    retryable: bool = True
    retry_after: float | None = None


OVERDUE = Failed(FailureKind.TIMEOUT, "the task's deadline has passed")
"""The outcome of a task that has not ended at its deadline."""


def outcome_name(outcome: Outcome) -> str:
    """The outcome in a few words: "completed", or the kind of the failure."""
    return "completed" if isinstance(outcome, Ok) else outcome.kind.value


def peer_missing(peer: str) -> Failed:
    """The outcome of a call that was never sent, because its peer has no queue."""
    message = f"no replica of agent {peer!r} has declared its queue"
    return Failed(FailureKind.UNDELIVERABLE, message)


Outcome: TypeAlias = Ok[JsonValue] | Failed
"""An outcome as sent or stored: its value is JSON, not validated against a declared type."""


def lacks_usage(outcome: Outcome) -> bool:
    """Whether the mesh seems to have closed the call, without the tokens of its peer."""
    closing = {FailureKind.TIMEOUT, FailureKind.CANCELLED}
    return isinstance(outcome, Failed) and outcome.kind in closing and outcome.usage.is_empty


def encode_outcome(outcome: Outcome) -> bytes:
    """Encode `outcome` as the JSON stored in its call's row. Empty fields are omitted."""
    fields: dict[str, Any] = (
        {"value": outcome.value}
        if isinstance(outcome, Ok)
        else {"kind": outcome.kind, "message": outcome.message}
    )
    if outcome.artifacts:
        fields["artifacts"] = outcome.artifacts
    if not outcome.usage.is_empty:
        fields["usage"] = outcome.usage
    if outcome.traceparent is not None:
        fields["traceparent"] = outcome.traceparent
    return to_json(fields)


def decode_outcome(encoded: bytes) -> Outcome:
    """Decode an outcome written by `encode_outcome`."""
    fields = from_json(encoded)
    usage = TokenUsage.model_validate(fields["usage"]) if fields.get("usage") else TokenUsage()
    artifacts, traceparent = tuple(fields.get("artifacts", ())), fields.get("traceparent")
    if "kind" in fields:
        kind, message = FailureKind(fields["kind"]), fields.get("message", "")
        return Failed(kind, message, usage, artifacts=artifacts, traceparent=traceparent)
    return Ok(fields["value"], artifacts, usage, traceparent=traceparent)


class Outcomes(Mapping[str, Outcome]):
    """Exactly one outcome per call of the pause, by call id, iterated in call order."""

    def __init__(self, in_call_order: Mapping[str, Outcome]) -> None:
        self._by_call_id = dict(in_call_order)

    def __getitem__(self, call_id: str) -> Outcome:
        return self._by_call_id[call_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_call_id)

    def __len__(self) -> int:
        return len(self._by_call_id)

    def __repr__(self) -> str:
        return f"Outcomes({self._by_call_id!r})"
