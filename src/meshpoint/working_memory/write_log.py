"""Which writes to the working memory are done already, when agent code runs again through what it has done.

A memory is restored as the last checkpoint had it: with the effects of what the code wrote before. The code may begin
again further back: a function agent at its top, a handler at its own, and so a subtask that paused or ran beside
others. A write is told from others by its commands and its place, and answered from here if the memory has it.
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
"""How many pauses lie before, and how many subtasks, or in which subtask it is; and what was read there last.

The last tells a write that is done again from the next one of its kind: code that takes from the memory what it has,
and fetches the rest, comes to the same command for the first time.
"""


class MemoryWriteLog:
    """The writes of one task, as the memory of this segment has them."""

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
        """What these commands were answered at this place; None: they were not done yet."""
        remaining = self._replayable.get((position, commands_digest(commands)))
        return _decode_answers(remaining.popleft().answers, len(commands)) if remaining else None

    def record(self, position: WritePosition, commands: Sequence[Command], answers: Sequence[Answer]) -> None:
        """Remember what was just done."""
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
        """All writes for the checkpoint `seq`, except those in `finished_subtasks`, which do not begin anew."""
        self._writes = [write for write in self._writes if write.subtasks not in finished_subtasks]
        for index, write in enumerate(self._writes):
            if write.seq == 0:
                self._writes[index] = write.model_copy(update={"seq": seq})
        return tuple(self._writes)

    def discard_after(self, seq: int) -> None:
        """The memory is that of the checkpoint `seq`: what came later is not in it."""
        self._writes = [write for write in self._writes if write.seq <= seq]
        self._replayable = self._by_position(self._writes)


def commands_digest(commands: Sequence[Command]) -> str:
    """A few bytes, as text, that stand for commands with their arguments."""
    digest = blake2b(digest_size=8)
    for command in commands:
        for part in chain((command.name.encode(), command.key.encode()), command.args):
            digest.update(b"%d:" % len(part) + part)
        digest.update(b";")
    return digest.hexdigest()


def keys_digest(keys: Iterable[str]) -> str:
    """A few bytes, as text, that stand for the keys that were found."""
    return blake2b("\n".join(sorted(keys)).encode(), digest_size=8).hexdigest()


def _encode_answers(answers: Sequence[Answer]) -> list[int | str | None] | None:
    if all(answer == b"OK" for answer in answers):
        return None
    return [answer.decode("latin-1") if isinstance(answer, bytes) else answer for answer in answers]  # type: ignore[misc]  # no write answers with a list


def _decode_answers(answers: list[int | str | None] | None, count: int) -> list[Answer]:
    if answers is None:
        return [b"OK"] * count
    return [answer.encode("latin-1") if isinstance(answer, str) else answer for answer in answers]
