"""Room 6: rebuild what agent code needs from a task's rows."""

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
    """The context of a task that goes on, and the outcomes it waited for, in call order.

    What the peers used is counted into the task's token usage, once per pause: the kept context does not have
    it yet, and the next checkpoint will.

    Raises:
        IncompatibleState: a later version of Meshpoint wrote the context.
    """
    context = TaskExecutionContext.from_checkpoint_dict(task.context, report=report)
    for _, peer, outcome in task.outcomes:
        context.token_usage.merge(outcome.usage, source=peer)
    return context, Outcomes({call_id: outcome for call_id, _, outcome in task.outcomes})


async def last_checkpoint(segment: Segment, task: Resumable | None, site: Site) -> AgentCheckpoint | None:
    """The last checkpoint of a task that is an operation and has one."""
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
    """What runs the subtasks of a segment: of an operation with all that is recorded, of any other task with nothing.

    Raises:
        IncompatibleState: the checkpoint is of another version of the agent, and no migration leads here.
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
    """The working memory of a segment, which is looked for when the agent first uses it."""

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
