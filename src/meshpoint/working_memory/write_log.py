"""Detect writes to the working memory that are already done when agent code runs again.

A memory is restored as of the last checkpoint, with the effects of earlier writes. The agent code
may restart before those writes: a function agent at its top, a handler at its start, and likewise
a subtask that paused or ran concurrently with others. A repeated write is recognized by its
commands and its position in the code, and its recorded answer is returned if the memory contains
it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from hashlib import blake2b
from itertools import chain
from typing import TypeAlias, cast

from pydantic_core import from_json, to_json

from meshpoint.model.memory import Answer, Command
from meshpoint.model.recorded_work import current_subtask
from meshpoint.model.subtasks import MemoryWrite

WritePosition: TypeAlias = tuple[int, int | str, str]
"""Position of a write in the agent's code.

It has the number of earlier pauses, the number of earlier subtasks or the name of the enclosing
one, and a digest of the last read there. The digest distinguishes a repeated write from a new
write with the same commands: code that reads from the memory what exists and computes the rest may
issue a command for the first time at that position.
"""

_last_read: ContextVar[WritePosition] = ContextVar("meshpoint_last_read", default=(-1, -1, ""))
"""Position and digest of the last read by the running code."""


def write_position(pauses: int, subtasks: int) -> WritePosition:
    """Return the position of a write that the running code makes now.

    `pauses` and `subtasks` are the numbers of both so far.
    """
    where = (pauses, current_subtask() or subtasks)
    *read_at, read = _last_read.get()
    return *where, read if tuple(read_at) == where else ""


def remember_read(pauses: int, subtasks: int, digest: str) -> None:
    """Remember a read by the running code; it is part of the positions of later writes."""
    _last_read.set((pauses, current_subtask() or subtasks, digest))


class MemoryWriteLog:
    """The writes of one task that this segment's memory contains.

    Args:
        restored: Writes in the last checkpoint.
        logged: Writes in the task's log, which no checkpoint repeats.
        finished_subtasks: Subtasks that will not run again from their start.
        replaces_log: Whether the log has writes that the memory does not contain, so that
            checkpoints have all writes until a pause replaces those in the log.

    Attributes:
        finished_in_log: Finished subtasks whose writes are still in the log. The next pause should
            record there that they have finished.
    """

    def __init__(
        self,
        restored: Iterable[MemoryWrite] = (),
        logged: Iterable[MemoryWrite] = (),
        *,
        finished_subtasks: Collection[str] = (),
        replaces_log: bool = False,
    ) -> None:
        self._writes, self._logged = list(restored), list(logged)
        self.replaces_log = replaces_log
        self.finished_in_log = set[str]()
        self._drop_finished(finished_subtasks)
        self._replayable = self._by_position([*self._logged, *self._writes])

    @staticmethod
    def _by_position(
        writes: Iterable[MemoryWrite],
    ) -> dict[tuple[WritePosition, str], deque[MemoryWrite]]:
        found: dict[tuple[WritePosition, str], deque[MemoryWrite]] = defaultdict(deque)
        for write in writes:
            found[((write.calls, write.subtasks, write.after), write.digest)].append(write)
        return found

    def recorded_answers(
        self, position: WritePosition, commands: Sequence[Command]
    ) -> list[Answer] | None:
        """Return the recorded answers of these commands at this position; `None` if new."""
        remaining = self._replayable.get((position, commands_digest(commands)))
        return _decode_answers(remaining.popleft().answers, len(commands)) if remaining else None

    def record(
        self, position: WritePosition, commands: Sequence[Command], answers: Sequence[Answer]
    ) -> None:
        """Record a write that was just done."""
        calls, subtasks, after = position
        self._writes.append(
            MemoryWrite(
                digest=commands_digest(commands),
                calls=calls,
                subtasks=subtasks,
                after=after,
                seq=0,
                answers=_encode_answers(answers),
            )
        )

    def for_checkpoint(
        self, seq: int, finished_subtasks: Collection[str] = ()
    ) -> tuple[MemoryWrite, ...]:
        """Return the writes for checkpoint `seq`, except those in `finished_subtasks`.

        These subtasks will not run again from their start. Writes in the log are left out too.
        """
        self._drop_finished(finished_subtasks)
        for index, write in enumerate(self._writes):
            if write.seq == 0:
                self._writes[index] = write.model_copy(update={"seq": seq})
        return tuple(self._writes)

    def take_over_log(self) -> None:
        """Put the writes in the log into the checkpoints, until a pause replaces those in it."""
        if self._logged or self.finished_in_log:
            self._writes, self._logged = [*self._logged, *self._writes], []
            self.replaces_log, self.finished_in_log = True, set()

    def _drop_finished(self, finished: Collection[str]) -> None:
        self.finished_in_log |= {
            write.subtasks
            for write in self._logged
            if isinstance(write.subtasks, str) and write.subtasks in finished
        }
        self._logged = [write for write in self._logged if write.subtasks not in finished]
        self._writes = [write for write in self._writes if write.subtasks not in finished]

    def discard_after(self, seq: int) -> None:
        """Discard writes after checkpoint `seq`: the restored memory does not contain them."""
        contained = [write for write in self._logged if write.seq <= seq]
        if len(contained) < len(self._logged):
            self._writes, self._logged = [*contained, *self._writes], []
            self.replaces_log = True
        self._writes = [write for write in self._writes if write.seq <= seq]
        self._replayable = self._by_position([*self._logged, *self._writes])


def encode_writes(writes: Iterable[MemoryWrite], finished_subtasks: Iterable[str] = ()) -> bytes:
    """Encode writes for the task's log, and subtasks whose earlier writes no longer count."""
    rows = [
        (write.digest, write.calls, write.subtasks, write.after, write.seq, write.answers)
        for write in writes
    ]
    return to_json([sorted(finished_subtasks), rows])


def decode_writes(entries: Iterable[bytes]) -> list[MemoryWrite]:
    """Decode what `encode_writes` returned, oldest first."""
    writes: list[MemoryWrite] = []
    for entry in entries:
        finished, rows = from_json(entry)
        if finished:
            writes = [write for write in writes if write.subtasks not in finished]
        writes += [
            MemoryWrite(
                digest=digest,
                calls=calls,
                subtasks=subtasks,
                after=after,
                seq=seq,
                answers=answers,
            )
            for digest, calls, subtasks, after, seq, answers in rows
        ]
    return writes


def commands_digest(commands: Sequence[Command]) -> str:
    """Return a short digest of commands and their arguments."""
    digest = blake2b(digest_size=8)
    for command in commands:
        for part in chain((command.name.encode(), command.key.encode()), command.args):
            digest.update(b"%d:" % len(part) + part)
        digest.update(b";")
    return digest.hexdigest()


def keys_digest(keys: Iterable[str]) -> str:
    """Return a short digest of the keys found by a read."""
    return blake2b("\n".join(sorted(keys)).encode(), digest_size=8).hexdigest()


def _encode_answers(answers: Sequence[Answer]) -> list[int | str | None] | None:
    if all(answer == b"OK" for answer in answers):
        return None
    return [
        answer.decode("latin-1") if isinstance(answer, bytes) else cast(int | None, answer)
        for answer in answers  # only reads return lists
    ]


def _decode_answers(answers: list[int | str | None] | None, count: int) -> list[Answer]:
    if answers is None:
        return [b"OK"] * count
    return [answer.encode("latin-1") if isinstance(answer, str) else answer for answer in answers]
