"""The state of a function agent across pauses: its input, and each call with its outcome.

The state holds the first pauses. Each later pause appends itself and the outcomes of the one
before it to the task's log, so that nothing is written twice.
"""

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
from meshpoint.model.calls import Call, Join, Paused
from meshpoint.model.declared_type import first_problem, loggable_cause
from meshpoint.model.json_values import json_digest
from meshpoint.model.outcomes import Failed, Ok, Outcome, Outcomes
from meshpoint.model.tasks import CheckpointDict
from meshpoint.model.usage import TokenUsage


class _JournalModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _RecordedCall(_JournalModel):
    """One call of a pause. `digest` is computed from its peer and input."""

    id: str
    peer: str
    digest: str

    @classmethod
    def from_call(cls, call: Call) -> _RecordedCall:
        """Record `call`. The timeout is left out, so that changing it is not a mismatch."""
        digest = json_digest([call.peer, call.input])
        return cls.model_construct(id=call.id, peer=call.peer, digest=digest)


class JournalEntry(_JournalModel):
    """One pause: its calls and join, the tokens used so far, and the outcomes once it is complete.

    `subtask` is the subtask that made the calls. It is not serialized when `None`, because the
    previous release does not know the field.
    """

    calls: list[_RecordedCall]
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
        return cls.model_construct(  # unvalidated: a replay creates the entries of all its pauses
            calls=[_RecordedCall.from_call(call) for call in calls],
            needed=join.needed,
            within_seconds=join.deadline.total_seconds() if join.deadline else None,
            usage=usage,
            subtask=subtask,
        )

    def records(self, calls: Sequence[Call], join: Join, subtask: str | None) -> bool:
        """Whether this is the entry of the pause for `calls`. A replay checks every pause."""
        return (
            len(calls) == len(self.calls)
            and subtask == self.subtask
            and join.needed == self.needed
            and (join.deadline and join.deadline.total_seconds()) == self.within_seconds
            and all(
                recorded.peer == call.peer
                and recorded.digest == json_digest([call.peer, call.input])
                for recorded, call in zip(self.calls, calls, strict=True)
            )
        )

    def describe_mismatch(self, current: JournalEntry) -> str | None:
        """Describe how `current` differs from this record, such as "expected flights, recorded
        weather"; `None` if they are the same.
        """
        recorded_peers, current_peers = (
            [call.peer for call in self.calls],
            [call.peer for call in current.calls],
        )
        if recorded_peers != current_peers:
            return (
                f"expected {' and '.join(current_peers)}, recorded {' and '.join(recorded_peers)}"
            )
        for recorded, current_call in zip(self.calls, current.calls, strict=True):
            if recorded.digest != current_call.digest:
                return f"{current_call.id} has another input than recorded"
        if self.subtask != current.subtask:
            recorded_place = _describe_subtask(self.subtask)
            return f"expected {_describe_subtask(current.subtask)}, recorded {recorded_place}"
        if (self.needed, self.within_seconds) != (current.needed, current.within_seconds):
            return f"expected {current._describe_join()}, recorded {self._describe_join()}"
        return None

    def total_usage(self) -> TokenUsage:
        """The task's token usage at the end of this pause, including what the peers used."""
        usage = self.usage.snapshot()
        for call, outcome in zip(self.calls, self.outcomes or (), strict=True):
            usage.merge(outcome.usage, source=call.peer)
        return usage

    def _describe_join(self) -> str:
        needed = "ALL" if self.needed is None else f"AT_LEAST({self.needed})"
        return f"join {needed}" + (
            f" within {self.within_seconds} s" if self.within_seconds else ""
        )


def _describe_subtask(subtask: str | None) -> str:
    return "outside subtasks" if subtask is None else f"in subtask {subtask!r}"


class _LogEntry(_JournalModel):
    """One entry of the task's log: a pause, and the outcomes of the pause before it."""

    outcomes: list[Ok[JsonValue] | Failed]
    entry: JournalEntry


class Journal(_JournalModel):
    """The complete state of a function agent's task. Only the last entry has no outcomes yet.

    `context` is the context as the function found it at its first start.
    """

    format: str
    input: JsonValue
    context: CheckpointDict
    entries: list[JournalEntry] = []

    def to_bytes(self) -> bytes:
        """Serialize the journal for `Paused.state`."""
        return self.model_dump_json().encode()


_SMALL_BYTES = 2048
"""Each pause writes a journal up to this size whole, which costs less than a log entry."""


class StoredJournal:
    """A journal, and how it is stored: as a state and a log, or not at all yet."""

    def __init__(
        self, journal: Journal, state: bytes | None = None, log: Sequence[bytes] = ()
    ) -> None:
        self.journal = journal
        self._state, self._has_log = state, bool(log)

    def pause(self, calls: Sequence[Call], join: Join, entry: JournalEntry) -> Paused:
        """Create the pause that waits for `calls`, with `entry` added to the stored journal."""
        if self._state is None:
            return Paused(calls, self._with(entry), join)
        if not self._has_log and len(self._state) <= _SMALL_BYTES:
            state = self._with(entry)
            if len(state) <= _SMALL_BYTES:
                return Paused(calls, state, join)
        outcomes = self.journal.entries[-1].outcomes or []
        addition = _LogEntry.model_construct(outcomes=outcomes, entry=entry)
        return Paused(calls, self._state, join, append=addition.model_dump_json().encode())

    def _with(self, entry: JournalEntry) -> bytes:
        entries = [*self.journal.entries, entry]
        return self.journal.model_copy(update={"entries": entries}).to_bytes()


def read_journal(state: bytes, log: Sequence[bytes], expected_format: str) -> Journal:
    """Parse and validate the journal in `state` and `log`.

    Raises:
        IncompatibleState: It is invalid, or was written by another agent or version.
    """
    try:
        journal = Journal.model_validate_json(state)
        for logged in map(_LogEntry.model_validate_json, log):
            if journal.entries:
                journal.entries[-1].outcomes = logged.outcomes
            journal.entries.append(logged.entry)
    except ValidationError as error:
        raise IncompatibleState(
            f"not a journal of {expected_format}: {first_problem(error)}"
        ) from loggable_cause(error)
    if journal.format != expected_format:
        raise IncompatibleState(
            f"the journal was written by {journal.format}, but this agent is {expected_format}"
        )
    complete = [
        entry.outcomes is not None and len(entry.outcomes) == len(entry.calls)
        for entry in journal.entries
    ]
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
        raise IncompatibleState(
            f"the journal waits for {ids}, but the outcomes are for {list(outcomes)}"
        )
    ordered: list[Outcome] = [outcomes[call_id] for call_id in ids]
    last.outcomes = ordered
