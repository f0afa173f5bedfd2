"""Signals, kept answers and values of tasks, on the in-process rows."""

from __future__ import annotations

from collections.abc import Sequence

from meshpoint.adapters.inprocess.rows import (
    CallRow,
    SignalRow,
    Tables,
    TaskRow,
    continue_task,
)
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.mailbox import (
    MAX_SIGNAL_IDS,
    MAX_VALUES,
    KeptSignal,
    MailAccepted,
    Mailbox,
    MailForbidden,
    MailRefused,
    MailResult,
    MailUnknown,
    RecordAnswer,
    SendSignal,
    SetValue,
    StoredValue,
    TooManyValues,
)
from meshpoint.model.outcomes import Failed, FailureKind, Outcome, decode_outcome
from meshpoint.model.questions import (
    AskedQuestion,
    QuestionKey,
    describe_answer,
    was_answered,
)
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import CallState, Replica, TaskState
from meshpoint.model.transitions import CancelFound, Fenced, SaveResult, TaskReady
from meshpoint.model.waits import QUESTION_PREFIX


class InProcessMailbox:
    """In-process implementation of the mailbox of `meshpoint.ports.task_store`."""

    _tables: Tables

    async def signal(self, signals: Sequence[SendSignal]) -> list[MailResult]:
        """Keep signals, and deliver them to tasks that wait for them."""
        return [self._signal(command) for command in signals]

    async def answer(self, answers: Sequence[RecordAnswer]) -> list[MailResult]:
        """Record answers to questions, or keep them for the next wait."""
        return [self._answer(command) for command in answers]

    async def find_questions(self, keys: Sequence[QuestionKey]) -> list[AskedQuestion | None]:
        """The questions with these keys; `None` for a question that its task has not asked."""
        return [self._find_question(key) for key in keys]

    async def set_value(self, command: SetValue) -> SaveResult | TooManyValues:
        """Set a value of the task running under exactly this fence."""
        row, run = self._tables.live.get(command.run.task_id), command.run
        if row is None or row.state is not TaskState.RUNNING or row.fence != run.fence:
            return Fenced()
        if command.key not in row.values and len(row.values) >= MAX_VALUES:
            return TooManyValues()
        row.values[command.key] = command.value
        return CancelFound(run) if row.cancel_requested else SaveCommitted()

    async def value(self, task_id: TaskId, agent: AgentName, key: str) -> StoredValue | None:
        """A value of a task; `None` if the agent has no such task."""
        row = self._tables.tasks.get(task_id)
        if row is None or row.agent != agent or row.is_early_cancel:
            return None
        return StoredValue(row.requester.app_id, row.values.get(key))

    async def mailbox(self, task_id: TaskId) -> Mailbox:
        """What is kept for a task."""
        row = self._tables.tasks.get(task_id)
        if row is None:
            return Mailbox()
        return Mailbox(
            tuple(
                KeptSignal(each.id, each.name, each.sender, each.size, each.sent_at)
                for each in row.signals
                if each.value is not None
            ),
            tuple(sorted(key for key, each in row.questions.items() if each.answer is None)),
            tuple(sorted(key for key, each in row.questions.items() if each.is_kept)),
            tuple(sorted(row.values.items())),
        )

    def _signal(self, command: SendSignal) -> MailResult:
        row = self._tables.tasks.get(command.task_id)
        if row is None or row.agent != command.agent or row.is_early_cancel:
            return MailUnknown()
        if not command.may_signal(row.requester.app_id):
            return MailForbidden(row.requester.app_id)
        known = next((each for each in row.signals if each.id == command.id), None)
        if known is not None:
            return command.repeated_result(
                known.digest, is_received=known.value is None, state=row.state
            )
        if row.state.is_final:
            return MailRefused(f"task {command.task_id} has already ended ({row.state.value})")
        if (excess := command.find_excess(_count_kept(row))) is not None:
            return MailRefused(excess)
        row.signal_seq += 1
        kept = SignalRow(
            row.signal_seq,
            command.id,
            command.name,
            command.sender,
            len(command.value),
            command.digest,
            self._tables.clock.now(),
            command.value,
        )
        oldest = row.signal_seq - MAX_SIGNAL_IDS
        row.signals = [
            each for each in (*row.signals, kept) if each.value is not None or each.seq > oldest
        ]
        if row.state is TaskState.WAITING:
            for call in row.current_calls:
                if call.peer == command.peer and call.state is CallState.PENDING:
                    return self._record(row, call, row.receive(command.name), RunId(new_id()))
        return MailAccepted()

    def _record(
        self, row: TaskRow, call: CallRow, outcome: Outcome, claim_id: RunId
    ) -> MailAccepted:
        """Record the outcome of a wait. The task is acquired by a sweep."""
        row.record_outcome(call, outcome, claim_id)
        if not row.is_join_met:
            self._tables.put(row)
            return MailAccepted()
        onlooker = Replica.onlooker(row.agent)
        result = continue_task(self._tables, row, call, onlooker, run_id=claim_id, slots=0)
        cancels = result.cancels if isinstance(result, TaskReady) else ()
        return MailAccepted(is_ready=True, cancels=cancels)

    def _answer(self, command: RecordAnswer) -> MailResult:
        row = self._tables.tasks.get(command.key.task_id)
        if row is None or row.agent != command.key.agent:
            return MailUnknown()
        known, asked = row.questions.get(command.key.sub_task_id), self._find_question(command.key)
        if known is None or asked is None:
            return MailUnknown()
        if asked.outcome == command.outcome:
            return MailAccepted()
        if asked.outcome is not None:
            return MailRefused(describe_answer(command.key.name, asked.outcome))
        call = row.calls.get(command.key.sub_task_id)
        known.answer = command.outcome
        if (
            row.state is TaskState.WAITING
            and call is not None
            and call.state is CallState.PENDING
            and call.generation == row.generation
        ):
            return self._record(row, call, command.outcome, command.id)
        known.is_kept = True
        return MailAccepted()

    def _find_question(self, key: QuestionKey) -> AskedQuestion | None:
        row = self._tables.tasks.get(key.task_id)
        known = None if row is None else row.questions.get(key.sub_task_id)
        if row is None or known is None or row.agent != key.agent:
            return None
        outcome: Outcome | None = known.answer
        call = row.calls.get(key.sub_task_id)
        if outcome is None and call is not None and call.outcome is not None:
            recorded = decode_outcome(call.outcome)
            outcome = recorded if was_answered(recorded) else None
        if outcome is None and row.state.is_final:
            outcome = Failed(FailureKind.CANCELLED, "its task has ended")
        peer = f"{QUESTION_PREFIX}{key.name}"
        return AskedQuestion(key, peer, known.request, row.requester.app_id, outcome)


def _count_kept(row: TaskRow) -> dict[str, tuple[int, int]]:
    """Count and total bytes of the kept signals, by sender."""
    counts: dict[str, tuple[int, int]] = {}
    for each in row.signals:
        if each.value is not None:
            number, size = counts.get(each.sender, (0, 0))
            counts[each.sender] = number + 1, size + each.size
    return counts
