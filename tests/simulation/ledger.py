"""The invariants, checked at each row write and at each message that the broker accepts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from meshpoint.adapters.inprocess.rows import CallRow, TaskRow
from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import ResponseBody, parse
from meshpoint.model.messages import Address, Message, MessageType
from meshpoint.model.outcomes import Ok, Outcome
from meshpoint.model.subtasks import AgentCheckpoint

DATABASE = "database"


class Violation(AssertionError):
    """An invariant does not hold."""


class Ledger:
    """Records writes and messages. `broken` lists violations, oldest first."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.replies: dict[str, list[Outcome]] = defaultdict(list)
        self.calls: dict[str, str] = {}
        """The peer of each call that a store has committed, by sub-task."""
        self._dropped: set[str] = set()
        self._callers: dict[str, set[str]] = defaultdict(set)
        self._subs: dict[tuple[str, str, int, str], str] = {}
        self._outcomes: dict[tuple[str, str], bytes] = {}
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}
        self._ends: dict[tuple[str, str], bytes] = {}
        self._early: set[tuple[str, str]] = set()
        """Tasks that were cancelled before they had a row."""
        self._results: dict[str, set[bytes]] = defaultdict(set)
        self._recorded: dict[tuple[str, str, str], str] = {}
        self._deliverables: dict[tuple[str, str], set[str]] = defaultdict(set)

    def must(self, holds: bool, otherwise: str) -> None:
        """Record `otherwise` as a violation unless `holds`."""
        if not holds:
            self.broken.append(otherwise)

    def dropped(self, task_ids: Sequence[str]) -> None:
        """Record that a replica reported no room for the replies of these tasks."""
        self._dropped.update(task_ids)

    def excused(self) -> set[str]:
        """Tasks that may stay open because their reply, or a reply below them, was dropped."""
        found, new = set[str](), set(self._dropped)
        while new:
            found |= new
            new = {caller for task_id in new for caller in self._callers[task_id]} - found
        return found

    def written(self, home: str, row: TaskRow) -> None:
        """Check a row written in `home`: the database, or a replica's in-process store."""
        key = home, row.task_id
        before, now = self._rows.get(key, (0, 0)), (row.fence, row.generation)
        self._rows[key] = now
        self.must(
            before[0] <= now[0] and before[1] <= now[1],
            f"{row.task_id}: fence or generation decreased: {before} → {now}",
        )
        if row.is_early_cancel and key not in self._ends:
            self._early.add(key)  # not an end: the reply of a run without a row may replace it
        elif row.state.ended:
            first = self._ends.setdefault(key, row.reply)
            self.must(first == row.reply, f"{row.task_id}: ended twice")
            self._results[row.task_id].add(row.reply)
        else:
            self.must(key not in self._ends, f"{row.task_id}: ended, but is {row.state} again")
            self.must(key not in self._early, f"{row.task_id}: cancelled early, but is {row.state}")
        for call in row.calls.values():
            self._called(home, row, call)
        if row.operation is not None and row.operation.checkpoints:
            self._saved(home, row.operation.checkpoints[-1])

    def _saved(self, home: str, checkpoint: AgentCheckpoint) -> None:
        """A recorded deliverable never changes: its code does not run again after the save."""
        for record in checkpoint.subtasks:
            if record.completed and record.result is not None:
                place = home, checkpoint.operation_id, record.name
                first = self._recorded.setdefault(place, record.result)
                self.must(first == record.result, f"subtask {place} ran after it was saved")
                self._deliverables[checkpoint.operation_id, record.name].add(json.loads(record.result))

    def returned(self, task_id: str, subtask: str, deliverable: str) -> None:
        """A subtask returned `deliverable` to the agent's code."""
        recorded = deliverable in self._deliverables[task_id, subtask]
        self.must(recorded, f"subtask {subtask} of {task_id} returned an unsaved value")

    def _called(self, home: str, row: TaskRow, call: CallRow) -> None:
        self.calls[call.sub_task_id] = call.peer
        self._callers[call.sub_task_id].add(row.task_id)
        place = home, row.task_id, call.generation, call.call_id
        sub = self._subs.setdefault(place, call.sub_task_id)
        self.must(sub == call.sub_task_id, f"call {place} has two sub-tasks: {sub}, {call.sub_task_id}")
        if call.outcome is not None:
            first = self._outcomes.setdefault((home, call.sub_task_id), call.outcome)
            self.must(first == call.outcome, f"call {place} has two outcomes: {first!r}, {call.outcome!r}")

    def heard(self, address: Address, message: Message) -> None:
        """Check a message that the broker accepted."""
        task_id = message.correlation_id
        match message.type:
            case MessageType.REQUEST if message.app_id != "boss":
                self.must(task_id in self.calls, f"request {task_id} was sent before it was committed")
            case MessageType.RESPONSE:
                outcome = _outcome_of(message)
                self.replies[task_id].append(outcome)
                if isinstance(outcome, Ok) and message.app_id != "leaf":
                    committed = message.body in self._results[task_id]
                    self.must(committed, f"the result of {task_id} was sent before it was committed")
            case _:
                pass


def _outcome_of(message: Message) -> Outcome:
    try:
        return parse(ResponseBody, message.body).outcome()
    except PoisonMessage as error:
        raise Violation(f"unreadable reply: {error}") from error
