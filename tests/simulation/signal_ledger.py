"""Checks of signals, values and answers: none is lost, repeated, out of order or invented."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from meshpoint.adapters.inprocess.rows import TaskRow
from meshpoint.model.mailbox import MailAccepted, MailResult, RecordAnswer, SendSignal
from meshpoint.model.questions import QuestionKey
from meshpoint.model.tasks import CallState, TaskState
from meshpoint.model.waits import SIGNAL_PREFIX, is_signal

from .listener import RECEIVED
from .values import DATABASE, CheckInvariant


class SignalLedger:
    """Follows signals from their senders to the code that receives them.

    Attributes:
        is_strict: whether every task is kept in the database. A task in memory begins again when
            its process dies, without its signals.
        answered: questions with a recorded or kept answer.
    """

    def __init__(self, check: CheckInvariant) -> None:
        self._check = check
        self.is_strict = False
        self.answered: list[QuestionKey] = []
        self._sent: set[tuple[str, str, str]] = set()
        self._accepted: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._acknowledged: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
        self._received: dict[str, Sequence[tuple[str, str]]] = {}
        self._values: dict[str, int] = {}
        self._answers: set[tuple[str, str]] = set()

    def record_sent(self, task_id: str, name: str, signal_id: str) -> None:
        """Record a signal before it is sent."""
        self._sent.add((task_id, name, signal_id))

    def record_acknowledged(self, sender: str, task_id: str, name: str, signal_id: str) -> None:
        """Record an acknowledgement. A sender sends one signal at a time."""
        self._acknowledged[sender, task_id].append((name, signal_id))
        if self.is_strict:
            self._check(
                (name, signal_id) in self._accepted[task_id],
                f"signal {signal_id} to {task_id} is acknowledged, but not in the database",
            )

    def check_kept(self, store_name: str, command: SendSignal, result: MailResult) -> None:
        """Check the result of a signal in a store."""
        if store_name != DATABASE or not isinstance(result, MailAccepted):
            return
        signal = command.name, command.id
        if signal not in self._accepted[command.task_id]:
            self._accepted[command.task_id].append(signal)

    def check_answered(self, store_name: str, command: RecordAnswer, result: MailResult) -> None:
        """Record the question of an answer that a store has accepted."""
        if isinstance(result, MailAccepted) and command.key not in self.answered:
            self.answered.append(command.key)
        if isinstance(result, MailAccepted) and store_name == DATABASE:
            self._answers.add((command.key.task_id, command.key.sub_task_id))

    def check_row(self, store_name: str, row: TaskRow) -> None:
        """Check that no signal waits in a mailbox while its task waits for it."""
        kept = [each for each in row.signals if each.value is not None]
        if row.state is TaskState.WAITING:
            awaited = {
                call.peer.removeprefix(SIGNAL_PREFIX)
                for call in row.current_calls
                if is_signal(call.peer) and call.state is CallState.PENDING
            }
            left = [each.id for each in kept if each.name in awaited]
            self._check(not left, f"{row.task_id} waits, and has not received {left}")
        if store_name == DATABASE:
            self._check_answers(row)
            number = int(row.values.get(RECEIVED, b"0"))
            before = self._values.get(row.task_id, 0)
            self._check(number >= before, f"{row.task_id}: a value fell from {before} to {number}")
            self._values[row.task_id] = number

    def _check_answers(self, row: TaskRow) -> None:
        """Check that no question loses its answer. None is asked again with another prompt."""
        for id_, asked in row.questions.items():
            is_lost = asked.answer is None and (row.task_id, id_) in self._answers
            self._check(not is_lost, f"{row.task_id} has lost the answer to {id_}")

    def value(self, task_id: str) -> int:
        """How many signals the task has received, as it has stored it."""
        return self._values.get(task_id, 0)

    def check_received(self, task_id: str, received: Sequence[tuple[str, str]]) -> None:
        """Check the signals that a task has received so far, in order."""
        invented = [each for each in received if (task_id, *each) not in self._sent]
        self._check(not invented, f"{task_id} received {invented}, which nobody sent")
        self._check(
            len(received) == len(set(received)), f"{task_id} received one twice: {received}"
        )
        if not self.is_strict:
            return
        for name in {name for name, _ in received}:
            own = [each for each in received if each[0] == name]
            accepted = [each for each in self._accepted[task_id] if each[0] == name]
            self._check(
                own == accepted[: len(own)],
                f"{task_id} received {own}, but the database accepted {accepted}",
            )
        if len(received) >= len(self._received.get(task_id, ())):
            self._received[task_id] = list(received)

    def check_end(self, rows: Sequence[TaskRow]) -> None:
        """Check that the tasks in the database have received the acknowledged signals."""
        if not self.is_strict:
            return
        for (sender, task_id), acknowledged in self._acknowledged.items():
            in_order = [each for each in self._accepted[task_id] if each in acknowledged]
            self._check(
                in_order == acknowledged,
                f"{sender} had {acknowledged} acknowledged by {task_id} after {in_order}",
            )
        for row in rows:
            if row.state is TaskState.COMPLETED and row.agent == "listener":
                self._check_completed(row)

    def _check_completed(self, row: TaskRow) -> None:
        """Everything that left the mailbox has reached the code, and the rest is still in it."""
        received = self._received.get(row.task_id, ())
        gone = {(each.name, each.id) for each in row.signals if each.value is None}
        kept = {(each.name, each.id) for each in row.signals if each.value is not None}
        self._check(
            gone == set(received),
            f"{row.task_id} received {received}, but {gone} left its mailbox",
        )
        accepted = set(self._accepted[row.task_id])
        self._check(
            accepted == gone | kept, f"{row.task_id} lost {accepted - gone - kept} or has others"
        )
