"""Base of the machine: a store, its ledger, and the candidates that a rule chooses from."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import Any, TypeVar

from hypothesis.stateful import RuleBasedStateMachine, invariant

from machines.drain_store import drain_store
from machines.inputs import InputFactory
from machines.ledger import Ledger
from machines.task_model import CallModel, TaskModel
from machines.visible_state import check_known, check_mail, check_row
from meshpoint.model.ids import TaskId
from meshpoint.model.mailbox import RecordAnswer, SendSignal
from meshpoint.model.tasks import OutboxItem, Replica, Run, TaskState
from meshpoint.model.transitions import Cancel, Claim, End, Pause
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock

T = TypeVar("T")
BATCH_LIMIT = 100
_SERIAL_NUMBERS = count(1)


def pick(pool: Sequence[T], number: int) -> list[T]:
    """The chosen element, or nothing from an empty pool. Small numbers choose the most recent."""
    return [pool[-1 - number % len(pool)]] if pool else []


class StoreMachineBase(RuleBasedStateMachine):
    """A store and its ledger. After every step they must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.clock = FakeClock()
        self.serial = next(_SERIAL_NUMBERS)
        self.ledger, self.inputs = Ledger(self.clock), InputFactory(f"{self.serial:04}")
        self.crashed: set[str] = set()
        self.written: dict[str, Pause | End] = {}  # what a run first decided to write
        self.batches: dict[Replica, list[tuple[list[Claim], int]]] = {}
        self.cancels: list[Cancel] = []
        self.sends: list[OutboxItem] = []
        self.signals: list[SendSignal] = []
        self.answers: list[RecordAnswer] = []
        self.touched_ids: set[TaskId] = set()
        self.is_sound = True
        self.store = self.open_store()
        self.run_step(self.store.open())

    def open_store(self) -> CheckpointStore:
        """Make the store to drive."""
        raise NotImplementedError

    def run_step(self, step: Coroutine[Any, Any, T]) -> T:
        """Run one step. After a failed step the store is not inspected any more."""
        self.is_sound = False
        result = self.runner.run(step)
        self.is_sound = True
        return result

    def check_answer(self, task_ids: Sequence[TaskId], check: Any, *answer: Any) -> None:
        """Have the ledger check an answer, and mark these tasks for inspection."""
        self.is_sound = False
        self.touched_ids |= set(task_ids)
        check(*answer)
        self.is_sound = True

    @property
    def models(self) -> list[TaskModel]:
        """Tasks that have a row."""
        return list(self.ledger.models.values())

    def owners(self) -> list[Run]:
        """Owning runs in live replicas; runs to be cancelled come last."""
        running_models = sorted(
            self.ledger.in_state(TaskState.RUNNING), key=lambda model: model.cancel_requested
        )
        return [
            story.owner
            for story in running_models
            if story.owner and story.owner.id not in self.crashed
        ]

    def runs(self, replica: Replica | None = None) -> list[Run]:
        """All runs that ever owned an existing task; zombies come last."""
        runs = [
            run for model in self.models for run, owner in model.runs if replica in {None, owner}
        ]
        return sorted(runs, key=self._is_zombie)

    def _is_zombie(self, run: Run) -> bool:
        model = self.ledger.models[run.task_id]
        return model.state is TaskState.RUNNING and not model.is_owned_by(run)

    def all_calls(self) -> list[tuple[TaskId, CallModel]]:
        """All calls of all tasks, past ones included."""
        models = [*self.ledger.purged.values(), *self.models]
        return [(model.task_id, call) for model in models for call in model.calls.values()]

    def pending(self) -> list[tuple[TaskId, CallModel]]:
        """Calls that wait for a response."""
        return [(model.task_id, call) for model in self.models for call in model.pending_calls]

    @invariant()
    def visible_state_matches_ledger(self) -> None:
        """The visible state of the touched tasks matches the ledger."""
        models = [model for model in self.models if model.task_id in self.touched_ids]
        self.touched_ids.clear()
        self.run_step(self._check_visible_state(models))

    async def _check_visible_state(self, models: Sequence[TaskModel]) -> None:
        existing_tasks = await self.store.lookup([model.task_id for model in models])
        for story in models:
            check_known(story, existing_tasks.get(story.task_id), self.clock.now())
            check_row(story, await self.store.task(story.task_id))
            await check_mail(story, self.store)

    async def _check_nothing_stays_due(self) -> None:
        """After a sweep no waiting task stays due, since it would take space in the next batch."""
        for summary in await self.store.tasks(states=[TaskState.WAITING], limit=BATCH_LIMIT):
            assert summary.wake_at > self.clock.now(), f"{summary} stays due"

    def teardown(self) -> None:
        """From any state, all tasks can be brought to their end, and nothing is left."""
        try:
            if self.is_sound:
                self.run_step(self._check_visible_state(self.models))
                self.run_step(drain_store(self.store, self.ledger, self.inputs, self.clock))
        finally:
            self.runner.run(self.store.close())
            self.runner.close()
