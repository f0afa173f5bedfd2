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
from hashlib import blake2b
from itertools import chain
from typing import TypeAlias

from meshpoint.model.memory import Answer, Command
from meshpoint.model.subtasks import MemoryWrite

WritePosition: TypeAlias = tuple[int, int | str, str]
"""Position of a write in the agent's code.

It has the number of earlier pauses, the number of earlier subtasks or the name of the enclosing
one, and a digest of the last read there. The digest distinguishes a repeated write from a new
write with the same commands: code that reads from the memory what exists and computes the rest may
issue a command for the first time at that position.
"""


class MemoryWriteLog:
    """The writes of one task that this segment's memory contains."""

    def __init__(self, restored: Iterable[MemoryWrite] = ()) -> None:
        self._writes = list(restored)
        self._replayable = self._by_position(self._writes)

    @staticmethod
    def _by_position(writes: Iterable[MemoryWrite]) -> dict[tuple[WritePosition, str], deque[MemoryWrite]]:
        found: dict[tuple[WritePosition, str], deque[MemoryWrite]] = defaultdict(deque)
        for write in writes:
            found[((write.calls, write.subtasks, write.after), write.digest)].append(write)
        return found

    def recorded_answers(self, position: WritePosition, commands: Sequence[Command]) -> list[Answer] | None:
        """Return the recorded answers of these commands at this position; `None` if new."""
        remaining = self._replayable.get((position, commands_digest(commands)))
        return _decode_answers(remaining.popleft().answers, len(commands)) if remaining else None

    def record(self, position: WritePosition, commands: Sequence[Command], answers: Sequence[Answer]) -> None:
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

    def for_checkpoint(self, seq: int, finished_subtasks: Collection[str] = ()) -> tuple[MemoryWrite, ...]:
        """Return all writes for checkpoint `seq`, except those in `finished_subtasks`.

        These subtasks will not run again from their start.
        """
        self._writes = [write for write in self._writes if write.subtasks not in finished_subtasks]
        for index, write in enumerate(self._writes):
            if write.seq == 0:
                self._writes[index] = write.model_copy(update={"seq": seq})
        return tuple(self._writes)

    def discard_after(self, seq: int) -> None:
        """Discard writes after checkpoint `seq`: the restored memory does not contain them."""
        self._writes = [write for write in self._writes if write.seq <= seq]
        self._replayable = self._by_position(self._writes)


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
    return [answer.decode("latin-1") if isinstance(answer, bytes) else answer for answer in answers]  # type: ignore[misc]  # writes return no lists


def _decode_answers(answers: list[int | str | None] | None, count: int) -> list[Answer]:
    if answers is None:
        return [b"OK"] * count
    return [answer.encode("latin-1") if isinstance(answer, str) else answer for answer in answers]
