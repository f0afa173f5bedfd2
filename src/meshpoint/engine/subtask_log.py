"""Write the subtasks of one segment to its task's backend, under the fence of its run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from meshpoint.engine.runtime import Site
from meshpoint.engine.segment import Segment, Stop
from meshpoint.model.checkpoint import BeginResult, Begun, CancelFound, Fenced, Save, SaveResult, Track
from meshpoint.model.events import Step
from meshpoint.model.subtasks import AgentCheckpoint, Operation, Saved


class SegmentLedger:
    """The `Ledger` of one segment. `begin` inserts the task as running if it has no row yet.

    A write stops the code at once if the task was cancelled or another replica owns it. So even if
    the cancel broadcast was lost, an operation ends at its next subtask.
    """

    def __init__(
        self, segment: Segment, site: Site, begin: Callable[[Segment, Operation], Awaitable[BeginResult]]
    ) -> None:
        self._segment, self._site, self._begin = segment, site, begin

    async def open(self, operation: Operation) -> None:
        """Turn the task into an operation, inserting its row if necessary."""
        segment, home = self._segment, self._segment.home
        if home is None:
            result = await self._begin(segment, operation)
        else:
            store = home.store
            with self._site.steps.step(Step.SAVE, [segment.run.task_id]):
                result = await self._site.patience.until_answered(lambda: store.track(Track(segment.run, operation)))
        self._stop_unless_ours(result)

    async def save(self, checkpoint: AgentCheckpoint, subtask: str, *, progressed: bool) -> None:
        """Store a checkpoint with a reference to the working memory."""
        segment, home = self._segment, self._segment.home
        assert home is not None
        checkpointer = self._site.checkpointer(home)
        assert segment.memory is not None
        # A subtask that saves its progress does not restart from the beginning.
        over = {*checkpoint.progress.completed, subtask}
        mark = await segment.memory.prepare_ref(checkpoint.seq, durable=False, finished_subtasks=over)
        with self._site.steps.step(Step.SAVE, [segment.run.task_id], subtask=subtask, seq=checkpoint.seq):
            wish = Save(segment.run, mark.apply_to(checkpoint), progressed=progressed)
            result = await self._site.patience.until_answered(lambda: checkpointer.save(wish))
        self._stop_unless_ours(result)
        await segment.memory.on_stored(mark)

    def _stop_unless_ours(self, result: BeginResult | SaveResult) -> None:
        segment = self._segment
        match result:
            case Begun() | Saved():
                pass
            case CancelFound():
                segment.stop_here(Stop.CANCELLED)
            case Fenced():
                self._site.steps.note(Step.FENCED, segment.run.task_id, what="save", fence=segment.run.fence)
                segment.stop_here(Stop.LOST)
