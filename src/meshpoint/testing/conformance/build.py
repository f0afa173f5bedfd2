"""Builders for the values that the store suite uses, and helpers that bring tasks into a state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

from pydantic import JsonValue

from meshpoint.model.calls import ALL, Join
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId, new_id
from meshpoint.model.messages import Address
from meshpoint.model.operations import OperationSummary, Revive, Revived
from meshpoint.model.options import StoreTimings
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.subtasks import (
    AgentCheckpoint,
    Operation,
    SaveCommitted,
    SubtaskRecord,
    SubtaskStatus,
)
from meshpoint.model.tasks import (
    CallSummary,
    CancelNotice,
    CheckpointDict,
    L1Snapshot,
    PlannedCall,
    Replica,
    Reply,
    Requester,
    Resumable,
    Run,
    TaskState,
    TaskSummary,
)
from meshpoint.model.transitions import (
    Begin,
    BeginCommitted,
    Cancel,
    CancelCommitted,
    Claim,
    ClaimResult,
    End,
    EndCommitted,
    ExistingTask,
    JoinCompleted,
    Pause,
    PauseCommitted,
    Progress,
    Release,
    Save,
    StoreReply,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock

T = TypeVar("T")

AGENT, PEER, REQUESTER = AgentName("travel"), AgentName("flights"), AgentName("client")
FORMAT, OTHER_FORMAT = "travel/1", "travel/2"
ELSEWHERE = AgentName("hotels")
DONE, FAILED, CANCELLED = TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
LEASE = 15 * SECOND
TIMEOUT = 60 * SECOND
"""Default timeout of a call."""


TIMINGS = StoreTimings(
    dispatch_lease=10 * SECOND,
    tombstone_ttl=2 * HOUR,
    parked_limit=6 * HOUR,
    checkpoint_ttl=20 * HOUR,
    checkpoint_history=3,
    checkpoint_archive=False,
)
"""The timings that the `store` under test must be opened with."""
LEASED = TIMINGS.dispatch_lease + SECOND
"""Time after which an unsent message is due."""


def a_replica(
    name: str = "A",
    *,
    formats: Iterable[str] = (FORMAT,),
    agent: AgentName = AGENT,
    version: str = "1.4",
) -> Replica:
    """A replica of `agent` that reads `formats`."""
    return Replica(ReplicaId(name), agent, frozenset(formats), LEASE, version=version)


HERE, THERE, FOREIGNER = a_replica("A"), a_replica("B"), a_replica(agent=ELSEWHERE)
STRANGER = a_replica("C", formats=[OTHER_FORMAT])
"""A replica of the same agent that reads another format."""
NEWER = a_replica("D", version="1.5")
"""A replica of the same agent with another version of its code."""


def a_run(task_id: TaskId | None = None) -> Run:
    """The first run of a task that has no row yet."""
    return Run(task_id or TaskId(new_id()), AGENT, RunId(new_id()))


def a_requester(**values: object) -> Requester:
    """A requester with a reply address. `values` override its fields."""
    known = {
        "reply_to": Address("client.resp"),
        "app_id": REQUESTER,
        "parent_task_id": "parent",
        **values,
    }
    return Requester(**known)  # type: ignore[arg-type]


def a_call(
    call_id: str,
    *,
    timeout: timedelta | None = TIMEOUT,
    idle_timeout: timedelta | None = None,
    outcome: Outcome | None = None,
    peer: AgentName = PEER,
) -> PlannedCall:
    """A call as part of a pause."""
    body = f'{{"for": "{call_id}"}}'.encode()
    return PlannedCall(
        TaskId(new_id()),
        call_id,
        peer,
        body,
        timeout,
        idle_timeout,
        {"x-call-depth": 1, "traceparent": "00"},
        outcome,
    )


def a_pause(
    *calls: str | PlannedCall,
    run: Run | None = None,
    join: Join = ALL,
    requester: Requester | None = None,
    context: CheckpointDict | None = None,
    state: bytes = b"state",
    state_format: str = FORMAT,
    digest: str | None = None,
) -> Pause:
    """A checkpoint that waits for `calls`, by default for one call "a"."""
    planned = tuple(a_call(call) if isinstance(call, str) else call for call in calls or ("a",))
    return Pause(
        run=run or a_run(),
        context=context or {"flags": {"vip": True}},
        state=state,
        state_format=state_format,
        calls=planned,
        join=join,
        requester=requester or a_requester(),
        request=b"request",
        app_version="7",
        framework="none",
        digest=digest,
    )


def sub(pause: Pause, call_id: str) -> TaskId:
    """The `sub_task_id` of the call `call_id`."""
    return one(call.sub_task_id for call in pause.calls if call.call_id == call_id)


def ok(value: JsonValue = "result") -> Ok[JsonValue]:
    """A successful outcome."""
    return Ok(value)


def error(message: str = "broken") -> Failed:
    """A peer's failed outcome."""
    return Failed(FailureKind.ERROR, message)


