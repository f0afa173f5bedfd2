"""What one run of a task knows about its subtasks, and the changes they make to its context."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime

from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.snapshot import apply_diff, diff, rewind, snapshot
from meshpoint.model.subtasks import AgentCheckpoint, SubtaskRecord
from meshpoint.model.tasks import CheckpointDict
from meshpoint.subtasks.validity import invalidate


class RunRecords:
    """The records of a task's subtasks, restored from its last checkpoint.

    Attributes:
        by_name: The records, in the order in which the subtasks first began.
        saved_progress: Intermediate states as JSON text, by subtask.
        requested: Names of the subtasks that this run has requested.
        used: Names of the subtasks whose record this run has reused or created.
    """

    def __init__(self, restored: AgentCheckpoint | None) -> None:
        self.by_name: dict[str, SubtaskRecord] = {}
        self.saved_progress: dict[str, str] = {}
        if restored is not None:
            self.by_name.update((record.name, record) for record in restored.subtasks)
            self.saved_progress.update(restored.saved_progress)
        self._restored_progress = dict(self.saved_progress)
        # The last checkpoint that is known to be stored: its records and its `records_from`.
        self._stored: dict[str, SubtaskRecord] = {}
        self._stored_from: int | None = None
        if restored is not None:
            self.on_stored(restored)
        self.requested: set[str] = set()
        self.used: set[str] = set()

    def with_changes(self, checkpoint: AgentCheckpoint) -> AgentCheckpoint:
        """Return `checkpoint`, saying which of its records are not stored yet.

        Without records it stays as earlier releases read it.
        """
        if not checkpoint.subtasks:
            return checkpoint
        if self._stored_from is None:
            return checkpoint.model_copy(update={"records_from": checkpoint.seq})
        changed = frozenset(
            record.name
            for record in checkpoint.subtasks
            if self._stored.get(record.name) is not record
        )
        return checkpoint.model_copy(
            update={"records_from": self._stored_from, "changed": changed}
        )

    def on_stored(self, checkpoint: AgentCheckpoint) -> None:
        """Note that `checkpoint` is stored."""
        self._stored = {record.name: record for record in checkpoint.subtasks}
        self._stored_from = checkpoint.records_from

    def begin(self, record: SubtaskRecord) -> None:
        """Add the record of a subtask that starts, in place of an earlier one."""
        self.by_name[record.name] = record
        self.used.add(record.name)

    def keep(self, record: SubtaskRecord, retry: int) -> None:
        """Note that attempt `retry` reuses the record of an earlier attempt."""
        self.by_name[record.name] = record.model_copy(update={"reused_in": retry})

    def invalidate(self, reasons: Mapping[str, str], retry: int) -> None:
        """Drop the results and the saved progress of these subtasks, for these reasons."""
        for name, reason in reasons.items():
            self.saved_progress.pop(name, None)
            self.by_name[name] = invalidate(self.by_name[name], reason, retry)

    def save_progress(self, name: str, text: str) -> bool:
        """Keep an intermediate state. Returns `False` if an earlier run had saved the same."""
        self.saved_progress[name] = text
        return text != self._restored_progress.get(name)


def recorded_instant(changes: str | None) -> datetime | None:
    """What `ctx.now()` returned to the code around a recorded step or subtask, if it was used."""
    if changes is None or '"now"' not in changes:
        return None
    instant = json.loads(changes).get("now")
    return None if instant is None else datetime.fromisoformat(instant)


class ContextChanges:
    """Records what each subtask changes on the task's context, and applies it again.

    Of concurrent subtasks, each is credited with the changes since another one ended.
    """

    def __init__(self, ctx: TaskExecutionContext, runtime: ContextRuntime) -> None:
        self._ctx, self._runtime = ctx, runtime
        self._baseline: CheckpointDict = {}

    def start(self) -> None:
        """Note the state of the context. Called when a subtask begins while no other runs."""
        self._baseline = snapshot(self._ctx)

    def take(self) -> str | None:
        """Return the changes since the last call as JSON text; `None` if nothing changed."""
        now = snapshot(self._ctx)
        changed, self._baseline = diff(self._baseline, now), now
        if (instant := self._runtime.instant) is not None:
            changed["now"] = instant.isoformat()  # what `ctx.now()` returned
        return json.dumps(changed) if changed else None

    def restore(self, record: SubtaskRecord) -> None:
        """Set the context and the recorded calls to their state after the subtask."""
        if record.context is not None:
            apply_diff(self._ctx, json.loads(record.context))
        changed = snapshot(self._ctx)
        # The last skipped call may restore an older context.
        self._runtime.skip_subtask_calls(record.name)
        rewind(self._ctx, changed)
