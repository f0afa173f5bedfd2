"""What a function agent remembers over a pause: its input, and every call it has made, with the outcomes."""

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
    """One call of a pause. `digest` stands for its peer and input."""

    id: str
    peer: str
    digest: str

    @classmethod
    def from_call(cls, call: Call) -> RecordedCall:
        """The record of `call`. A timeout is no part of it: changing one does not change the path."""
        return cls(id=call.id, peer=call.peer, digest=digest_of([call.peer, call.input]))


class JournalEntry(_JournalModel):
    """One pause: its calls, its join, the tokens used until then, and, once it is over, the outcomes.

    `subtask` is the one that made the calls; it is not written where there is none, as the release before does not
    know it.
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
        """A pause that waits for `calls`."""
        return cls(
            calls=[RecordedCall.from_call(call) for call in calls],
            needed=join.needed,
            within_seconds=join.deadline.total_seconds() if join.deadline else None,
            usage=usage,
            subtask=subtask,
        )

    def describe_mismatch(self, current: JournalEntry) -> str | None:
        """How `current` differs from this record; None when it is the same request."""
        recorded_peers, current_peers = [call.peer for call in self.calls], [call.peer for call in current.calls]
        if recorded_peers != current_peers:
            return f"recorded was a call of {', '.join(recorded_peers)}; now it calls {', '.join(current_peers)}"
        for recorded, current_call in zip(self.calls, current.calls, strict=True):
            if recorded.digest != current_call.digest:
                return f"the call of {current_call.peer} ({current_call.id}) was recorded with another input"
        if self.subtask != current.subtask:
            before, now = _describe_subtask(self.subtask), _describe_subtask(current.subtask)
            return f"recorded was a call {before}; now it is one {now}"
        if (self.needed, self.within_seconds) != (current.needed, current.within_seconds):
            return f"recorded was {self._describe_join()}; now it is {current._describe_join()}"
        return None

    def total_usage(self) -> TokenUsage:
        """The task's tokens when this pause was over: those used until it, and what the peers used."""
        usage = self.usage.snapshot()
        for call, outcome in zip(self.calls, self.outcomes or (), strict=True):
            usage.merge(outcome.usage, source=call.peer)
        return usage

    def _describe_join(self) -> str:
        needed = "ALL" if self.needed is None else f"AT_LEAST({self.needed})"
        return f"join {needed}" + (f" within {self.within_seconds} s" if self.within_seconds else "")


def _describe_subtask(subtask: str | None) -> str:
    return "outside of subtasks" if subtask is None else f"in subtask {subtask!r}"


class Journal(_JournalModel):
    """The whole state of a function agent's task. Only the last entry is without outcomes.

    `context` is what the function found on its context when it first began.
    """

    format: str
    input: JsonValue
    context: Checkpoint
    entries: list[JournalEntry] = []

    def to_bytes(self) -> bytes:
        """`Paused.state`."""
        return self.model_dump_json().encode()

    def to_bytes_with(self, entry: JournalEntry) -> bytes:
        """The state of a pause with one more entry; this journal stays as it is."""
        return self.model_copy(update={"entries": [*self.entries, entry]}).to_bytes()


def read_journal(state: bytes, expected_format: str) -> Journal:
    """The journal in `state`.

    Raises:
        IncompatibleState: it cannot be read here.
    """
    try:
        journal = Journal.model_validate_json(state)
    except ValidationError as error:
        raise IncompatibleState(f"not a journal of {expected_format}: {first_problem(error)}") from cause_of(error)
    if journal.format != expected_format:
        raise IncompatibleState(f"the journal was written by {journal.format}, this agent is {expected_format}")
    complete = [entry.outcomes is not None and len(entry.outcomes) == len(entry.calls) for entry in journal.entries]
    if not complete or complete[-1] or not all(complete[:-1]):
        raise IncompatibleState(f"not a journal of {expected_format}: it is not at a pause")
    return journal


def complete_last_entry(journal: Journal, outcomes: Outcomes) -> None:
    """Write the outcomes of the last pause into the journal.

    Raises:
        IncompatibleState: they are those of another pause.
    """
    last = journal.entries[-1]
    ids = [call.id for call in last.calls]
    if set(ids) != set(outcomes):
        raise IncompatibleState(f"the journal waits for {ids}, the outcomes are those of {list(outcomes)}")
    ordered: list[Outcome] = [outcomes[call_id] for call_id in ids]
    last.outcomes = ordered
