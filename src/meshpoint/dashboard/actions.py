"""What people do in the dashboard. Each action is recorded before it begins and after it ends."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

from pydantic import JsonValue

from meshpoint import interventions
from meshpoint.dashboard.sources import Source
from meshpoint.dashboard.trees import grow, unended
from meshpoint.dashboard.views import (
    Query,
    agent_in,
    letter_group_id,
    read_groups,
    select_letters,
)
from meshpoint.errors import (
    MeshpointError,
    NoCheckpoint,
    OperationCompleted,
    OperationConflict,
    OperationNotFound,
    OperationRunning,
    ResumeRefused,
)
from meshpoint.model.dead_letters import DeadLetter, LetterFilter, LetterResult, describe_results
from meshpoint.model.error_text import describe_exception, quantity
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.secrets import mask_reason
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import SuspendRefused

if TYPE_CHECKING:
    from meshpoint.ports.agent import ResumeFrom
    from meshpoint.ports.dead_letters import DeadLetters

log = logging.getLogger(__name__)

_BATCH = 100
_MAX_LISTED = 20
_MAX_TARGET = 500
Run: TypeAlias = Callable[[str | None], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Plan:
    """An action that a person can confirm.

    Attributes:
        name: of the action, in the audit.
        target: of the action, in the audit: a task, a letter or an agent.
        reason: that its tasks or letters have in common. It may quote values of agents.
        effects: what it would do, in sentences.
        items: what it would change, at most `_MAX_LISTED`.
        choices: labels of a choice that the person has, by value; the first is the default.
        back: the page to return to, with its query.
        run: performs it with the chosen value, if any, and returns what it changed.
    """

    name: str
    title: str
    button: str
    target: str
    effects: Sequence[str]
    run: Run
    back: tuple[str, Mapping[str, str]]
    details: JsonValue = None
    items: Sequence[str] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None
    is_dangerous: bool = False


async def plan(source: Source, name: str, query: Query) -> Plan:
    """Describe an action before anyone confirms it.

    Raises:
        MeshpointError: There is no such action, or nothing that it could change.
    """
    make = _PLANS.get(name)
    if make is None:
        raise OperationNotFound(name, f"there is no action {name}")
    return await make(source, query)


async def perform(source: Source, plan: Plan, actor: str, given: str = "") -> str:
    """Perform an action with a given choice, and return the id of its record.

    An unknown choice stands for the default.

    Raises:
        MeshpointError: It failed, and its record says so; or it could not be recorded, and was not
            begun.
    """
    store = await source.open()
    choice = given if given in plan.choices else next(iter(plan.choices), None)
    details: JsonValue = {"choice": choice, "of": plan.details} | (
        {} if plan.reason is None else {"reason": plan.reason}
    )
    action_id = await store.record_action(actor, plan.name, plan.target, details)
    try:
        result = await plan.run(choice)
    except BaseException as error:
        shown = str(error) if isinstance(error, MeshpointError) else describe_exception(error)
        reason = mask_reason(shown, source.secret_keys)
        # The record is completed even if the request is cancelled.
        await asyncio.shield(store.complete_action(action_id, succeeded=False, result=reason))
        raise
    await asyncio.shield(store.complete_action(action_id, succeeded=True, result=result))
    return action_id


async def _cancel(source: Source, query: Query) -> Plan:
    task_id = TaskId(query.get("id", ""))
    branch = next(iter(await grow(source, [task_id])), None)
    if branch is None:
        raise OperationNotFound(task_id, f"there is no task {task_id}")
    if branch.task is not None and branch.task.state.is_final:
        raise MeshpointError(f"task {task_id} has already ended as {branch.task.state.value}")
    tree = unended(branch)
    choices = {"tree": f"This task and the {quantity(len(tree) - 1, 'task')} that it waits for"}
    if len(tree) == 1:
        choices = {}
    else:
        choices["one"] = "Only this task; its agent tells its peers, which may finish first"

    async def run(choice: str | None) -> str:
        return await _cancel_all(tree[:1] if choice == "one" else tree)

    return Plan(
        name="cancel",
        title="Cancel a task",
        button="Cancel the task" if len(tree) == 1 else "Cancel tasks",
        target=task_id,
        effects=[
            "It ends as cancelled, and its requester gets that outcome.",
            "A segment that runs now is stopped.",
        ],
        items=[f"{agent} {each}" for _, each, agent in tree],
        details={"tasks": [each for _, each, _ in tree[:_BATCH]]},
        choices=choices,
        run=run,
        back=("task", {"id": task_id}),
        is_dangerous=True,
    )


async def _cancel_all(tasks: Sequence[tuple[Source, TaskId, AgentName]]) -> str:
    """Cancel tasks from the top of a tree, and return what changed."""
    notes: dict[str, None] = {}
    count = 0
    by_source: dict[Source, list[tuple[TaskId, AgentName]]] = {}
    for source, task_id, agent in tasks:
        by_source.setdefault(source, []).append((task_id, agent))
    for source, chosen in by_source.items():
        store = await source.open()
        for first in range(0, len(chosen), _BATCH):
            count += await interventions.cancel_all(store, chosen[first : first + _BATCH])
    for source, chosen in by_source.items():
        if note := await source.notify_cancelled(chosen):
            notes[note] = None
    if not count:
        done = "nothing is left to cancel: they have ended, or were cancelled before"
        raise MeshpointError("; ".join([done, *notes]))
    return "; ".join([f"cancelled {quantity(count, 'task')}", *notes])


async def _suspend(source: Source, query: Query) -> Plan:
    task_id = await _known_task(source, query)

    async def run(choice: str | None) -> str:
        (result,) = await (await source.operations()).suspend([task_id])
        if isinstance(result, SuspendRefused):
            raise MeshpointError(f"task {task_id} cannot be suspended in its state")
        if result.state is TaskState.RUNNING:
            return "it runs to its next pause and is suspended there"
        return "suspended"

    return Plan(
        name="suspend",
        title="Suspend a task",
        button="Suspend",
        target=task_id,
        effects=[
            "Replicas do not run it until somebody resumes it.",
            "Responses of its peers are recorded meanwhile, and its deadlines apply.",
        ],
        run=run,
        back=("task", {"id": task_id}),
    )


_PLACES = {
    "default": "Where its agent prefers",
    "start": "At its start: recorded subtasks are skipped",
    "last-pause": "At its last pause: results are reused, and failed calls are made again",
}


async def _resume(source: Source, query: Query) -> Plan:
    task_id = await _known_task(source, query)
    found = await (await source.open()).task(task_id)
    has_ended = found is not None and found[0].state.is_final

    async def run(choice: str | None) -> str:
        place = None if choice in {None, "default"} else cast("ResumeFrom", choice)
        status, revived = await interventions.resume(await source.operations(), task_id, place)
        if revived is not None:
            return f"ready for attempt {revived.retry_count + 1}"
        return "offered to every version again" if status == "offered" else "continued"

    return Plan(
        name="resume",
        title="Resume a task",
        button="Resume",
        target=task_id,
        effects=["Any replica of its agent can run it again, as soon as one has a free slot."],
        choices=_PLACES if has_ended else {},
        run=run,
        back=("task", {"id": task_id}),
    )


_REFUSALS: Mapping[type[ResumeRefused], str] = {
    NoCheckpoint: "without a checkpoint",
    OperationCompleted: "completed",
    OperationConflict: "whose agent is busy with another",
    OperationNotFound: "gone",
    OperationRunning: "active again",
}


async def _known_task(source: Source, query: Query) -> TaskId:
    task_id = TaskId(query.get("id", ""))
    if await (await source.open()).task(task_id) is None:
        raise OperationNotFound(task_id, f"there is no task {task_id}")
    return task_id


async def _resume_failed(source: Source, query: Query) -> Plan:
    return await _resume_group(source, query, TaskState.FAILED)


async def _resume_parked(source: Source, query: Query) -> Plan:
    return await _resume_group(source, query, TaskState.PARKED)


async def _resume_group(source: Source, query: Query, state: TaskState) -> Plan:
    groups, _ = await read_groups(source, state, agent_in(query))
    group = next((each for each in groups if each.id == query.get("group")), None)
    if group is None:
        raise OperationNotFound("", f"no {state.value} task has this reason any more")
    ids = [each.task_id for each in group.tasks]
    reason = mask_reason(group.example, source.secret_keys)

    async def run(choice: str | None) -> str:
        operations = await source.operations()
        if state is TaskState.PARKED:
            return f"offered {quantity(len(await operations.unpark(ids)), 'task')} again"
        refused: Counter[str] = Counter()
        for done, task_id in enumerate(ids):
            try:
                await operations.resume(task_id)
            except ResumeRefused as error:
                refused[_REFUSALS.get(type(error), "refused")] += 1
            except MeshpointError as error:
                raise MeshpointError(
                    f"resumed {done - refused.total()} before: {error}"
                ) from error
        resumed = f"resumed {quantity(len(ids) - refused.total(), 'task')}"
        reasons = ", ".join(f"{count} {name}" for name, count in refused.items())
        return resumed + (f"; left as they are: {reasons}" if refused else "")

    effect = (
        "Every version of the agent tries them again."
        if state is TaskState.PARKED
        else "Each begins a new attempt, where its agent prefers. Tasks without a checkpoint "
        "cannot be resumed and are left as they are."
    )
    return Plan(
        name=f"resume-{state.value}",
        title=f"Resume {quantity(len(ids), f'{state.value} task')}",
        button=f"Resume {quantity(len(ids), 'task')}",
        target=group.agent,
        reason=reason,
        effects=[effect],
        items=ids[:_MAX_LISTED],
        details={"tasks": [*ids[:_BATCH]], "count": len(ids)},
        run=run,
        back=("failures", {}),
    )


async def _replay(source: Source, query: Query) -> Plan:
    return await _plan_letters(
        source,
        query,
        "replay",
        "Replay",
        "They go to the queues they came from, and count as never delivered there.",
    )


async def _drop(source: Source, query: Query) -> Plan:
    return await _plan_letters(
        source, query, "drop", "Drop", "They are deleted. Nothing else has a copy of them."
    )


async def _plan_letters(source: Source, query: Query, name: str, verb: str, effect: str) -> Plan:
    where, group = select_letters(query), query.get("group")
    pages = _chosen_letters(source, where, group)
    async with aclosing(pages):
        first = [letter async for _, page in pages for letter in page[:1]][:1]
    if not first:
        raise OperationNotFound("", "there are no such dead letters any more")
    reason = mask_reason(first[0].reason, source.secret_keys)
    past = "replayed" if name == "replay" else "dropped"

    async def run(choice: str | None) -> str:
        results: Counter[LetterResult] = Counter()
        try:
            async with aclosing(_chosen_letters(source, where, group)) as pages:
                async for access, page in pages:
                    change = access.replay if name == "replay" else access.drop
                    results.update(await change(page))
        except MeshpointError as error:
            done = describe_results(results, past)
            raise MeshpointError(f"{done} before: {error}") from error
        if not results:
            raise MeshpointError("there are no such dead letters any more")
        return describe_results(results, past)

    return Plan(
        name=name,
        title=f"{verb} dead letters",
        button=verb,
        target=(query.get("id") or first[0].agent)[:_MAX_TARGET],
        reason=reason,
        effects=[effect],
        items=[f"from {first[0].sender or '(unreadable)'}"],
        details={"agent": first[0].agent, "sender": first[0].sender},
        run=run,
        back=("failures", {}),
        is_dangerous=name == "drop",
    )


async def _chosen_letters(
    source: Source, where: LetterFilter, group: str | None
) -> AsyncGenerator[tuple[DeadLetters, list[DeadLetter]], None]:
    """Yield pages of the letters of a group, or of all that match, with the access to them."""
    async with source.dead_letters([]) as access:
        if access is None:
            raise MeshpointError("with a memory:// broker, dead letters live in the replicas")
        async with aclosing(access.read(where)) as pages:
            async for page in pages:
                chosen = [each for each in page if group in (None, letter_group_id(each))]
                if chosen:
                    yield access, chosen


_PLANS: Mapping[str, Callable[[Source, Query], Awaitable[Plan]]] = {
    "cancel": _cancel,
    "suspend": _suspend,
    "resume": _resume,
    "resume-failed": _resume_failed,
    "resume-parked": _resume_parked,
    "replay": _replay,
    "drop": _drop,
}
