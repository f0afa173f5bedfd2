"""An account kept outside the mesh: requests, answers, and everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Outcome

from .agents import Work, is_correct


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply, received at `at` (`time.time()`)."""

    at: float
    sender: str
    outcome: Outcome
    body: bytes


@dataclass(slots=True)
class RequestRecord:
    """One request and all its answers."""

    task_id: TaskId
    work: Work
    sent_at: float
    agent: str = "root"
    copies: int = 0  # duplicates sent on purpose, with the same ids
    accepted: bool = False
    answers: list[Answer] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        """Whether the first answer is incorrect."""
        first = self.answers[0] if self.answers else None
        return first is not None and not (
            first.sender == self.agent and is_correct(self.agent, self.work, first.outcome)
        )

    @property
    def has_differing_answers(self) -> bool:
        """Whether two answers have different outcomes."""
        return any(answer.outcome != self.answers[0].outcome for answer in self.answers[1:])

    @property
    def ended_twice(self) -> bool:
        """Whether two answers are not copies of one reply, so that the task ended twice."""
        return len({answer.body for answer in self.answers}) > 1


class Ledger:
    """All requests, by task id."""

    def __init__(self) -> None:
        self.records: dict[TaskId, RequestRecord] = {}
        self.unknown_replies: list[tuple[float, str]] = []
        self.answered_count = 0

    def record_request(self, record: RequestRecord) -> None:
        self.records[record.task_id] = record

    def record_answer(self, task_id: TaskId, answer: Answer) -> RequestRecord | None:
        """Record a reply. Returns its request if this is the first one."""
        record = self.records.get(task_id)
        if record is None:
            self.unknown_replies.append((answer.at, task_id))
            return None
        record.answers.append(answer)
        if len(record.answers) > 1:
            return None
        self.answered_count += 1
        return record

    @property
    def open_requests(self) -> list[RequestRecord]:
        """Requests without an answer."""
        return [record for record in self.records.values() if not record.answers]

    def wrong_requests(self) -> list[RequestRecord]:
        """Requests whose first answer is incorrect."""
        return [record for record in self.records.values() if record.is_wrong]

    def duplicated_requests(self, may_end_twice: Collection[str]) -> list[RequestRecord]:
        """Requests with two different answers, or with two ends.

        The guarantees let some tasks run and end twice, `may_end_twice`: tasks that fell back to
        the in-process backend, and tasks without a row whose first reply was in doubt. Their
        answers must still agree.
        """
        records = self.records.values()
        return [
            record
            for record in records
            if record.has_differing_answers or _ended_twice(record, may_end_twice)
        ]

    @property
    def repeated_answer_count(self) -> int:
        """Number of repeated, equal answers."""
        return sum(len(record.answers) - 1 for record in self.records.values() if record.answers)


def _ended_twice(record: RequestRecord, may_end_twice: Collection[str]) -> bool:
    return record.ended_twice and record.task_id not in may_end_twice
