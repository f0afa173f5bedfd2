"""The state of a function agent across pauses: its input, and each call with its outcome.

The state holds the first pauses. Each later pause appends itself and the outcomes of the one
before it to the task's log, so that nothing is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
)
from pydantic_core import from_json

from meshpoint.errors import IncompatibleState
from meshpoint.model.calls import Call, Join, Paused
from meshpoint.model.context_runtime import UnsentCall
from meshpoint.model.declared_type import first_problem, loggable_cause
from meshpoint.model.json_values import call_digest
from meshpoint.model.log_entries import LogEntries
from meshpoint.model.outcomes import Failed, Ok, Outcome, Outcomes
from meshpoint.model.tasks import CheckpointDict
from meshpoint.model.usage import TokenUsage
from meshpoint.model.waits import display_name, is_wait

# The classes below are dataclasses, because each resume reads all entries again: pydantic creates
# them at half the cost of models.
_STRICT = ConfigDict(extra="forbid")


@dataclass(slots=True)
class _RecordedCall:
    """One call of a pause. `digest` is computed from its peer and input."""

    __pydantic_config__: ClassVar = _STRICT

    id: str
    peer: str
    digest: str

    @classmethod
    def from_call(cls, call: Call) -> _RecordedCall:
        """Record `call`. The timeout is left out, so that changing it is not a mismatch."""
        return cls(call.id, call.peer, call_digest(call.peer, call.input))


@dataclass(slots=True)
class _RecordedOk:
    """A result. `usage` is `None` if no tokens were counted.

    `text_bytes` is the size of a text that follows the entry in place of `value`.
    """

    __pydantic_config__: ClassVar = _STRICT

    value: JsonValue
    artifacts: tuple[dict[str, JsonValue], ...] = ()
    usage: TokenUsage | None = None
    text_bytes: Annotated[int, Field(ge=0)] | None = None

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: each for key, each in handler(self).items() if each or key == "value"}

    def to_ok(self) -> Ok[JsonValue]:
        """The outcome, for agent code."""
        if self.usage is None:
            return Ok.without_usage(self.value, self.artifacts)
        return Ok(self.value, self.artifacts, self.usage)


_Recorded: TypeAlias = Annotated[_RecordedOk | Failed, Field(union_mode="left_to_right")]


def _record(outcome: Outcome) -> _RecordedOk | Failed:
    if isinstance(outcome, Failed):
        return outcome
    usage = None if outcome.usage.is_empty else outcome.usage
    return _RecordedOk(outcome.value, outcome.artifacts, usage)


@dataclass(frozen=True, slots=True)
class _NoUsage:
    """The usage of a task that has counted no tokens: `{}`."""

    __pydantic_config__: ClassVar = _STRICT


_PEER = attrgetter("peer")
_REQUIRED = frozenset({"calls", "needed", "within_seconds", "usage"})


@dataclass(slots=True)
class JournalEntry:
    """One pause: its calls and join, the tokens used so far, and the outcomes once it is complete.

    `subtask` is the subtask that made the calls, and `now` what `ctx.now()` returned since the
    pause before. They are not serialized when `None`, because earlier releases do not know them.
    """

    __pydantic_config__: ClassVar = _STRICT

    calls: list[_RecordedCall]
    needed: int | None
    within_seconds: float | None
    usage: Annotated[_NoUsage | TokenUsage, Field(union_mode="left_to_right")]
    outcomes: list[_Recorded] | None = None
    subtask: str | None = None
    now: datetime | None = None

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {key: each for key, each in data.items() if each is not None or key in _REQUIRED}

    @classmethod
    def for_calls(
        cls, calls: Sequence[Call], join: Join, usage: TokenUsage, subtask: str | None = None
    ) -> JournalEntry:
        """Create the entry of a pause that waits for `calls`."""
        return cls(
            calls=[_RecordedCall.from_call(call) for call in calls],
            needed=join.needed,
            within_seconds=join.deadline.total_seconds() if join.deadline else None,
            usage=_NoUsage() if usage.is_empty else usage,
            subtask=subtask,
        )

    def add_artifacts_to(self, artifacts: list[dict[str, JsonValue]]) -> None:
        """Add the artifacts of the recorded results, in call order."""
        for outcome in self.outcomes or ():
            if isinstance(outcome, _RecordedOk) and outcome.artifacts:
                artifacts.extend(outcome.artifacts)

    def records(self, calls: Sequence[UnsentCall[Any]], join: Join, subtask: str | None) -> bool:
        """Whether this is the entry of the pause for `calls`. A replay checks every pause."""
        if len(calls) != len(self.calls) or subtask != self.subtask or join.needed != self.needed:
            return False
        if (join.deadline and join.deadline.total_seconds()) != self.within_seconds:
            return False
        for recorded, call in zip(self.calls, calls, strict=True):
            if recorded.peer != call.peer:
                return False
            if recorded.digest != call_digest(call.peer, call.input):
                return False
        return True

    def describe_mismatch(self, current: JournalEntry) -> str | None:
        """Describe how `current` differs from this record, such as "expected flights, recorded
        weather"; `None` if they are the same.
        """
        recorded_peers, current_peers = (
            [display_name(call.peer) for call in self.calls],
            [display_name(call.peer) for call in current.calls],
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

    @property
    def has_waits(self) -> bool:
        """Whether the pause has waits that no peer answers."""
        return any(map(is_wait, map(_PEER, self.calls)))  # each replay checks every pause

    def read_outcomes(self) -> list[Outcome]:
        """The outcomes of a complete pause, in call order."""
        return [
            each.to_ok() if isinstance(each, _RecordedOk) else each for each in self.outcomes or ()
        ]

    @property
    def is_complete(self) -> bool:
        """Whether every call has an outcome."""
        return self.outcomes is not None and len(self.outcomes) == len(self.calls)

    def total_usage(self) -> TokenUsage | None:
        """The task's token usage at the end of this pause, including what the peers used.

        `None` if no tokens were counted.
        """
        outcomes = self.outcomes or ()
        if isinstance(self.usage, _NoUsage):
            for each in outcomes:
                if each.usage is not None and not each.usage.is_empty:
                    break
            else:
                return None
        usage = TokenUsage() if isinstance(self.usage, _NoUsage) else self.usage.snapshot()
        for call, outcome in zip(self.calls, outcomes, strict=True):
            if outcome.usage is not None:
                usage.merge(outcome.usage, source=call.peer)
        return usage

    def _describe_join(self) -> str:
        needed = "ALL" if self.needed is None else f"AT_LEAST({self.needed})"
        return f"join {needed}" + (
            f" within {self.within_seconds} s" if self.within_seconds else ""
        )


def _describe_subtask(subtask: str | None) -> str:
    return "outside subtasks" if subtask is None else f"in subtask {subtask!r}"


_TEXT_CHARACTERS = 1000
"""Longer texts follow the JSON of their log entry: unescaping takes most of the time of a replay.

