"""What must hold, looked at with every write of a row and every message that the broker takes."""

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
    """Something that must never happen, or must have happened, and is not so."""


class Ledger:
    """Counts. `broken` holds what was violated, the first first."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.replies: dict[str, list[Outcome]] = defaultdict(list)
        self.calls: dict[str, str] = {}
        """The peer of each call that some store has committed, by sub-task."""
        self._dropped: set[str] = set()
        self._callers: dict[str, set[str]] = defaultdict(set)
        self._subs: dict[tuple[str, str, int, str], str] = {}
        self._outcomes: dict[tuple[str, str], bytes] = {}
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}
        self._ends: dict[tuple[str, str], bytes] = {}
        self._early: set[tuple[str, str]] = set()
        """Tasks that had no row when they were cancelled."""
        self._results: dict[str, set[bytes]] = defaultdict(set)
        self._recorded: dict[tuple[str, str, str], str] = {}
        self._deliverables: dict[tuple[str, str], set[str]] = defaultdict(set)

    def must(self, holds: bool, otherwise: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.broken.append(otherwise)

    def dropped(self, task_ids: Sequence[str]) -> None:
        """A replica had no room for the replies of these tasks and said so."""
        self._dropped.update(task_ids)

    def excused(self) -> set[str]:
        """Tasks that may stay open: a dropped reply was theirs or that of a call below them."""
        found, new = set[str](), set(self._dropped)
        while new:
            found |= new
            new = {caller for task_id in new for caller in self._callers[task_id]} - found
        return found

    # ── rows ───────────────────────────────────────────────────────────────────────────────────────

    def written(self, home: str, row: TaskRow) -> None:
        """A row was written in `home`: the database, or the memory of a replica."""
        key = home, row.task_id
        before, now = self._rows.get(key, (0, 0)), (row.fence, row.generation)
        self._rows[key] = now
        self.must(
            before[0] <= now[0] and before[1] <= now[1], f"{row.task_id}: fence or generation fell {before} → {now}"
        )
        if row.is_early_cancel and key not in self._ends:
            self._early.add(key)  # not the task's end: the reply of a run without a row may replace it
        elif row.state.ended:
            first = self._ends.setdefault(key, row.reply)
            self.must(first == row.reply, f"{row.task_id}: it ended twice")
            self._results[row.task_id].add(row.reply)
        else:
            self.must(key not in self._ends, f"{row.task_id}: it ended, and is {row.state} again")
            self.must(key not in self._early, f"{row.task_id}: it was cancelled early, and is {row.state}")
        for call in row.calls.values():
            self._called(home, row, call)
        if row.operation is not None and row.operation.checkpoints:
            self._saved(home, row.operation.checkpoints[-1])

    def _saved(self, home: str, checkpoint: AgentCheckpoint) -> None:
        """A deliverable that is recorded never becomes another one: its code does not run again after its save."""
        for record in checkpoint.subtasks:
            if record.completed and record.result is not None:
                place = home, checkpoint.operation_id, record.name
                first = self._recorded.setdefault(place, record.result)
                self.must(first == record.result, f"subtask {place} ran after it was saved")
                self._deliverables[checkpoint.operation_id, record.name].add(json.loads(record.result))

    def returned(self, task_id: str, subtask: str, deliverable: str) -> None:
        """A subtask returned to the code of its agent."""
        recorded = deliverable in self._deliverables[task_id, subtask]
        self.must(recorded, f"subtask {subtask} of {task_id} returned what was not saved")

    def _called(self, home: str, row: TaskRow, call: CallRow) -> None:
        self.calls[call.sub_task_id] = call.peer
        self._callers[call.sub_task_id].add(row.task_id)
        place = home, row.task_id, call.generation, call.call_id
        sub = self._subs.setdefault(place, call.sub_task_id)
        self.must(sub == call.sub_task_id, f"call {place} has two sub-tasks: {sub}, {call.sub_task_id}")
        if call.outcome is not None:
            first = self._outcomes.setdefault((home, call.sub_task_id), call.outcome)
            self.must(first == call.outcome, f"call {place} has two outcomes: {first!r}, {call.outcome!r}")

    # ── messages ───────────────────────────────────────────────────────────────────────────────────

    def heard(self, address: Address, message: Message) -> None:
        """The broker took a message."""
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
        raise Violation(f"a reply that nobody can read: {error}") from error