def a_claim(
    pause: Pause, call_id: str = "a", outcome: Outcome | None = None, *, sender: str | None = PEER
) -> Claim:
    """A response to one call, with a new claim id."""
    return Claim(
        RunId(new_id()), pause.run.task_id, sub(pause, call_id), outcome or ok(call_id), sender
    )


def a_begin(
    run: Run | None = None,
    replica: Replica = HERE,
    requester: Requester | None = None,
    operation: Operation | None = None,
) -> Begin:
    """A command that writes a task before its first segment."""
    return Begin(run or a_run(), replica, requester or a_requester(), b"request", operation)


def an_end(
    run: Run,
    state: TaskState = TaskState.COMPLETED,
    *,
    reply: bytes = b"reply",
    dead_reason: str | None = None,
    reason: str | None = None,
    checkpoint: AgentCheckpoint | None = None,
) -> End:
    """A command that ends a task."""
    return End(run, state, reply, dead_reason, reason, checkpoint)


def a_release(
    run: Run,
    *,
    not_before: timedelta = timedelta(),
    parked: str | None = None,
    version: str = "1.4",
) -> Release:
    """A command that releases a task, or parks it for the reason `parked`."""
    return Release(run, not_before, parked, version=version)


def a_cancel(
    task_id: TaskId,
    parent: str | None = None,
    *,
    sender: str | None = None,
    agent: AgentName = AGENT,
) -> Cancel:
    """A cancel of one task, with a new run id."""
    return Cancel(task_id, agent, RunId(new_id()), b"cancelled", parent=parent, sender=sender)


def an_undelivered_reply(
    run: Run | None = None, *, keep: timedelta | None = HOUR, again: bool = False
) -> StoreReply:
    """The undelivered reply of a task that completed in its first segment."""
    run = run or a_run()
    reply = Reply(run.agent, run.task_id, TaskState.COMPLETED, b"the reply", a_requester())
    return StoreReply(run.id, reply, keep, again)


def a_progress(pause: Pause, call_id: str = "a", *, sender: str = PEER) -> Progress:
    """A peer's status update for one call."""
    return Progress(pause.run.task_id, sub(pause, call_id), sender)


def an_operation(**values: object) -> Operation:
    """An operation's definition. `values` override its fields."""
    known = {"type": "analysis", "parameters": {"ticker": "ACME"}, "subject": "ACME", **values}
    return Operation(**known)  # type: ignore[arg-type]


def a_record(name: str, result: str | None = None) -> SubtaskRecord:
    """A completed subtask with `result`, which is JSON text, or a started one without."""
    status = SubtaskStatus.STARTED if result is None else SubtaskStatus.COMPLETED
    return SubtaskRecord(
        name=name, status=status, function="1", inputs={"ticker": "digest"}, result=result
    )


def a_checkpoint(
    run: Run, seq: int = 1, *records: SubtaskRecord, **values: object
) -> AgentCheckpoint:
    """A checkpoint of an operation that plans fetch, weigh and write, and has completed fetch.

    It shares no records with earlier ones. `values` override its fields.
    """
    known = {
        "subject": "ACME",
        "planned": ("fetch", "weigh", "write"),
        "subtasks": records or (a_record("fetch", f'"{seq}"'), a_record("weigh")),
        "current_subtask": "weigh",
        "agent_version": "7",
        "records_from": seq,
        **values,
    }
    return AgentCheckpoint.model_validate(
        {"operation_id": run.task_id, "agent": run.agent, "seq": seq, **known}
    )


def a_revive(task_id: TaskId, **values: object) -> Revive:
    """A command that makes a task ready again, with a new token. `values` override its fields."""
    return Revive(**{"task_id": task_id, "token": new_id(), **values})  # type: ignore[arg-type]


