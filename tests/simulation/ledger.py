"""The invariants, checked at each row write and at each message that the broker accepts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from meshpoint.adapters.inprocess.rows import CallRow, TaskRow
from meshpoint.engine.task_log import step_entries
from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.messages import Address, Message, MessageType
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome, decode_outcome
from meshpoint.model.questions import QuestionKey
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.model.waits import is_question, is_wait
from meshpoint.subtasks.step_records import StepEnd, StepRecord

from .attempt_ledger import AttemptLedger
from .signal_ledger import SignalLedger

_WITHOUT_ROW = ("leaf", "flaky")
"""Agents that end in their first segment."""


class Violation(AssertionError):
    """An invariant does not hold."""


class Ledger:
    """Records writes and messages. `violations` lists violations, oldest first."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.violations: list[str] = []
        self.attempts = AttemptLedger(self.check, now)
        self.signals = SignalLedger(self.check)
        self.replies: dict[str, list[Outcome]] = defaultdict(list)
        self.calls: dict[str, str] = {}
        """The peer of each call that a store has committed, by sub-task."""
        self._dropped: set[str] = set()
        self._callers: dict[str, set[str]] = defaultdict(set)
        self._sub_task_ids: dict[tuple[str, str, int, str], str] = {}
        self._outcomes: dict[tuple[str, str], bytes] = {}
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}
        self._ends: dict[tuple[str, str], bytes] = {}
        self._cancelled_early: set[tuple[str, str]] = set()
        """Tasks that were cancelled before they had a row."""
        self._results: dict[str, set[bytes]] = defaultdict(set)
        self._recorded: dict[tuple[str, str, str], str] = {}
        self._deliverables: dict[tuple[str, str], set[str]] = defaultdict(set)

    def check(self, holds: bool, violation: str) -> None:
        """Record `violation` as a violation unless `holds`."""
        if not holds:
            self.violations.append(violation)

    def record_dropped(self, task_ids: Sequence[str]) -> None:
        """Record that a replica reported no room for the replies of these tasks."""
        self._dropped.update(task_ids)

    def excused_task_ids(self) -> set[str]:
        """Tasks that may stay open because their reply, or a reply below them, was dropped."""
        found, new = set[str](), set(self._dropped)
        while new:
            found |= new
            new = {caller for task_id in new for caller in self._callers[task_id]} - found
        return found

    def check_written(self, store_name: str, row: TaskRow) -> None:
        """Check a row written in `store_name`: the database, or a replica's in-process store."""
        key = store_name, row.task_id
        previous, current = self._rows.get(key, (0, 0)), (row.fence, row.generation)
        self._rows[key] = current
        self.check(
            previous[0] <= current[0] and previous[1] <= current[1],
            f"{row.task_id}: fence or generation decreased: {previous} → {current}",
        )
        if row.is_early_cancel and key not in self._ends:
            self._cancelled_early.add(
                key
            )  # not an end: the reply of a run without a row may replace it
        elif row.state.is_final:
            first = self._ends.setdefault(key, row.reply)
            self.check(first == row.reply, f"{row.task_id}: ended twice")
            self._results[row.task_id].add(row.reply)
        else:
            self.check(key not in self._ends, f"{row.task_id}: ended, but is {row.state} again")
            self.check(
                key not in self._cancelled_early,
                f"{row.task_id}: cancelled early, but is {row.state}",
            )
        for call in row.calls.values():
            self._check_call(store_name, row, call)
        self.attempts.check_row(store_name, row)
        self.signals.check_row(store_name, row)
        for _, entry in row.log:
            self._check_entry(store_name, row, entry)
        if row.operation is not None and row.operation.checkpoints:
            self._check_saved(store_name, row.operation.checkpoints[-1])

    def _check_saved(self, store_name: str, checkpoint: AgentCheckpoint) -> None:
        """A recorded deliverable never changes: its code does not run again after the save."""
        for record in checkpoint.subtasks:
            if record.completed and record.result is not None:
                key = store_name, checkpoint.operation_id, record.name
                first = self._recorded.setdefault(key, record.result)
                self.check(first == record.result, f"subtask {key} ran after it was saved")
                self._deliverables[checkpoint.operation_id, record.name].add(
                    json.loads(record.result)
                )

    def _check_entry(self, store_name: str, row: TaskRow, entry: bytes) -> None:
        """A recorded result never changes: the step does not run again after the append.

        A cancellation may follow, if the code around the step did not see the result.
        """
        for each in step_entries(entry):
            record = StepRecord.from_bytes(each.record)
            if record.end is StepEnd.CANCELLED:
                continue
            key = store_name, row.task_id, f"{each.attempt} {record.place}"
            first = self._recorded.setdefault(key, record.text)
            self.check(first == record.text, f"step {key} ran after it was recorded")
            if record.end is StepEnd.OK:
                self._deliverables[row.task_id, record.place.name].add(json.loads(record.text))

    def check_returned(self, task_id: str, subtask: str, deliverable: str) -> None:
        """A subtask returned `deliverable` to the agent's code."""
        recorded = deliverable in self._deliverables[task_id, subtask]
        self.check(recorded, f"subtask {subtask} of {task_id} returned an unsaved value")

    def _check_call(self, store_name: str, row: TaskRow, call: CallRow) -> None:
        if not is_wait(call.peer):
            self.calls[call.sub_task_id] = call.peer
            self._callers[call.sub_task_id].add(row.task_id)
        if call.attempt is not None:
            return  # `attempts` checks it
        key = store_name, row.task_id, call.generation, call.call_id
        sub = self._sub_task_ids.setdefault(key, call.sub_task_id)
        self.check(
            sub == call.sub_task_id, f"call {key} has two sub-tasks: {sub}, {call.sub_task_id}"
        )
        if call.outcome is not None:
            # A question that is asked again has the same id.
            place = f"{row.task_id} {call.generation} {call.sub_task_id}"
            is_new = (store_name, place) not in self._outcomes
            first = self._outcomes.setdefault((store_name, place), call.outcome)
            self.check(
                first == call.outcome, f"call {key} has two outcomes: {first!r}, {call.outcome!r}"
            )
            if is_new and is_question(call.peer):
                self._check_answer(row, call, decode_outcome(call.outcome))

    def _check_answer(self, row: TaskRow, call: CallRow, outcome: Outcome) -> None:
        """An answered question gets no timeout: its answer is the outcome of the next wait."""
        key = QuestionKey(row.agent, row.task_id, call.sub_task_id)
        is_late = isinstance(outcome, Failed) and outcome.kind is FailureKind.TIMEOUT
        is_answered = self.signals.is_strict and key in self.signals.answered
        self.check(not (is_late and is_answered), f"{key} was answered, and has {outcome}")

    def check_accepted(self, address: Address, message: Message) -> None:
        """Check a message that the broker accepted."""
        task_id = message.correlation_id
        match message.type:
            case MessageType.REQUEST if message.app_id != "client":
                self.check(
                    task_id in self.calls, f"request {task_id} was sent before it was committed"
                )
                self.attempts.check_sent(task_id)
            case MessageType.RESPONSE:
                outcome = _outcome_of(message)
                self.replies[task_id].append(outcome)
                if isinstance(outcome, Ok) and message.app_id not in _WITHOUT_ROW:
                    committed = message.body in self._results[task_id]
                    self.check(
                        committed, f"the result of {task_id} was sent before it was committed"
                    )
            case _:
                pass


def _outcome_of(message: Message) -> Outcome:
    try:
        return parse_body(ResponseBody, message.body).outcome()
    except PoisonMessage as error:
        raise Violation(f"unreadable reply: {error}") from error
