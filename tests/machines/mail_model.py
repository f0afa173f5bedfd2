"""Model of what is kept for a task besides its pause: signals, questions with answers, values."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from pydantic_core import from_json

from meshpoint.model.ids import TaskId
from meshpoint.model.mailbox import KeptSignal, Mailbox, SendSignal
from meshpoint.model.outcomes import Ok, Outcome


@dataclass(slots=True)
class SignalModel:
    """A signal that the task has accepted."""

    sent: SendSignal
    sent_at: datetime
    received: bool = False


@dataclass(slots=True)
class QuestionModel:
    """A question as the task asked it last. `is_kept`: no pause has taken its answer yet."""

    request: bytes
    answer: Outcome | None = None
    is_kept: bool = False


@dataclass(slots=True)
class MailModel:
    """The mailbox and the values of one task."""

    signals: list[SignalModel] = field(default_factory=list)
    questions: dict[TaskId, QuestionModel] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)

    def find(self, signal_id: str) -> SignalModel | None:
        """The signal with this id, received or not."""
        return next((each for each in self.signals if each.sent.id == signal_id), None)

    def receive(self, peer: str) -> Outcome | None:
        """Remove the oldest signal for a wait. `None` if no signal is kept."""
        for each in self.signals:
            if each.sent.peer == peer and not each.received:
                each.received = True
                return Ok(from_json(each.sent.value))
        return None

    def kept_answer(self, question: TaskId) -> Outcome | None:
        """The answer that was kept for the next wait."""
        known = self.questions.get(question)
        return known.answer if known is not None and known.is_kept else None

    def drop_answer_to_other(self, question: TaskId, request: bytes) -> None:
        """Drop an answer that was kept for another prompt."""
        known = self.questions.get(question)
        if known is not None and known.is_kept and known.request != request:
            known.answer, known.is_kept = None, False

    def ask(self, question: TaskId, request: bytes, outcome: Outcome | None) -> None:
        """Record a question that a pause asks. A kept answer that it did not take stays."""
        stays = outcome is None and self.kept_answer(question) is not None
        kept = self.kept_answer(question) if stays else outcome
        self.questions[question] = QuestionModel(request, kept, is_kept=stays)

    def to_mailbox(self) -> Mailbox:
        """The mailbox as people see it."""
        questions = sorted(self.questions.items())
        return Mailbox(
            tuple(
                KeptSignal(
                    each.sent.id,
                    each.sent.name,
                    each.sent.sender,
                    len(each.sent.value),
                    each.sent_at,
                )
                for each in self.signals
                if not each.received
            ),
            tuple(id_ for id_, each in questions if each.answer is None),
            tuple(id_ for id_, each in questions if each.is_kept),
            tuple(sorted(self.values.items())),
        )
