"""The log of a task: what its pauses append, in the form in which it is stored.

The agent's entries continue its state. Notes record the writes that the working memory contains
(`working_memory.write_log`). A pause that replaces either kind ends its earlier entries: it
appends a restart entry, or deletes all entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from meshpoint.errors import IncompatibleState
from meshpoint.model.calls import Paused
from meshpoint.model.tasks import Resumable, has_log
from meshpoint.model.transitions import LogChange


class _Kind(bytes, Enum):
    """The first byte of an entry."""

    AGENT = b"\x00"
    NOTES = b"\x01"
    AGENT_RESTART = b"\x02"  # the state stands alone: the agent's earlier entries have ended
    NOTES_RESTART = b"\x03"  # these notes replace the earlier ones


@dataclass(frozen=True, slots=True)
class Notes:
    """Notes of one pause, which may replace all earlier ones."""

    content: bytes
    replace: bool = False

    @property
    def entry(self) -> bytes:
        """The entry to store."""
        return (_Kind.NOTES_RESTART if self.replace else _Kind.NOTES) + self.content


@dataclass(frozen=True, slots=True)
class TaskLog:
    """A task's log as its run found it.

    Attributes:
        seq: Number of the last entry ever written.
        size: Bytes of all entries.
        state: The state that the agent's entries continue. `None` before the first pause, and if
            the task starts again from its request.
        agent: What the agent appended, oldest first. Empty if its state stands alone.
        notes: The notes, oldest first.
        has_ended: Whether there are agent entries that no longer continue a state.
        is_stale: Whether no entry counts, because a release without logs paused the task.
    """

    seq: int = 0
    size: int = 0
    state: bytes | None = None
    agent: tuple[bytes, ...] = ()
    notes: tuple[bytes, ...] = ()
    has_ended: bool = False
    is_stale: bool = False

    @classmethod
    def of(cls, task: Resumable) -> TaskLog:
        """Read the log of a task that this run has acquired.

        Raises:
            IncompatibleState: A later version of Meshpoint wrote an entry.
        """
        size = sum(map(len, task.log))
        if task.run.generation > 0 and not has_log(task.state_format):
            return cls(task.log_seq, size, task.state, is_stale=task.log_seq > 0)
        agent, notes = list[bytes](), list[bytes]()
        for entry in task.log:
            match entry[:1]:
                case _Kind.AGENT:
                    agent.append(entry[1:])
                case _Kind.NOTES:
                    notes.append(entry[1:])
                case _Kind.AGENT_RESTART:
                    agent = []
                case _Kind.NOTES_RESTART:
                    notes = [entry[1:]]
                case _:
                    raise IncompatibleState("its log has an entry of an unknown kind")
        if task.run.generation == 0:
            return cls(task.log_seq, size, notes=tuple(notes), has_ended=bool(agent))
        return cls(task.log_seq, size, task.state, tuple(agent), tuple(notes))

    def change(self, paused: Paused, notes: Notes | None = None) -> LogChange | None:
        """The change of the log by a pause with these new notes, or `None`."""
        appended = () if paused.append is None else (_Kind.AGENT + paused.append,)
        entries = appended if notes is None else (*appended, notes.entry)
        keeps_state = bool(appended) and self.state == paused.state
        ends = self.has_ended or bool(self.agent and not appended)
        if not entries and not (ends or (self.is_stale and self.size)):
            return None
        if (kept := self._kept(ends=ends, notes=notes)) is not None:
            return LogChange((*kept, *entries), self.seq, replaces=True, keeps_state=keeps_state)
        if ends:
            entries = (bytes(_Kind.AGENT_RESTART), *entries)
        return LogChange(entries, self.seq, keeps_state=keeps_state, kept_bytes=self.size)

    def _kept(self, *, ends: bool, notes: Notes | None) -> tuple[bytes, ...] | None:
        """The entries to write again if the log is replaced; `None` if that does not pay off."""
        if self.is_stale:
            return ()
        if not self.size or (self.agent and not ends):
            return None
        replaces_notes = notes is not None and notes.replace
        kept = () if replaces_notes else tuple(_Kind.NOTES + each for each in self.notes)
        return kept if 2 * sum(map(len, kept)) <= self.size else None

    def is_empty_after(self, change: LogChange | None) -> bool:
        """Whether nothing is left of the log after `change`."""
        if change is None:
            return not self.size
        return not change.entries and (change.replaces or not self.size)


NO_LOG = TaskLog()
"""The log of a new task."""