Releases without such texts refuse the entry, because it is not JSON.
"""


@dataclass(slots=True)
class _LogEntry:
    """One entry of the task's log: a pause, and the outcomes of the pause before it."""

    __pydantic_config__: ClassVar = _STRICT

    outcomes: list[_Recorded]
    entry: JournalEntry

    def to_bytes(self) -> bytes:
        """Serialize the entry: JSON and, if there are long texts, a line feed and the texts."""
        outcomes, texts = list[_RecordedOk | Failed](), list[bytes]()
        for each in self.outcomes:
            if isinstance(each, Failed) or not _is_long_text(each.value):
                outcomes.append(each)
            else:
                texts.append(str(each.value).encode())
                outcomes.append(replace(each, value=None, text_bytes=len(texts[-1])))
        if not texts:
            return _LOG_ENTRY.dump_json(self)
        return b"".join((_LOG_ENTRY.dump_json(_LogEntry(outcomes, self.entry)), b"\n", *texts))

    @classmethod
    def from_bytes(cls, encoded: bytes) -> _LogEntry:
        """Decode what `to_bytes` returned.

        Raises:
            ValueError: It is invalid.
        """
        if (line_feed := encoded.find(b"\n")) < 0:
            return _READ_LOG_ENTRY(encoded)
        logged, end = _READ_LOG_ENTRY(encoded[:line_feed]), line_feed + 1
        for each in logged.outcomes:
            if isinstance(each, _RecordedOk) and each.text_bytes is not None:
                end, start = end + each.text_bytes, end
                each.value, each.text_bytes = encoded[start:end].decode(), None
        if end != len(encoded):
            first = line_feed + 1
            raise ValueError(
                f"its texts have {len(encoded) - first} bytes instead of {end - first}"
            )
        return logged


_RESULT = b'{"outcomes":[{"value":'
_TEXT = re.compile(rb'null,"text_bytes":([0-9]{1,12})')
_NEXT_PAUSE = b'}],"entry":{"calls":['
_PLAIN_END = b'],"needed":null,"within_seconds":null,"usage":{}}}'
"""A log entry with one result, and a pause with nothing but calls, begins and ends so.

The result ends at the last `_NEXT_PAUSE`: calls have only texts, in which quotes are escaped.
"""

