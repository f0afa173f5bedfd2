"""Base of the machine: a store, its ledger, and the candidates that a rule chooses from."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import Any, TypeVar

from hypothesis.stateful import RuleBasedStateMachine, invariant

from machines.drain import drained
from machines.ledger import Ledger
from machines.seen import check_known, check_row
from machines.story import CallStory, Story
from machines.wishes import Wishes
from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.checkpoint import (
    Cancel,
    Claim,
    End,
    Pause,
    Replica,
    Run,
    Send,
    TaskState,
)
from meshpoint.model.ids import TaskId
from meshpoint.ports.task_store import CheckpointStore

T = TypeVar("T")
PLENTY = 100
_SERIAL = count(1)


def pick(pool: Sequence[T], number: int) -> list[T]:
    """The chosen element, or nothing from an empty pool. Small numbers choose the most recent."""
    return [pool[-1 - number % len(pool)]] if pool else []


class Stage(RuleBasedStateMachine):
    """A store and its ledger. After every step they must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.clock = FakeClock()
        self.serial = next(_SERIAL)
        self.ledger, self.wishes = Ledger(self.clock), Wishes(f"{self.serial:04}")
        self.crashed: set[str] = set()
        self.written: dict[str, Pause | End] = {}  # what a run first decided to write
        self.batches: dict[Replica, list[tuple[list[Claim], int]]] = {}
        self.cancels: list[Cancel] = []
        self.sends: list[Send] = []
        self.touched: set[TaskId] = set()
        self.sound = True
        self.store = self.open_store()
        self.do(self.store.open())

    def open_store(self) -> CheckpointStore:
        """Make the store to drive."""
        raise NotImplementedError

    def do(self, step: Coroutine[Any, Any, T]) -> T:
        """Run one step. After a failed step the store is not inspected any more."""
        self.sound = False
        result = self.runner.run(step)
        self.sound = True
        return result

    def tell(self, task_ids: Sequence[TaskId], judge: Any, *answer: Any) -> None:
        """Have the ledger check an answer, and mark these tasks for inspection."""
        self.sound = False
        self.touched |= set(task_ids)
        judge(*answer)
        self.sound = True

    @property
    def stories(self) -> list[Story]:
        """Tasks that have a row."""
        return list(self.ledger.stories.values())

    def owners(self) -> list[Run]:
        """Owning runs in live replicas; runs to be cancelled come last."""
        running = sorted(self.ledger.in_state(TaskState.RUNNING), key=lambda story: story.cancel_requested)
        return [story.owner for story in running if story.owner and story.owner.id not in self.crashed]

    def runs(self, replica: Replica | None = None) -> list[Run]:
        """All runs that ever owned an existing task; zombies come last."""
        runs = [run for story in self.stories for run, owner in story.runs if replica in {None, owner}]
        return sorted(runs, key=self._is_zombie)

    def _is_zombie(self, run: Run) -> bool:
        story = self.ledger.stories[run.task_id]
        return story.state is TaskState.RUNNING and not story.owned_by(run)

    def all_calls(self) -> list[tuple[TaskId, CallStory]]:
        """All calls of all tasks, past ones included."""
        stories = [*self.ledger.gone.values(), *self.stories]
        return [(story.task_id, call) for story in stories for call in story.calls.values()]

    def pending(self) -> list[tuple[TaskId, CallStory]]:
        """Calls that wait for a response."""
        return [(story.task_id, call) for story in self.stories for call in story.pending]

    @invariant()
    def seen_as_told(self) -> None:
        """The visible state of the touched tasks matches the ledger."""
        touched = [story for story in self.stories if story.task_id in self.touched]
        self.touched.clear()
        self.do(self._look_at(touched))

    async def _look_at(self, stories: Sequence[Story]) -> None:
        known = await self.store.lookup([story.task_id for story in stories])
        for story in stories:
            check_known(story, known.get(story.task_id), self.clock.now())
            check_row(story, await self.store.task(story.task_id))

    async def _not_looked_at_in_vain(self) -> None:
        """After a sweep no waiting task stays due, since it would take space in the next batch."""
        for summary in await self.store.tasks(states=[TaskState.WAITING], limit=PLENTY):
            assert summary.wake_at > self.clock.now(), f"{summary} stays due"

    def teardown(self) -> None:
        """From any state, all tasks can be brought to their end, and nothing is left."""
        try:
            if self.sound:
                self.do(self._look_at(self.stories))
                self.do(drained(self.store, self.ledger, self.wishes, self.clock))
        finally:
            self.runner.run(self.store.close())
            self.runner.close()
