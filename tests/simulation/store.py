"""The in-process store as a database: all writes are observed, calls cross the network."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from meshpoint.adapters.inprocess.rows import Tables, TaskRow
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.errors import CommitInDoubt, StoreUnavailable
from meshpoint.model.ids import RunId, TaskId
from meshpoint.model.mailbox import (
    MailResult,
    RecordAnswer,
    SendSignal,
    SetValue,
    TooManyValues,
)
from meshpoint.model.options import StoreTimings
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import Replica, Resumable, Run
from meshpoint.model.transitions import (
    Append,
    End,
    EndCommitted,
    EndResult,
    Pause,
    PauseCommitted,
    PauseResult,
    Release,
    Save,
    SaveResult,
)
from meshpoint.ports.clock import Clock

from .ledger import Ledger
from .network_faults import CallResult, Network
from .remote_call import remote_call, run_at_once

STORE = "store"


class WatchedTables(Tables):
    """Tables that report every write to the ledger."""

    def __init__(
        self,
        clock: Clock,
        timings: StoreTimings,
        name: str,
        ledger: Ledger,
    ) -> None:
        super().__init__(clock, timings)
        self._name, self._ledger = name, ledger

    def put(self, row: TaskRow) -> None:
        """Write `row`."""
        super().put(row)
        self._ledger.check_written(self._name, row)

    def assign_owner(self, row: TaskRow, replica: Replica, run_id: RunId) -> Resumable:
        """Let `replica` own the task; a suspended one only to end it at its deadline."""
        is_held = row.is_suspended and not row.requester.is_overdue(self.clock.now())
        self._ledger.check(not is_held, f"a suspended task was acquired: {row.task_id}")
        return super().assign_owner(row, replica, run_id)


class WatchedStore(InProcessStore):
    """An in-process store on observed tables. As a database it outlives every process."""

    def __init__(
        self,
        clock: Clock,
        timings: StoreTimings,
        name: str,
        ledger: Ledger,
        *,
        durable: bool,
    ) -> None:
        self.tables = self._tables = WatchedTables(clock, timings, name, ledger)
        self._durable, self._name, self._ledger = durable, name, ledger
        self._check = ledger.check

    @property
    def durable(self) -> bool:
        """Whether it plays the database."""
        return self._durable

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        """Checkpoint; a zombie must not succeed."""
        owned = [self._is_owner(each.run) for each in pauses]
        results = await super().pause(pauses)
        for each, is_owner, result in zip(pauses, owned, results, strict=True):
            self._check(
                is_owner or not isinstance(result, PauseCommitted), f"a zombie paused: {each.run}"
            )
        return results

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """Commit outcomes; a zombie must not succeed."""
        owned = [self._is_owner(each.run) for each in ends]
        results = await super().end(ends)
        for each, is_owner, result in zip(ends, owned, results, strict=True):
            self._check(
                is_owner or not isinstance(result, EndCommitted), f"a zombie ended: {each.run}"
            )
        return results

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        """Release tasks; a zombie must not succeed."""
        owned = [self._is_owner(each.run) for each in releases]
        results = await super().release(releases)
        for each, is_owner, released in zip(releases, owned, results, strict=True):
            self._check(is_owner or not released, f"a zombie released: {each.run}")
        return results

    async def save(self, command: Save) -> SaveResult:
        """Record subtasks; a zombie must not succeed."""
        is_owner = self._is_owner(command.run)
        result = await super().save(command)
        self._check(
            is_owner or not isinstance(result, SaveCommitted), f"a zombie saved: {command.run}"
        )
        return result

    async def append(self, appends: Sequence[Append]) -> list[SaveResult]:
        """Record steps; a zombie must not succeed."""
        owned = [self._is_owner(each.run) for each in appends]
        results = await super().append(appends)
        for each, is_owner, result in zip(appends, owned, results, strict=True):
            self._check(
                is_owner or not isinstance(result, SaveCommitted),
                f"a zombie recorded a step: {each.run}",
            )
        return results

    async def signal(self, signals: Sequence[SendSignal]) -> list[MailResult]:
        """Keep signals."""
        results = await super().signal(signals)
        for command, result in zip(signals, results, strict=True):
            self._ledger.signals.check_kept(self._name, command, result)
            self._check_mailbox(command.task_id)
        return results

    async def answer(self, answers: Sequence[RecordAnswer]) -> list[MailResult]:
        """Record answers."""
        results = await super().answer(answers)
        for command, result in zip(answers, results, strict=True):
            self._ledger.signals.check_answered(self._name, command, result)
        return results

    async def set_value(self, command: SetValue) -> SaveResult | TooManyValues:
        """Set a value; a zombie must not succeed."""
        is_owner = self._is_owner(command.run)
        result = await super().set_value(command)
        self._check(
            is_owner or not isinstance(result, SaveCommitted), f"a zombie set {command.key}"
        )
        self._check_mailbox(command.run.task_id)
        return result

    def _check_mailbox(self, task_id: TaskId) -> None:
        if (row := self.tables.tasks.get(task_id)) is not None:
            self._ledger.signals.check_row(self._name, row)

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        """Extend leases; a zombie's lease is lost."""
        owned = [self._is_owner(each) for each in runs]
        lost = await super().renew(runs, replica)
        for run, is_owner in zip(runs, owned, strict=True):
            self._check(is_owner or run in lost, f"a zombie renewed: {run}")
        return lost

    def _is_owner(self, run: Run) -> bool:
        """Whether this run may write the task, or wrote its current content."""
        row = self.tables.tasks.get(run.task_id)
        if row is None or run.fence == 0:
            return (row is None and run.fence == 0) or (row is not None and row.run_id == run.id)
        return row.fence == run.fence


class RemoteStore:
    """A process's connection to the database. Every method may fail as a database's would."""

    def __init__(self, database: WatchedStore, network: Network) -> None:
        self._database, self._network = database, network
        self.durable = True
        self.present = None  # the processes' own clocks judge deadlines

    async def close(self) -> None:
        """Close the connection."""

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._database, name)

        async def remote(*args: Any, **options: Any) -> Any:
            fate = self._network.draw_fate(STORE, name)
            return await remote_call(
                lambda: run_at_once(method(*args, **options)), fate, partial(_failure, name)
            )

        return remote


def _failure(method: str, result: CallResult) -> Exception:
    kind = StoreUnavailable if result is CallResult.REFUSED else CommitInDoubt
    return kind(f"{method}: {result}")
