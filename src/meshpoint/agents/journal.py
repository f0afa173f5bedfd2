"""The state of a function agent across pauses: its input, and each call with its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from meshpoint.errors import IncompatibleState
from meshpoint.model.calls import Call, Join
from meshpoint.model.checkpoint import Checkpoint
from meshpoint.model.json_values import digest_of
from meshpoint.model.outcomes import Failed, Ok, Outcome, Outcomes
from meshpoint.model.typed import cause_of, first_problem
from meshpoint.model.usage import TokenUsage


class _JournalModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RecordedCall(_JournalModel):
    """One call of a pause. `digest` is computed from its peer and input."""

    id: str
    peer: str
    digest: str

    @classmethod
    def from_call(cls, call: Call) -> RecordedCall:
        """Record `call`. The timeout is left out, so that changing it is not a mismatch."""
        return cls(id=call.id, peer=call.peer, digest=digest_of([call.peer, call.input]))


class JournalEntry(_JournalModel):
    """One pause: its calls and join, the tokens used so far, and the outcomes once it is complete.

    `subtask` is the subtask that made the calls. It is not serialized when `None`, because the
    previous release does not know the field.
    """

    calls: list[RecordedCall]
    needed: int | None
    within_seconds: float | None
    usage: TokenUsage
    outcomes: list[Ok[JsonValue] | Failed] | None = None
    subtask: str | None = None

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        if self.subtask is None:
            del data["subtask"]
        return data

    @classmethod
    def for_calls(
        cls, calls: Sequence[Call], join: Join, usage: TokenUsage, subtask: str | None = None
    ) -> JournalEntry:
        """Create the entry of a pause that waits for `calls`."""
        return cls(
            calls=[RecordedCall.from_call(call) for call in calls],
            needed=join.needed,
            within_seconds=join.deadline.total_seconds() if join.deadline else None,
            usage=usage,
            subtask=subtask,
        )

    def describe_mismatch(self, current: JournalEntry) -> str | None:
        """Describe how the calls of `current` differ from this record; `None` if they are the
        same.
        """
        recorded_peers, current_peers = [call.peer for call in self.calls], [call.peer for call in current.calls]
        if recorded_peers != current_peers:
            return f"it called {', '.join(recorded_peers)} before and now calls {', '.join(current_peers)}"
        for recorded, current_call in zip(self.calls, current.calls, strict=True):
            if recorded.digest != current_call.digest:
                return f"the call to {current_call.peer} ({current_call.id}) has another input than before"
        if self.subtask != current.subtask:
            before, now = _describe_subtask(self.subtask), _describe_subtask(current.subtask)
            return f"it was made {before} before and is now made {now}"
        if (self.needed, self.within_seconds) != (current.needed, current.within_seconds):
            return f"it had {self._describe_join()} before and now has {current._describe_join()}"
        return None

    def total_usage(self) -> TokenUsage:
        """The task's token usage at the end of this pause, including what the peers used."""
        usage = self.usage.snapshot()
        for call, outcome in zip(self.calls, self.outcomes or (), strict=True):
            usage.merge(outcome.usage, source=call.peer)
        return usage

    def _describe_join(self) -> str:
        needed = "ALL" if self.needed is None else f"AT_LEAST({self.needed})"
        return f"join {needed}" + (f" within {self.within_seconds} s" if self.within_seconds else "")


def _describe_subtask(subtask: str | None) -> str:
    return "outside subtasks" if subtask is None else f"in subtask {subtask!r}"


class Journal(_JournalModel):
    """The complete state of a function agent's task. Only the last entry has no outcomes yet.

    `context` is the context as the function found it at its first start.
    """

    format: str
    input: JsonValue
    context: Checkpoint
    entries: list[JournalEntry] = []

    def to_bytes(self) -> bytes:
        """Serialize the journal for `Paused.state`."""
        return self.model_dump_json().encode()

    def to_bytes_with(self, entry: JournalEntry) -> bytes:
        """Serialize the journal with one more entry, without changing it."""
        return self.model_copy(update={"entries": [*self.entries, entry]}).to_bytes()


def read_journal(state: bytes, expected_format: str) -> Journal:
    """Parse and validate the journal in `state`.

    Raises:
        IncompatibleState: It is invalid, or was written by another agent or version.
    """
    try:
        journal = Journal.model_validate_json(state)
    except ValidationError as error:
        raise IncompatibleState(f"not a journal of {expected_format}: {first_problem(error)}") from cause_of(error)
    if journal.format != expected_format:
        raise IncompatibleState(f"the journal was written by {journal.format}, but this agent is {expected_format}")
    complete = [entry.outcomes is not None and len(entry.outcomes) == len(entry.calls) for entry in journal.entries]
    if not complete or complete[-1] or not all(complete[:-1]):
        raise IncompatibleState(f"not a journal of {expected_format}: it is not at a pause")
    return journal


def complete_last_entry(journal: Journal, outcomes: Outcomes) -> None:
    """Record the outcomes of the last pause in the journal.

    Raises:
        IncompatibleState: The outcomes belong to another pause.
    """
    last = journal.entries[-1]
    ids = [call.id for call in last.calls]
    if set(ids) != set(outcomes):
        raise IncompatibleState(f"the journal waits for {ids}, but the outcomes are for {list(outcomes)}")
    ordered: list[Outcome] = [outcomes[call_id] for call_id in ids]
    last.outcomes = ordered