async def write_pause(store: CheckpointStore, pause: Pause) -> PauseCommitted:
    """Pause a task, which must succeed."""
    result = one(await store.pause([pause]))
    assert isinstance(result, PauseCommitted)
    return result


async def write_end(store: CheckpointStore, end: End) -> EndCommitted:
    """End a task, which must succeed."""
    result = one(await store.end([end]))
    assert isinstance(result, EndCommitted)
    return result


async def write_cancel(store: CheckpointStore, cancel: Cancel) -> CancelCommitted:
    """Cancel a task that no run owns, which must succeed."""
    result = one(await store.cancel([cancel]))
    assert isinstance(result, CancelCommitted)
    return result


async def paused(store: CheckpointStore, *calls: str | PlannedCall, **values: object) -> Pause:
    """Pause a new task that waits for `calls`."""
    pause = a_pause(*calls, **values)  # type: ignore[arg-type]
    await write_pause(store, pause)
    return pause


async def begun(store: CheckpointStore, replica: Replica = HERE) -> Run:
    """Begin a task, so that `replica` runs it in generation 0."""
    result = one(await store.begin([a_begin(replica=replica)]))
    assert isinstance(result, BeginCommitted)
    return result.run


async def operating(store: CheckpointStore, run: Run | None = None, **values: object) -> Run:
    """Begin an operation, so that `HERE` runs it in generation 0, without a checkpoint."""
    result = one(await store.begin([a_begin(run, operation=an_operation(**values))]))
    assert isinstance(result, BeginCommitted)
    return result.run


async def saved(store: CheckpointStore, run: Run, **values: object) -> AgentCheckpoint:
    """Write the operation's next checkpoint."""
    latest = await store.latest(run.task_id)
    checkpoint = a_checkpoint(run, 1 if latest is None else latest.seq + 1, **values)
    assert await store.save(Save(run, checkpoint)) == SaveCommitted()
    return checkpoint


async def failed(store: CheckpointStore, checkpoints: int = 1, **values: object) -> Run:
    """Fail an operation that has written `checkpoints` checkpoints. Its end writes one more."""
    run = await operating(store, None, **values)
    for _ in range(checkpoints):
        await saved(store, run)
    await store.end([an_end(run, TaskState.FAILED, reason="no answer")])
    return run


async def revived(store: CheckpointStore, task_id: TaskId, **values: object) -> Run:
    """Revive a task and acquire it for `HERE`."""
    assert isinstance(await store.revive(a_revive(task_id, **values)), Revived)
    return one(await store.acquire(HERE, 10)).run


async def answered(
    store: CheckpointStore, pause: Pause, *call_ids: str, replica: Replica = HERE, slots: int = 1
) -> ClaimResult:
    """Answer calls of `pause`, by default all. Returns the result of the last response."""
    ids = call_ids or tuple(call.call_id for call in pause.calls)
    return (await store.claim([a_claim(pause, call_id) for call_id in ids], replica, slots))[-1]


async def resumed(
    store: CheckpointStore, pause: Pause | None = None, *call_ids: str, replica: Replica = HERE
) -> Resumable:
    """Answer calls of a paused task, by default all, so that `replica` resumes it."""
    arrival = await answered(store, pause or await paused(store), *call_ids, replica=replica)
    assert isinstance(arrival, JoinCompleted)
    return arrival.task


async def ready(store: CheckpointStore, pause: Pause | None = None) -> Pause:
    """Meet the join of a paused task without a free slot, so that the task becomes ready."""
    pause = pause or await paused(store)
    await answered(store, pause, slots=0)
    return pause


async def parked(store: CheckpointStore, pause: Pause | None = None, *versions: str) -> Run:
    """Park a task that has its outcomes, once for each version; by default for one version."""
    run = (await resumed(store, pause)).run
    for version in versions or ("1.4",):
        await store.release([a_release(run, parked="call 1", version=version)])
        if version != (versions or ("1.4",))[-1]:
            run = one(await store.acquire_parked(a_replica(version="another"), 10)).run
    return run


async def ended(store: CheckpointStore, **values: object) -> Run:
    """Complete a task. Its reply is not sent yet."""
    run = (await resumed(store)).run
    await store.end([an_end(run, **values)])  # type: ignore[arg-type]
    return run