_PLAIN_PAUSE = b"""{"calls":[{"id":"%b.0","peer":"%b","digest":"%b"}],\
"needed":null,"within_seconds":null,"usage":{}}"""


def _plain_pause(call: UnsentCall[Any]) -> bytes:
    """The JSON of the `JournalEntry` of a plain pause for `call`."""
    peer = call.peer.encode()
    return _PLAIN_PAUSE % (peer, peer, call_digest(call.peer, call.input).encode())


def _read_plain(encoded: bytes, start: int) -> tuple[Ok[JsonValue], bytes] | None:
    """The result and the pause in a log entry, the pause as JSON; `None` if it is not plain.

    The entry follows `start` bytes, since a copy without them would take longer.
    """
    line_feed = encoded.find(b"\n", start)
    end = len(encoded) if line_feed < 0 else line_feed
    if not (encoded.startswith(_RESULT, start) and encoded.endswith(_PLAIN_END, start, end)):
        return None
    # Not by a regular expression: with a result that is full of entries, it would take hours.
    if (value_end := encoded.rfind(_NEXT_PAUSE, start, end)) < 0:
        return None
    value, pause = (
        encoded[start + len(_RESULT) : value_end],
        encoded[value_end + len('}],"entry":') : end - 1],
    )
    try:
        if line_feed < 0:
            return Ok.without_usage(from_json(value)), pause
        match = _TEXT.fullmatch(value)
        if match is None or line_feed + 1 + int(match[1]) != len(encoded):
            return None
        return Ok.without_usage(encoded[line_feed + 1 :].decode()), pause
    except ValueError:
        return None


def _is_long_text(value: JsonValue) -> bool:
    return isinstance(value, str) and len(value) > _TEXT_CHARACTERS


@dataclass(slots=True)
class Journal:
    """The complete state of a function agent's task. Only the last entry has no outcomes yet.

    `context` is the context as the function found it at its first start.
    """

    __pydantic_config__: ClassVar = _STRICT

    format: str
    input: JsonValue
    context: CheckpointDict
    entries: list[JournalEntry] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """Serialize the journal for `Paused.state`."""
        return _JOURNAL.dump_json(self)

    @classmethod
    def merge(cls, state: bytes, log: Sequence[bytes]) -> Journal:
        """The whole journal of a paused task, from its state and its log.

        Raises:
            ValueError: The state or an entry cannot be read.
        """
        journal = _JOURNAL.validate_json(state)
        for encoded in log:
            logged = _LogEntry.from_bytes(encoded)
            journal.entries[-1].outcomes = logged.outcomes
            journal.entries.append(logged.entry)
        return journal


_JOURNAL: TypeAdapter[Journal] = TypeAdapter(Journal)
_LOG_ENTRY: TypeAdapter[_LogEntry] = TypeAdapter(_LogEntry)
_READ_LOG_ENTRY: Callable[[bytes], _LogEntry] = _LOG_ENTRY.validator.validate_json
"""Bypasses the layer of `TypeAdapter`, which would take a quarter of the time."""

_NO_ENTRIES = LogEntries()
_SMALL_BYTES = 2048
"""Each pause writes a journal up to this size whole, which costs less than a log entry."""


