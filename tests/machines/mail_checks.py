"""Checks of signals, answers and values."""

from __future__ import annotations

from collections.abc import Sequence

from machines.ledger import Ledger
from machines.mail_model import SignalModel
from machines.task_model import CallModel, TaskModel, without_message
from meshpoint.model.ids import AgentName
from meshpoint.model.mailbox import (
    MailAccepted,
    MailForbidden,
    MailRefused,
    MailResult,
    MailUnknown,
    RecordAnswer,
    SendSignal,
    SetValue,
)
from meshpoint.model.outcomes import Failed, FailureKind, Outcome
from meshpoint.model.questions import AskedQuestion, QuestionKey, was_answered
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import CancelFound, Fenced

_REFUSED = MailRefused("")


def check_signals(
    ledger: Ledger, commands: Sequence[SendSignal], results: Sequence[MailResult]
) -> None:
    """Check and apply the results of signals."""
    for command, result in zip(commands, results, strict=True):
        _check(result, _signal(ledger, command, ledger.models.get(command.task_id)))


def check_answers(
    ledger: Ledger, commands: Sequence[RecordAnswer], results: Sequence[MailResult]
) -> None:
    """Check and apply the results of answers."""
    for command, result in zip(commands, results, strict=True):
        _check(result, _answer(ledger, command, ledger.models.get(command.key.task_id)))


def check_values(ledger: Ledger, command: SetValue, result: object) -> None:
    """Check and apply one `set_value` result."""
    model = ledger.models.get(command.run.task_id)
    if model is None or not model.is_owned_by(command.run):
        assert result == Fenced(), result
        return
    model.mail.values[command.key] = command.value
    expected = CancelFound(command.run) if model.cancel_requested else SaveCommitted()
    assert result == expected, f"{result}, not {expected}"


def expected_questions(model: TaskModel) -> list[AskedQuestion]:
    """The questions of a task as the store must find them."""
    asked = []
    for id_, known in sorted(model.mail.questions.items()):
        key = QuestionKey(model.agent, model.task_id, id_)
        outcome = _outcome_of(model, key)
        peer = AgentName(f"~?{key.name}")
        asked.append(AskedQuestion(key, peer, known.request, model.requester.app_id, outcome))
    return asked


def normalize_question(asked: AskedQuestion | None) -> AskedQuestion | None:
    """The question without the wording of its failure."""
    if asked is None or asked.outcome is None:
        return asked
    return AskedQuestion(
        asked.key, asked.peer, asked.details, asked.requester, without_message(asked.outcome)
    )


def _check(result: MailResult, expected: MailResult) -> None:
    shown = _REFUSED if isinstance(result, MailRefused) else result
    assert shown == expected, f"{result}, not {expected}"


def _signal(ledger: Ledger, command: SendSignal, model: TaskModel | None) -> MailResult:
    if model is None or model.is_early_cancel:
        return MailUnknown()
    if not command.is_trusted and model.requester.app_id not in {None, command.sender}:
        return MailForbidden(model.requester.app_id)
    known = model.mail.find(command.id)
    if known is not None:
        is_same = (known.sent.name, known.sent.value) == (command.name, command.value)
        is_lost = model.state.is_final and not known.received
        return MailAccepted() if is_same and not is_lost else _REFUSED
    if model.state.is_final:
        return _REFUSED
    model.mail.signals.append(SignalModel(command, ledger.now))
    waits = [] if model.state is not TaskState.WAITING else model.pending_calls
    for call in waits:
        if call.planned.peer == command.peer:
            outcome = model.mail.receive(call.planned.peer)
            assert outcome is not None
            return _record(ledger, model, call, outcome)
    return MailAccepted()


def _answer(ledger: Ledger, command: RecordAnswer, model: TaskModel | None) -> MailResult:
    id_ = command.key.sub_task_id
    known = None if model is None else model.mail.questions.get(id_)
    if model is None or known is None:
        return MailUnknown()
    outcome = _outcome_of(model, command.key)
    if outcome is not None:
        return MailAccepted() if outcome == command.outcome else _REFUSED
    known.answer = command.outcome
    for call in model.pending_calls if model.state is TaskState.WAITING else []:
        if call.id == id_:
            return _record(ledger, model, call, command.outcome)
    known.is_kept = True
    return MailAccepted()


def _outcome_of(model: TaskModel, key: QuestionKey) -> Outcome | None:
    """The answer to a question, the answer that a claim has recorded, or why it is closed."""
    known = model.mail.questions[key.sub_task_id]
    calls = [call for call in model.calls_with_row if call.id == key.sub_task_id]
    claimed = [call.outcome for call in calls if was_answered(call.outcome)]
    outcome = next(iter(claimed), None) if known.answer is None else known.answer
    if outcome is None and model.state.is_final:
        return Failed(FailureKind.CANCELLED)
    return outcome


def _record(ledger: Ledger, model: TaskModel, call: CallModel, outcome: Outcome) -> MailResult:
    """Record the outcome of a wait. The task is left to the sweeper."""
    call.record(outcome, None)
    if not model.is_join_met:
        return MailAccepted()
    cancels = model.close_pending(ledger.now)
    model.make_ready(ledger.now, None)
    return MailAccepted(is_ready=True, cancels=cancels)
