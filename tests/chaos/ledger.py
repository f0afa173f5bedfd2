"""An account kept outside the mesh: requests, answers, and everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Outcome

from .cast import Work, right


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply, received at `at` (`time.time()`)."""

    at: float
    sender: str
    outcome: Outcome
    body: bytes


@dataclass(slots=True)
class Entry:
    """One request and all its answers."""

    task_id: TaskId
    work: Work
    sent_at: float
    agent: str = "root"
    copies: int = 0  # duplicates sent on purpose, with the same ids
    accepted: bool = False
    answers: list[Answer] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        """Whether the first answer is incorrect."""
        first = self.answers[0] if self.answers else None
        return first is not None and not (first.sender == self.agent and right(self.agent, self.work, first.outcome))

    @property
    def differing(self) -> bool:
        """Whether two answers have different outcomes."""
        return any(answer.outcome != self.answers[0].outcome for answer in self.answers[1:])

    @property
    def ended_twice(self) -> bool:
        """Whether two answers are not copies of one reply, so that the task ended twice."""
        return len({answer.body for answer in self.answers}) > 1


class Ledger:
    """All requests, by task id."""

    def __init__(self) -> None:
        self.entries: dict[TaskId, Entry] = {}
        self.strangers: list[tuple[float, str]] = []
        self.answered = 0

    def asked(self, entry: Entry) -> None:
        self.entries[entry.task_id] = entry

    def answer(self, task_id: TaskId, answer: Answer) -> Entry | None:
        """Record a reply. Returns its request if this is the first one."""
        entry = self.entries.get(task_id)
        if entry is None:
            self.strangers.append((answer.at, task_id))
            return None
        entry.answers.append(answer)
        if len(entry.answers) > 1:
            return None
        self.answered += 1
        return entry

    @property
    def open(self) -> list[Entry]:
        """Requests without an answer."""
        return [entry for entry in self.entries.values() if not entry.answers]

    def wrong(self) -> list[Entry]:
        """Requests whose first answer is incorrect."""
        return [entry for entry in self.entries.values() if entry.wrong]

    def duplicated(self, degraded: Collection[str]) -> list[Entry]:
        """Requests with two different answers, or with two ends.

        A task that fell back to the in-process backend may run twice, as the guarantees say; its
        answers must still agree.
        """
        entries = self.entries.values()
        return [entry for entry in entries if entry.differing or _twice(entry, degraded)]

    @property
    def repeated(self) -> int:
        """Number of repeated, equal answers."""
        return sum(len(entry.answers) - 1 for entry in self.entries.values() if entry.answers)


def _twice(entry: Entry, degraded: Collection[str]) -> bool:
    return entry.ended_twice and entry.task_id not in degraded