class StoredJournal:
    """The journal of a task, and how it is stored: as a state and a log, or not at all yet.

    An entry of the log is decoded when the function reaches it, so that a long replay has only one
    of them in memory. Most of a long history are plain pauses, which `find_plain` reads in a third
    of the time that `entry` takes.

    Attributes:
        pauses: Number of recorded pauses.
    """

    def __init__(
        self, journal: Journal, state: bytes | None = None, log: LogEntries = _NO_ENTRIES
    ) -> None:
        self.journal = journal
        self._state, self._log = state, log
        self._in_state, self._in_log = len(journal.entries), len(log.stored)
        self.pauses = self._in_state + self._in_log
        self._decoded: tuple[int, _LogEntry] | None = None
        self._reached: tuple[int, JournalEntry] | None = None
        self._plain: tuple[int, bytes] | None = None
        self._outcomes: list[_Recorded] = []

    @classmethod
    def read(
        cls, state: bytes, log: Sequence[bytes], expected_format: str, outcomes: Outcomes
    ) -> StoredJournal:
        """Read the journal in `state` and `log`, and record the outcomes of its last pause.

        Raises:
            IncompatibleState: It is invalid, was written by another agent or version, or waits for
                other calls.
        """
        try:
            journal = _JOURNAL.validate_json(state)
        except ValidationError as error:
            raise _invalid(expected_format, error) from loggable_cause(error)
        if journal.format != expected_format:
            raise IncompatibleState(
                f"the journal was written by {journal.format}, but this agent is {expected_format}"
            )
        stored = cls(journal, state, LogEntries.of(log))
        stored._complete_last(outcomes)
        return stored

    def _complete_last(self, outcomes: Outcomes) -> None:
        if not self.pauses:
            raise _not_paused(self.journal.format)
        last = self._decode(len(self._log) - 1)[1].entry if self._log else self.journal.entries[-1]
        if last.is_complete or not all(each.is_complete for each in self.journal.entries[:-1]):
            raise _not_paused(self.journal.format)
        ids = [call.id for call in last.calls]
        if set(ids) != set(outcomes):
            raise IncompatibleState(
                f"the journal waits for {ids}, but the outcomes are for {list(outcomes)}"
            )
        self._outcomes = [_record(outcomes[call_id]) for call_id in ids]
        if not self._log:
            last.outcomes = self._outcomes

    def find_plain(self, number: int, call: UnsentCall[Any]) -> Ok[JsonValue] | None:
        """The result of the recorded pause with this number, if it is a plain pause for `call`.

        A plain pause waits for one call, outside of subtasks and without a deadline. The call has
        a result without artifacts, no tokens were used so far, and the code has not asked for the
        time.

        Returns:
            The result, or `None` for another pause, the last one, and an invalid one. Call `entry`
            then.
        """
        position = number - self._in_state
        if position < 0 or position + 1 >= self._in_log:
            return None
        entries, start = self._log.stored, self._log.skipped
        last = self._plain  # the entry that has the result of the previous pause
        if last is None or last[0] != position:
            plain = _read_plain(entries[position], start)
            last = self._plain = None if plain is None else (position, plain[1])
        if last is None or last[1] != _plain_pause(call):
            return None
        following = _read_plain(entries[position + 1], start)
        if following is None:
            return None
        self._plain = position + 1, following[1]
        return following[0]

    def entry(self, number: int) -> JournalEntry:
        """The recorded pause with this number, from 0, with its outcomes.

        Raises:
            IncompatibleState: It is invalid.
        """
        if self._reached is not None and self._reached[0] == number:
            return self._reached[1]
        following = number - self._in_state + 1  # the log entry that has its outcomes
        if following > 0:
            decoded = self._decoded  # it has the outcomes of the previous pause
            if decoded is None or decoded[0] != following - 1:
                decoded = self._decode(following - 1)
            entry = decoded[1].entry
        else:
            entry = self.journal.entries[number]
        if following == self._in_log:
            entry.outcomes = self._outcomes
        elif following >= 0:
            entry.outcomes = self._decode(following)[1].outcomes
        if entry.outcomes is None or len(entry.outcomes) != len(entry.calls):
            raise _not_paused(self.journal.format)
        self._reached = number, entry
        return entry

    def _decode(self, position: int) -> tuple[int, _LogEntry]:
        try:
            self._decoded = position, _LogEntry.from_bytes(self._log[position])
        except ValidationError as error:
            raise _invalid(self.journal.format, error) from loggable_cause(error)
        except ValueError as error:
            raise IncompatibleState(f"not a journal of {self.journal.format}: {error}") from error
        return self._decoded

    def pause(self, calls: Sequence[Call], join: Join, entry: JournalEntry) -> Paused:
        """Create the pause that waits for `calls`, with `entry` added to the stored journal."""
        if self._state is None:
            return Paused(calls, self._with(entry), join)
        if not self._log and len(self._state) <= _SMALL_BYTES:
            state = self._with(entry)
            if len(state) <= _SMALL_BYTES:
                return Paused(calls, state, join)
        addition = _LogEntry(self._outcomes, entry).to_bytes()
        return Paused(calls, self._state, join, append=addition)

    def _with(self, entry: JournalEntry) -> bytes:
        return replace(self.journal, entries=[*self.journal.entries, entry]).to_bytes()


def _invalid(expected_format: str, error: ValidationError) -> IncompatibleState:
    return IncompatibleState(f"not a journal of {expected_format}: {first_problem(error)}")


def _not_paused(expected_format: str) -> IncompatibleState:
    return IncompatibleState(f"not a journal of {expected_format}: it is not at a pause")
