"""Make a paused task resumable by any replica, or keep it in memory if that fails."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from meshpoint.engine.runtime import Site
from meshpoint.engine.segment import Last, Segment
from meshpoint.errors import StoreUnavailable
from meshpoint.model.bodies import A2AMessage, Part, RequestBody
from meshpoint.model.calls import Call, Paused
from meshpoint.model.checkpoint import Pause, PauseResult, PlannedCall
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import pack
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId, new_id, resumed_id
from meshpoint.model.json_values import digest_of
from meshpoint.model.messages import Header, HeaderValue
from meshpoint.model.options import OnCheckpointFailure, Options
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.subtasks import Child
from meshpoint.ports.backend import Home
from meshpoint.subtasks.runner import Subtasks


async def last(segment: Segment) -> Last | None:
    """Prepare the checkpoint that a pause writes for an operation.

    Returns `None` if the stored checkpoint is up to date.

    Raises:
        MemoryLost: The working memory does not match what the code wrote.
        MemoryRefused: The working memory is too large to store.
    """
    home, subtasks, memory = segment.home, segment.subtasks, segment.memory
    if home is None or subtasks is None or memory is None or not (subtasks.has_unsaved or memory.changed):
        return None
    so_far = subtasks.next_checkpoint()
    mark = await memory.prepare_ref(so_far.seq, durable=True, finished_subtasks=so_far.progress.completed)
    return Last.of(so_far, mark)


def plan(
    segment: Segment,
    paused: Paused,
    state_format: str,
    options: Options,
    earlier: Sequence[Child] = (),
    last: Last | None = None,
) -> Pause:
    """Build the checkpoint to write.

    Ids are generated once, here, so that a repeated write has the same ids.

    A call that an earlier attempt at an operation also made goes to the same task of the peer: see
    `_Children`. `last` is the checkpoint of the operation itself, stored while it waits.
    """
    assert segment.context is not None
    context, of_operation = segment.context, segment.subtasks is not None and segment.subtasks.is_operation
    children = _Children(segment.subtasks, earlier) if segment.subtasks is not None and of_operation else None
    calls = tuple(_planned(call, context, options, children) for call in paused.calls)
    return Pause(
        run=segment.run,
        context=context.to_checkpoint_dict(),
        state=paused.state,
        state_format=state_format,
        calls=calls,
        join=paused.join,
        requester=segment.requester,
        request=pack(segment.request) if segment.request and segment.run.fence == 0 else None,
        app_version=options.app_version,
        children=tuple(children.planned) if children is not None else (),
        checkpoint=None if last is None else last.checkpoint,
        digest=segment.digest if segment.run.fence == 0 else None,
    )


class _Children:
    """Maps the calls of an operation to tasks of its peers.

    In a resumed operation, a call with the same peer and input as in an earlier attempt reuses
    that attempt's task, so that the peer resumes from its own checkpoint, or just answers again.
    Calls of a subtask that does not run again, or whose record is outdated, are not reused.
    """

    def __init__(self, subtasks: Subtasks, earlier: Sequence[Child]) -> None:
        self._retry, self._subtask = subtasks.retry_count, subtasks.paused_subtask
        # Completed subtasks make no calls.
        spent = {*subtasks.outdated, *subtasks.progress.completed}
        left = [each for each in earlier if each.retry < self._retry and each.subtask not in spent]
        self._left = sorted(left, key=lambda child: -child.retry)  # the latest call counts
        self.planned: list[Child] = []

    @property
    def order(self) -> str:
        """Text that sorts requests for the same task by age, the latest last."""
        return f"{self._retry:08d}"

    def adopt(self, call: Call) -> tuple[TaskId, TaskId]:
        """Return the id of the peer's task and the id of the call.

        They differ if the call resumes an existing task of the peer.
        """
        digest = digest_of(call.input)
        found = next((child for child in self._left if (child.peer, child.digest) == (call.peer, digest)), None)
        if found is not None:
            self._left.remove(found)
        id_ = found.id if found is not None else TaskId(new_id())
        peer = AgentName(call.peer)
        self.planned.append(Child(id=id_, peer=peer, digest=digest, subtask=self._subtask, retry=self._retry))
        return id_, id_ if found is None else resumed_id(id_, self._retry)


async def save(pause: Pause, home: Home | None, site: Site) -> tuple[Home, PauseResult]:
    """Commit `pause`. Returns the home it was written to and the result.

    A task with a row always stays in its home, and its write is repeated until the database
    answers. A first checkpoint is written to the database, or to memory if it has definitely not
    committed within `checkpoint_retry_time`. A write in doubt is repeated until the database
    reports its result.
    """
    with site.steps.step(Step.CHECKPOINT, [pause.run.task_id], generation=pause.run.generation + 1):
        if home is None and site.durable is not None:
            if site.options.on_checkpoint_failure is OnCheckpointFailure.KEEP_IN_MEMORY:
                return await _first(pause, site.durable, site)
            home = site.durable
        home = home or site.memory
        return home, await _write(pause, home, site)


async def _first(pause: Pause, durable: Home, site: Site) -> tuple[Home, PauseResult]:
    try:
        attempt = partial(_attempt, pause, durable)
        return durable, await site.patience.unless_away(attempt, site.options.checkpoint_retry_time)
    except StoreUnavailable as error:
        site.steps.note(Step.DEGRADED, pause.run.task_id, error=str(error))
        return site.memory, await _write(pause, site.memory, site)


async def _write(pause: Pause, home: Home, site: Site) -> PauseResult:
    return await site.patience.until_answered(partial(_attempt, pause, home))


async def _attempt(pause: Pause, home: Home) -> PauseResult:
    return (await home.store.pause([pause]))[0]


def _planned(call: Call, context: TaskExecutionContext, options: Options, children: _Children | None) -> PlannedCall:
    if children is not None:
        peers_own, sub_task_id = children.adopt(call)
    else:
        peers_own = sub_task_id = TaskId(new_id())
    depth = context.a2a_context.call_depth + 1
    body = _request_body(peers_own, call, context)
    headers: dict[str, HeaderValue] = {Header.CALL_DEPTH.value: depth}
    if call.idle_timeout is not None:
        headers[Header.IDLE_TIMEOUT.value] = call.idle_timeout.total_seconds()
    if children is not None and sub_task_id != peers_own:
        headers[Header.RESUME.value] = children.order
    traceparent = context.trace_context.get(Header.TRACEPARENT.value)
    if isinstance(traceparent, str):
        headers[Header.TRACEPARENT.value] = traceparent
    return PlannedCall(
        sub_task_id=sub_task_id,
        call_id=call.id,
        peer=AgentName(call.peer),
        body=body,
        timeout=call.timeout or options.peer_timeout,
        idle_timeout=call.idle_timeout,
        headers=headers,
        outcome=_refusal(depth, body, options),
    )


def _refusal(depth: int, body: bytes, options: Options) -> Failed | None:
    if depth > options.max_call_depth:
        return Failed(FailureKind.ERROR, f"call depth {depth} is beyond max_call_depth {options.max_call_depth}")
    if len(body) > options.max_message_bytes:
        size = f"the request has {len(body)} bytes; max_message_bytes is {options.max_message_bytes}"
        return Failed(FailureKind.UNDELIVERABLE, size)
    return None


def _request_body(sub_task_id: TaskId, call: Call, context: TaskExecutionContext) -> bytes:
    a2a = context.a2a_context
    handed_on = {
        **a2a.metadata,
        "userId": a2a.user_id,
        "sessionId": a2a.session_id,
        "userConfig": a2a.user_config,
        "securityContext": context.security_context.to_plain(),
    }
    message = A2AMessage(
        message_id=sub_task_id,
        role="ROLE_AGENT",
        parts=[Part(data=call.input)],
        context_id=a2a.context_id,
        task_id=sub_task_id,
    )
    return RequestBody(message=message, metadata={k: v for k, v in handed_on.items() if v}).to_bytes()
