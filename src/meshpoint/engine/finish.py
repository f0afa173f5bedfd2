"""End a task with its single outcome. The reply is committed, then published."""

from __future__ import annotations

from meshpoint.engine.runtime import Site
from meshpoint.engine.segment import Last, Segment
from meshpoint.model.checkpoint import End, Ended, EndResult, Fenced, Reply, TaskState
from meshpoint.model.envelopes import fingerprint, reply_bytes
from meshpoint.model.events import Step
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.secrets import masked
from meshpoint.ports.backend import Home


def refusal_for(segment: Segment, refused: Failed) -> Reply:
    """Build the reply to a refused request.

    It names the request, so that it cannot end another call.
    """
    run = segment.run
    refuses = None if segment.request is None else fingerprint(segment.request)
    body = reply_bytes(run.task_id, None, refused, refuses=refuses)
    return Reply(run.agent, run.task_id, state_of(refused), body, segment.requester)


def reply_for(segment: Segment, outcome: Outcome, options: Options) -> Reply:
    """Build the reply with `outcome`.

    A result too large to send becomes a failure that says so.
    """
    context_id = segment.context.a2a_context.context_id if segment.context else None
    body = reply_bytes(segment.run.task_id, context_id, outcome)
    if len(body) > options.max_message_bytes:
        size = f"the result has {len(body)} bytes; max_message_bytes is {options.max_message_bytes}"
        outcome = Failed(FailureKind.ERROR, size, outcome.usage)
        body = reply_bytes(segment.run.task_id, context_id, outcome)
    run = segment.run
    return Reply(run.agent, run.task_id, state_of(outcome), body, segment.requester)


def state_of(outcome: Outcome) -> TaskState:
    """Return the final state of a task with `outcome`."""
    match outcome:
        case Ok():
            return TaskState.COMPLETED
        case Failed(kind=FailureKind.CANCELLED):
            return TaskState.CANCELLED
        case _:
            return TaskState.FAILED


async def end(segment: Segment, home: Home, reply: Reply, site: Site, failed: Failed | None = None) -> EndResult:
    """Commit the outcome of a task with a row. Waits while the database is unavailable.

    With `failed`, an operation stores a final checkpoint with the reason.
    """
    ending = await _end(segment, reply, failed, site)

    async def attempt() -> EndResult:
        return (await home.store.end([ending]))[0]

    with site.steps.step(Step.END, [segment.run.task_id], state=reply.state.value):
        result = await site.patience.until_answered(attempt)
    match result:
        case Ended():
            if segment.dead_reason:
                site.steps.note(Step.DEAD_TASK, segment.run.task_id, reason=segment.dead_reason)
        case Fenced():
            site.steps.note(Step.FENCED, segment.run.task_id, what="end", fence=segment.run.fence)
    return result


async def _end(segment: Segment, reply: Reply, failed: Failed | None, site: Site) -> End:
    reason = None if failed is None else masked(failed.message, site.options.secret_keys)
    if reason is not None and segment.subtasks is not None and segment.subtasks.is_operation:
        assert segment.memory is not None
        last = segment.subtasks.final_checkpoint(reason, segment.failure)
        segment.last = Last.of(last, await segment.memory.final_ref(last.seq, last.progress.completed))
    left = segment.last.checkpoint if segment.last is not None else None
    return End(segment.run, reply.state, reply.body, segment.dead_reason, reason, left)
