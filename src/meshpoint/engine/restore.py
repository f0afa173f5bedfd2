"""Rebuild the state that agent code needs from a task's rows."""

from __future__ import annotations

from pydantic import JsonValue

from meshpoint.engine.runtime import Site
from meshpoint.engine.segment import Segment, Stop
from meshpoint.engine.subtask_log import SegmentLedger
from meshpoint.model.checkpoint import L1Snapshot, Resumable
from meshpoint.model.context import Report, TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.memory import Owner, agent_id
from meshpoint.model.outcomes import Outcomes
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.subtasks.migrating import migrate_checkpoint
from meshpoint.subtasks.runner import OperationAttempt, Subtasks
from meshpoint.working_memory.task_memory import MemoryRef, MemoryServices, TaskMemory


def restore(task: Resumable, report: Report) -> tuple[TaskExecutionContext, Outcomes]:
    """Restore the context of a resumed task and the outcomes it waited for, in call order.

    The peers' token usage is added to the task's, once per pause: the stored context does not
    include it yet, and the next checkpoint will.

    Raises:
        IncompatibleState: A later version of Meshpoint wrote the context.
    """
    context = TaskExecutionContext.from_checkpoint_dict(task.context, report=report)
    for _, peer, outcome in task.outcomes:
        context.token_usage.merge(outcome.usage, source=peer)
    return context, Outcomes({call_id: outcome for call_id, _, outcome in task.outcomes})


async def last_checkpoint(segment: Segment, task: Resumable | None, site: Site) -> AgentCheckpoint | None:
    """Return an operation's last checkpoint, or `None` without an operation or checkpoint."""
    if task is None or not task.checkpoint:
        return None
    assert segment.home is not None
    run, checkpointer, seq = segment.run, site.checkpointer(segment.home), task.checkpoint
    found = await site.patience.until_answered(lambda: checkpointer.restore(run.task_id, run.agent, seq=seq))
    if found is None:
        return None
    fallback = {"fallback": found.fallback.value} if found.fallback is not None else {}
    site.steps.note(Step.CHECKPOINT_RESTORED, run.task_id, source=found.source.value, seq=seq, **fallback)
    return found.checkpoint


def restored_subtasks(
    segment: Segment,
    task: Resumable | None,
    last: AgentCheckpoint | None,
    ledger: SegmentLedger,
    site: Site,
    parameters: JsonValue = None,
) -> Subtasks:
    """Build the subtask runner of a segment.

    The runner of an operation has all recorded subtasks. The runner of any other task starts
    empty.

    Raises:
        IncompatibleState: The checkpoint is from another version of the agent, and no migration
            leads to this one.
    """
    assert segment.context is not None
    attempt = OperationAttempt(
        run=segment.run,
        retry_count=task.retry_count if task is not None else 0,
        seq=(task.checkpoint or 0) if task is not None else 0,
        parameters=parameters,
    )
    restored = None if last is None else migrate_checkpoint(last, site.plan.version, site.plan.migrations)
    opened = task is not None and task.checkpoint is not None
    return Subtasks(
        segment.context,
        site.plan,
        attempt,
        restored,
        ledger,
        site.steps,
        site.clock.now,
        is_operation=opened,
        secret_keys=site.options.secret_keys,
    )


def restored_memory(segment: Segment, last: AgentCheckpoint | None, subtasks: Subtasks, site: Site) -> TaskMemory:
    """Build the working memory of a segment. It is loaded when the agent first uses it."""

    def owner() -> Owner:
        run = segment.run
        return Owner(agent_id(run.agent, run.task_id), run.id, run.fence)

    async def from_sql() -> L1Snapshot | None:
        assert segment.home is not None
        run, store = segment.run, segment.home.store
        return await site.patience.until_answered(lambda: store.l1_snapshot(run.task_id, run.agent))

    def memories() -> MemoryServices:
        return site.memories[segment.home is not None and segment.home.durable]

    async def ours() -> bool:
        assert segment.home is not None
        run, store = segment.run, segment.home.store
        return not await site.patience.until_answered(lambda: store.renew([run], site.replica))

    return TaskMemory(
        memories,
        MemoryRef.from_checkpoint(last),
        owner=owner,
        position=lambda: subtasks.position,
        ensure_operation=subtasks.ensure_operation,
        fetch_sql=from_sql,
        is_owner=ours,
        on_lost=lambda: segment.stop_here(Stop.LOST),
    )