async def taken_over(store: CheckpointStore, clock: FakeClock) -> Resumable:
    """Expire the lease of the only running task, and rescue it for `THERE`."""
    clock.advance(LEASE + SECOND)
    return one(await store.rescue(THERE, 10, 10))


async def cancels_to_send(store: CheckpointStore, clock: FakeClock) -> list[TaskId]:
    """The calls whose cancels are due after the dispatch lease."""
    clock.advance(TIMINGS.dispatch_lease + SECOND)
    return [
        send.sub_task_id
        for send in await store.unsent(AGENT, 100)
        if isinstance(send, CancelNotice)
    ]


async def row(store: CheckpointStore, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]]:
    """Summaries of the task and its calls. Equal results mean that nothing changed."""
    found = await store.task(task_id)
    assert found is not None
    return found


async def existing(store: CheckpointStore, task_id: TaskId) -> ExistingTask:
    """The task as a duplicate of its request sees it."""
    return (await store.lookup([task_id]))[task_id]


async def reply_of(store: CheckpointStore, task_id: TaskId) -> Reply:
    """The reply of an ended task."""
    reply = (await existing(store, task_id)).reply
    assert reply is not None
    return reply


async def summary_of(store: CheckpointStore, task_id: TaskId) -> OperationSummary:
    """The summary of an operation."""
    summary = await store.operation(task_id)
    assert summary is not None
    return summary


async def state_of(store: CheckpointStore, task_id: TaskId) -> TaskState:
    """The task's state."""
    return (await row(store, task_id))[0].state


def one(items: Iterable[T]) -> T:
    """The only item of `items`."""
    [item] = items
    return item


def outcomes(task: Resumable) -> dict[str, Outcome]:
    """The outcomes by call id, in call order."""
    return {call_id: outcome for call_id, _, outcome in task.outcomes}


def kinds(task: Resumable) -> list[str]:
    """For each call, in call order, "ok" or the kind of its failure."""
    return [
        outcome.kind.value if isinstance(outcome, Failed) else "ok"
        for _, _, outcome in task.outcomes
    ]


def task_ids(tasks: Sequence[Resumable]) -> list[TaskId]:
    """The ids of `tasks`, in their order."""
    return [task.run.task_id for task in tasks]


def digest(word: str) -> str:
    """A stand-in for the digest of the memory `word`."""
    return f"digest of {word}"


def content(word: str) -> bytes:
    """The packed content of the memory `word`."""
    return f"\0{word}\xff".encode("latin-1")


def remembering(run: Run, seq: int, word: str, **values: object) -> AgentCheckpoint:
    """A checkpoint with the memory `word`."""
    bring = {"l1_snapshot": content(word), "l1_snapshot_hash": digest(word)}
    return a_checkpoint(run, seq, a_record("fetch", f'"{word}"'), **bring, **values)


def remembering_pause(run: Run, seq: int, word: str) -> Pause:
    """A pause whose checkpoint has the memory `word`."""
    return replace(a_pause(run=run), checkpoint=remembering(run, seq, word))


async def save(
    store: CheckpointStore, run: Run, words: Sequence[str | None], *, first: int = 1
) -> None:
    """Write a checkpoint for each of `words`, numbered from `first`. `None` means no memory."""
    for seq, word in enumerate(words, first):
        checkpoint = a_checkpoint(run, seq) if word is None else remembering(run, seq, word)
        assert await store.save(Save(run, checkpoint)) == SaveCommitted()


async def memory_of(store: CheckpointStore, task_id: TaskId) -> tuple[int, str]:
    """The stored memory: the number of its checkpoint, and its word."""
    found = await store.l1_snapshot(task_id)
    assert found is not None
    word = found.content[1:-1].decode()
    assert found == L1Snapshot(found.seq, digest(word), content(word))
    return found.seq, word


async def kept(store: CheckpointStore, task_id: TaskId) -> list[int]:
    """The numbers of the stored checkpoints, oldest first."""
    return [each.seq for each in await store.history(task_id)]


async def nothing_new(store: CheckpointStore, run: Run) -> None:
    """Assert that the operation still has only its first checkpoint and memory."""
    assert await kept(store, run.task_id) == [1]
    assert await memory_of(store, run.task_id) == (1, "first")
