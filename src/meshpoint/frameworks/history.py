"""What a framework's agent needs to continue: its messages, and the tool calls that it waits for.

The state of the first pause has the messages so far. Each later pause appends new messages
only, and the last few earlier ones if they have changed. If a framework has changed others, for
example to shorten them, the pause writes all of them and starts the log again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from meshpoint.errors import IncompatibleState
from meshpoint.frameworks.peers import PeerTool
from meshpoint.model.calls import Call, Paused
from meshpoint.model.declared_type import first_problem, loggable_cause
from meshpoint.model.waitable import Waitable

Message: TypeAlias = JsonValue
"""A message of a framework's history, in the framework's own JSON form."""

_MAX_REWRITTEN = 4
"""Maximum changed messages that a pause appends again. If more have changed, it writes all."""
_SMALL_BYTES = 2048
"""Each pause writes a history up to this size whole, which costs less than a log entry."""


class ToolCallKind(StrEnum):
    """What a tool call waits for."""

    PEER = "peer"
    APPROVAL = "approval"
    QUESTION = "question"  # the tool's result, from a person or a webhook
    BUDGET = "budget"  # no tool: more requests to the model
    WAIT = "wait"  # a wait of the agent's own code, which also reads the outcome


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model that has no result yet.

    Attributes:
        id: The framework's own id.
        tool: Name of the tool.
        kind: What it waits for.
        arguments: The validated arguments.
        peer: Name of the peer that it calls, if any.
        is_discovered: Whether the peer was discovered. Set by `FrameworkAgent`.
        is_refused: Whether the turn has too many calls to make this one. Set by `FrameworkAgent`.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    id: str
    tool: str
    kind: ToolCallKind
    arguments: dict[str, JsonValue]
    peer: str | None = None
    is_discovered: bool = False
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the model that cannot end here.

    Attributes:
        messages: All messages so far.
        calls: The tool calls without a result, in call order. Empty if the budget has stopped the
            model; see `meshpoint.frameworks.budget`.
        tools: The peers that the model was offered, by the names of their tools.
        extra: What else the framework needs to continue, such as the usage so far.
        waits: The waits of the agent's own code, by the ids of their calls.
    """

    messages: Sequence[Message]
    calls: Sequence[ToolCall]
    tools: Mapping[str, PeerTool] = field(default_factory=dict)
    extra: dict[str, JsonValue] = field(default_factory=dict)
    waits: Mapping[str, Waitable[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConversationStart:
    """Where a task has entered its conversation: after its turns `first` to `last`, if any.

    Attributes:
        login: The verified login of the task's requester, which is part of the key.
        first: The first turn that the task has seen.
        last: The last one. 0 if there was none.
        last_task: The task that has added the last one.
        is_rewritten: The framework has changed messages of these turns, so the task's own history
            has all messages.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    login: str | None
    first: int = 1
    last: int = 0
    last_task: str = ""
    is_rewritten: bool = False

    @property
    def count(self) -> int:
        """The number of turns."""
        return self.last - self.first + 1


@dataclass(slots=True)
class _Entry:
    """One pause: `messages` follow the first `kept` ones.

    `library` is the framework's version. `budget_times` and `conversation` are as in `History`;
    only a pause that writes all messages has the latter.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    library: str
    messages: list[Message]
    calls: list[ToolCall]
    extra: dict[str, JsonValue]
    kept: int = 0
    budget_times: int = 1
    conversation: ConversationStart | None = None


_ENTRY: TypeAdapter[_Entry] = TypeAdapter(_Entry)


def _dump(entry: _Entry) -> bytes:
    # `dump_json` would make NaN and infinite numbers null: an approved call would have others.
    small = replace(entry, messages=[], extra={})
    fields = _ENTRY.dump_python(small, mode="json", exclude_defaults=True)
    fields |= {"messages": entry.messages, "extra": entry.extra}
    return to_json(fields, inf_nan_mode="constants")


class History:
    """The history of a task as its last pause left it.

    Attributes:
        messages: All messages, including the conversation that the task continues.
        calls: The tool calls that it waits for.
        extra: As in `Turn`. Empty before the first pause.
        libraries: The versions of the framework that wrote it.
        budget_times: How often the task may use its budget.
        conversation: Where the task has entered its conversation. `None` if it belongs to none.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.calls: list[ToolCall] = []
        self.extra: dict[str, JsonValue] = {}
        self.libraries: set[str] = set()
        self.budget_times = 1
        self.conversation: ConversationStart | None = None
        self._earlier = 0  # messages of the conversation, which are not stored with the task
        self._list_final: Callable[[], Sequence[Message]] | None = None
        self._state, self._has_log = b"", False

    @classmethod
    def read(cls, state: bytes, log: Sequence[bytes]) -> History:
        """Read what `pause` has written.

        Raises:
            IncompatibleState: It is damaged, or a later version of Meshpoint wrote it.
        """
        history = cls()
        history._state, history._has_log = state, bool(log)
        try:
            entries = [_ENTRY.validate_json(each) for each in (state, *log)]
        except ValidationError as error:
            reason = f"the history cannot be read: {first_problem(error)}"
            raise IncompatibleState(reason) from loggable_cause(error)
        for entry in entries:
            history.messages[entry.kept :] = entry.messages
            history.libraries.add(entry.library)
        last = entries[-1]
        history.calls, history.extra = last.calls, last.extra
        history.budget_times = last.budget_times
        history.conversation = entries[0].conversation
        return history

    def prepend(self, messages: Sequence[Message], libraries: Collection[str]) -> None:
        """Put the messages of the conversation in front. Versions `libraries` wrote them."""
        self.messages[:0] = messages
        self._earlier = len(messages)
        self.libraries.update(libraries)

    def end(self, list_messages: Callable[[], Sequence[Message]]) -> None:
        """Keep what the task ends with, for its conversation.

        Args:
            list_messages: Returns all messages. Called only if the task belongs to a conversation.
        """
        self._list_final = list_messages

    def added(self) -> tuple[list[Message], bool]:
        """What the task adds to its conversation.

        Returns the messages, and whether they also replace those with which it has started,
        because the framework has changed some of these.
        """
        assert self._list_final is not None, "the adapter has not called History.end"
        messages = list(self._list_final())
        is_rewritten = self._has_rewritten(messages)
        return messages[0 if is_rewritten else self._earlier :], is_rewritten

    def _has_rewritten(self, messages: Sequence[Message]) -> bool:
        start, earlier = self.conversation, self._earlier
        if start is not None and start.is_rewritten:
            return True
        return list(messages[:earlier]) != self.messages[:earlier]

    def pause(self, turn: Turn, calls: Sequence[Call], library: str) -> Paused:
        """Build the pause that waits for `calls`, and writes what `turn` has added."""
        known, messages, earlier = len(self.messages), list(turn.messages), self._earlier
        start = self.conversation
        if start is not None and self._has_rewritten(messages):
            start, earlier = replace(start, is_rewritten=True), 0
        whole = _Entry(library, messages[earlier:], list(turn.calls), turn.extra)
        whole.budget_times, whole.conversation = self.budget_times, start
        # A framework may add the results of peers to the messages with the results of its tools.
        kept = known
        while kept and messages[:kept] != self.messages[:kept] and known - kept < _MAX_REWRITTEN:
            kept -= 1
        is_kept = messages[:kept] == self.messages[:kept] and start == self.conversation
        if not (self._state and kept > earlier and is_kept):
            return Paused(calls, _dump(whole))
        entry = replace(whole, messages=messages[kept:], kept=kept - earlier, conversation=None)
        added = _dump(entry)
        if self._has_log or len(self._state) + len(added) > _SMALL_BYTES:
            return Paused(calls, self._state, append=added)
        return Paused(calls, _dump(whole))


def lost_part(stored: Any, read: Any, path: str = "messages") -> str | None:
    """The first part of `stored` JSON that is missing or different in `read`, or `None`.

    `read` may have more: a later version of a framework adds fields with defaults.
    """
    if isinstance(stored, dict) and isinstance(read, dict):
        parts = ((key, each, read.get(key)) for key, each in stored.items())
    elif isinstance(stored, list) and isinstance(read, list) and len(stored) == len(read):
        parts = ((str(i), a, b) for i, (a, b) in enumerate(zip(stored, read, strict=True)))
    else:
        return None if stored == read else path
    found = (lost_part(a, b, f"{path}.{key}") for key, a, b in parts)
    return next((each for each in found if each is not None), None)
