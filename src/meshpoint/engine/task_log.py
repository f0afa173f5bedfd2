"""The log of a task: what its pauses append, in the form in which it is stored.

The agent's entries continue its state. Notes record the writes that the working memory contains
(`working_memory.write_log`). Step records (`subtasks.step_records`) are appended between two
pauses. A change that replaces a kind ends its earlier entries: it appends a restart entry, or
deletes all entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from meshpoint.errors import IncompatibleState
from meshpoint.model.calls import Paused
from meshpoint.model.log_entries import LogEntries
from meshpoint.model.tasks import Resumable, has_log
from meshpoint.model.transitions import LogChange


class _Kind(bytes, Enum):
    """The first byte of an entry."""

    AGENT = b"\x00"
    NOTES = b"\x01"
    AGENT_RESTART = b"\x02"  # the state stands alone: the agent's earlier entries have ended
    NOTES_RESTART = b"\x03"  # these notes replace the earlier ones
    STEP = b"\x04"  # with the attempt of the operation in four bytes
    STEPS_RESTART = b"\x05"  # the earlier step records have ended, or the last ones, by number


_AGENT = bytes(_Kind.AGENT)  # compared with each entry of a long log


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
class StepEntry:
    """A step record in the log. `attempt` is the operation's `retry_count` when it was made."""

    attempt: int
    record: bytes

    @property
    def entry(self) -> bytes:
        """The entry to store."""
        return _Kind.STEP + self.attempt.to_bytes(4) + self.record


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
        steps: The step records, oldest first, each with the attempt that made it. `with_steps`
            adds to them in place.
        has_ended: Whether there are agent entries that no longer continue a state.
        has_ended_steps: Whether there are step records of an attempt that began elsewhere.
        is_stale: Whether a release without logs has run the task since: its pauses and checkpoints
            have everything that counts, except the step records of this attempt.
    """

    seq: int = 0
    size: int = 0
    state: bytes | None = None
    agent: Sequence[bytes] = ()
    notes: tuple[bytes, ...] = ()
    steps: list[StepEntry] = field(default_factory=list)
    has_ended: bool = False
    has_ended_steps: bool = False
    is_stale: bool = False

    @classmethod
    def of(cls, task: Resumable) -> TaskLog:
        """Read the log of a task that this run has acquired.

        Raises:
            IncompatibleState: A later version of Meshpoint wrote an entry.
        """
        log = LogEntries.of(task.log)
        size, start = log.size, log.skipped + 1
        if task.run.generation > 0 and not has_log(task.state_format):
            return cls(task.log_seq, size, task.state, is_stale=task.log_seq > 0)
        agent, notes, steps = list[bytes](), list[bytes](), list[StepEntry]()
        skipped = log.skipped
        for entry in log.stored:
            kind = entry[skipped:start]
            if kind == _AGENT:
                agent.append(entry)
                continue
            match kind:
                case _Kind.NOTES:
                    notes.append(entry[start:])
                case _Kind.AGENT_RESTART:
                    agent = []
                case _Kind.NOTES_RESTART:
                    notes = [entry[start:]]
                case _Kind.STEP:
                    steps += step_entries(entry[log.skipped :])
                case _Kind.STEPS_RESTART:
                    steps = steps[: -int(entry[start:])] if entry[start:] else []
                case _:
                    raise IncompatibleState("its log has an entry of an unknown kind")
        if task.run.generation == 0:  # an attempt from the beginning
            own = [each for each in steps if each.attempt == task.retry_count]
            if notes and not has_log(task.state_format):  # the pause that wrote them marked it
                return cls(task.log_seq, size, steps=own, is_stale=True)
            return cls(
                task.log_seq,
                size,
                notes=tuple(notes),
                steps=own,
                has_ended=bool(agent),
                has_ended_steps=len(own) < len(steps),
            )
        return cls(task.log_seq, size, task.state, LogEntries(agent, start), tuple(notes), steps)

    def change(
        self, paused: Paused, notes: Notes | None = None, *, keeps_steps: bool = False
    ) -> LogChange | None:
        """The change of the log by a pause with these new notes, or `None`.

        `keeps_steps`: the code before the pause will run again, and needs its step records.
        """
        appended = () if paused.append is None else (_Kind.AGENT + paused.append,)
        entries = appended if notes is None else (*appended, notes.entry)
        keeps_state = bool(appended) and self.state == paused.state
        ends = self.has_ended or bool(self.agent and not appended)
        ends_steps = self.has_ended_steps or bool(self.steps and not keeps_steps)
        if not (entries or ends or ends_steps or (self.is_stale and self.size)):
            return None
        continues = bool(self.agent) and not (ends or ends_steps)
        if self.is_stale or not continues:
            live = self._live(
                agent=not ends,
                notes=notes is None or not notes.replace,
                steps=keeps_steps,
            )
            halves = bool(self.size) and 2 * sum(map(len, live)) <= self.size
            if self.is_stale or halves:
                entries = (*live, *entries)
                return LogChange(entries, self.seq, replaces=True, keeps_state=keeps_state)
        if ends_steps:
            entries = (*self._steps_restart(keeps_steps), *entries)
        if ends:
            entries = (bytes(_Kind.AGENT_RESTART), *entries)
        return LogChange(entries, self.seq, keeps_state=keeps_state, kept_bytes=self.size)

    def _live(self, *, agent: bool, notes: bool, steps: bool) -> tuple[bytes, ...]:
        """The entries of these kinds that still count, to be written again."""
        return (
            *(_Kind.AGENT + each for each in self.agent if agent),
            *(_Kind.NOTES + each for each in self.notes if notes),
            *(each.entry for each in self.steps if steps),
        )

    def _steps_restart(self, keeps_steps: bool) -> tuple[bytes, ...]:
        """The entries that end all step records, or only the records of earlier attempts."""
        kept = (each.entry for each in self.steps if keeps_steps)
        return (bytes(_Kind.STEPS_RESTART), *kept)

    def append(self, records: Sequence[StepEntry]) -> LogChange:
        """The change of the log by new step records between two pauses."""
        entries = tuple(each.entry for each in records)
        if self.is_stale:
            kept = tuple(each.entry for each in self.steps)
            return LogChange((*kept, *entries), self.seq, replaces=True)
        if self.has_ended_steps:
            entries = (*self._steps_restart(keeps_steps=True), *entries)
        return LogChange(entries, self.seq, kept_bytes=self.size)

    def with_steps(self, change: LogChange, records: Sequence[StepEntry]) -> TaskLog:
        """The log after `change`, which has appended these records. It replaces this one."""
        self.steps.extend(records)
        return replace(
            self,
            seq=self.seq + len(change.entries),
            size=change.log_bytes,
            has_ended_steps=False,
            is_stale=False,
        )

    def drop_steps(self, count: int) -> LogChange:
        """The change that ends the last `count` step records."""
        entry = _Kind.STEPS_RESTART + b"%d" % count
        return LogChange((entry,), self.seq, kept_bytes=self.size)

    def is_empty_after(self, change: LogChange | None) -> bool:
        """Whether nothing is left of the log after `change`."""
        if change is None:
            return not self.size
        return not change.entries and (change.replaces or not self.size)


def step_entries(entry: bytes) -> tuple[StepEntry, ...]:
    """The step record in a stored entry, or nothing if it is of another kind."""
    if entry[:1] != _Kind.STEP:
        return ()
    return (StepEntry(int.from_bytes(entry[1:5]), entry[5:]),)
