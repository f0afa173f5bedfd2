"""What each page shows, read anew for each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from pydantic import JsonValue
from pydantic_core import from_json

from meshpoint.dashboard.showing import Masks, common_part, group_id
from meshpoint.dashboard.sources import AgentQueues, Source
from meshpoint.dashboard.trees import grow
from meshpoint.engine.open_questions import read_open_questions
from meshpoint.errors import ConfigurationError, MeshpointError, OperationNotFound, PoisonMessage
from meshpoint.model.bodies import RequestBody, ResponseBody, parse_body
from meshpoint.model.dead_letters import DeadLetter, LetterFilter
from meshpoint.model.envelopes import decode_request
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.messages import Header, is_agent_name, readable_traceparent
from meshpoint.model.operator_views import (
    DuePosition,
    DueTask,
    QuestionPosition,
    SampledTasks,
)
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.model.questions import AskedQuestion, QuestionKey
from meshpoint.model.replicas import RegisteredReplica
from meshpoint.model.tasks import (
    NO_DEADLINE,
    SUSPECT_AFTER_RESCUES,
    CallSummary,
    TaskState,
    TaskSummary,
)
from meshpoint.model.timeline import durations
from meshpoint.model.waits import is_wait
from meshpoint.ports.operator_store import OperatorStore
from meshpoint.ports.task_store import CheckpointStore

Query: TypeAlias = Mapping[str, str]
Context: TypeAlias = dict[str, Any]

_PAGE = 25
_LIST_PAGE = 50
_MAX_GROUPED = 250
"""Tasks in one state, and dead letters, that a page groups by reason."""
_MAX_NAMED = 5
"""Tasks of a group that a page names."""
_MAX_CALLS = 200
_MAX_ACTIONS = 10
_MAX_ENTRIES = 200


async def waiting(source: Source, query: Query) -> Context:
    """Who waits for whom, the next due first."""
    store, agent = await source.open(), agent_in(query)
    page = await store.waiting_roots(agent, after=_due(query), limit=_PAGE)
    branches = await grow(source, page.items)
    nested = {
        each.node.task_id for branch in branches for each in branch.walk() if each.node.depth > 0
    }
    return {
        "branches": [each for each in branches if each.node.task_id not in nested],
        "next": page.next,
        **await _agent_choice(source, agent),
    }


async def tasks(source: Source, query: Query) -> Context:
    """All tasks in a state."""
    store, agent = await source.open(), agent_in(query)
    state = _state_in(query)
    page = await store.due_tasks(state, agent, after=_due(query), limit=_LIST_PAGE)
    return {
        "tasks": [each.task for each in page.items],
        "masks": Masks(source.secret_keys),
        "state": state,
        "next": page.next,
        "no_deadline": NO_DEADLINE,
        **await _agent_choice(source, agent),
    }


@dataclass(frozen=True, slots=True)
class ShownQuestion:
    """An open question. `asked` is `None` if it cannot be read."""

    key: QuestionKey
    since: datetime
    deadline: datetime | None
    asked: AskedQuestion | None
    prompt: str


async def questions(source: Source, query: Query) -> Context:
    """The questions that wait for people."""
    store, masks = await source.open(), Masks(source.secret_keys)
    after = None
    if query.get("after_task"):
        after = QuestionPosition(query["after_task"], query.get("after_question", ""))
    page = await store.open_questions(after=after, limit=_LIST_PAGE)
    keys = [QuestionKey(each.agent, each.task_id, each.sub_task_id) for each in page.items]
    found = zip(page.items, keys, await _find_questions(store, keys), strict=True)
    shown = [
        ShownQuestion(
            key,
            each.since,
            each.deadline,
            asked,
            "This question cannot be read." if asked is None else masks.text(asked.prompt),
        )
        for each, key, asked in found
    ]
    return {"questions": shown, "next": page.next}


async def _find_questions(
    store: CheckpointStore, keys: Sequence[QuestionKey]
) -> list[AskedQuestion | None]:
    """The questions with these keys. A damaged one is `None`, and does not hide the others."""
    try:
        return await store.find_questions(keys)
    except ValueError:
        if len(keys) == 1:
            return [None]
        return [each for key in keys for each in await _find_questions(store, [key])]


@dataclass(slots=True)
class ReasonGroup:
    """Tasks of one agent that failed or were parked for the same reason.

    `id` names the group in addresses, which must not contain secrets. `example` is a whole reason.
    """

    id: str
    agent: AgentName
    example: str
    tasks: list[TaskSummary] = field(default_factory=list)

    @property
    def named(self) -> list[TaskSummary]:
        """The tasks that the page names."""
        return self.tasks[:_MAX_NAMED]

    @property
    def since(self) -> datetime:
        """When the first of them stopped."""
        return min(each.ended_at or each.checkpointed_at for each in self.tasks)


async def failures(source: Source, query: Query) -> Context:
    """Failed and parked tasks by reason. Dead letters are read apart, because that is slow."""
    agent, masks = agent_in(query), Masks(source.secret_keys)
    failed, is_failed_cut = await read_groups(source, TaskState.FAILED, agent)
    parked, is_parked_cut = await read_groups(source, TaskState.PARKED, agent)
    return {
        "masks": masks,
        "failed": failed,
        "parked": parked,
        "is_failed_cut": is_failed_cut,
        "is_parked_cut": is_parked_cut,
        "max_grouped": _MAX_GROUPED,
        **await _agent_choice(source, agent),
    }


async def read_groups(
    source: Source, state: TaskState, agent: AgentName | None
) -> tuple[list[ReasonGroup], bool]:
    """The first tasks in a state by reason, largest groups first, and whether there are more."""
    store = await source.open()
    page = await store.due_tasks(state, agent, limit=_MAX_GROUPED)
    reasons = await _reasons(store, state, page.items)
    groups: dict[str, ReasonGroup] = {}
    for each in page.items:
        reason = reasons.get(each.task.task_id) or "unknown"
        key = group_id(each.task.agent, common_part(reason))
        group = groups.setdefault(key, ReasonGroup(key, each.task.agent, reason))
        group.tasks.append(each.task)
    largest = sorted(groups.values(), key=lambda group: (-len(group.tasks), group.agent))
    return largest, page.next is not None


async def _reasons(
    store: CheckpointStore, state: TaskState, items: Sequence[DueTask]
) -> dict[TaskId, str]:
    if state is TaskState.PARKED:
        return {each.task.task_id: each.task.parked_reason or "" for each in items}
    reasons = {each.task.task_id: each.task.dead_reason or "" for each in items}
    unknown = [task_id for task_id, reason in reasons.items() if not reason]
    for task_id, row in (await store.lookup(unknown)).items() if unknown else ():
        outcome = None if row.reply is None else _outcome_of(row.reply.body)
        if isinstance(outcome, Failed):
            reasons[task_id] = f"{outcome.kind.value}: {outcome.message}"
    return reasons


@dataclass(slots=True)
class LetterGroup:
    """Dead letters of one agent with the same reason and sender. `id` is for addresses."""

    id: str
    agent: AgentName
    reason: str
    sender: str | None
    count: int = 0
    newest: DeadLetter | None = None


async def letters(source: Source, query: Query) -> Context:
    """Dead letters by reason."""
    warnings: list[str] = []
    groups: dict[str, LetterGroup] = {}
    count, is_cut = 0, False
    async with source.dead_letters(warnings) as access:
        if access is None:
            warnings.append("With broker_url: memory://, each replica keeps its own.")
        else:
            pages = access.read(LetterFilter(agent=agent_in(query)))
            try:
                async for page in pages:
                    for letter in page:
                        key = letter_group_id(letter)
                        group = groups.setdefault(
                            key, LetterGroup(key, letter.agent, letter.reason, letter.sender)
                        )
                        group.count, group.newest = group.count + 1, letter
                    count += len(page)
                    if count >= _MAX_GROUPED:
                        is_cut = True
                        break
            finally:
                await pages.aclose()
    largest = sorted(groups.values(), key=lambda group: (-group.count, group.agent))
    masks = Masks(source.secret_keys)
    return {
        "groups": largest,
        "warnings": warnings,
        "is_cut": is_cut,
        "count": count,
        "masks": masks,
    }


async def letter(source: Source, query: Query) -> Context:
    """One dead letter with its body."""
    letter_id, warnings = query.get("id", ""), list[str]()
    masks = Masks(source.secret_keys)
    async with source.dead_letters(warnings) as access:
        if access is not None:
            pages = access.read(select_letters({"id": letter_id}))
            try:
                async for page in pages:
                    body = await access.body(page[0])
                    return {"letter": page[0], "body": _show_body(masks, body), "masks": masks}
            finally:
                await pages.aclose()
    raise OperationNotFound(
        letter_id,
        f"there is no dead letter {letter_id}: it was replayed, "
        "dropped or displaced by newer ones",
    )


def letter_group_id(letter: DeadLetter) -> str:
    """The id of the group of a dead letter."""
    return group_id(letter.agent, letter.reason, letter.sender)


def select_letters(query: Query) -> LetterFilter:
    """The filter for a query: one dead letter, or all of an agent.

    Raises:
        ConfigurationError: It names neither.
    """
    from meshpoint.model.dead_letters import agent_of

    if letter_id := query.get("id"):
        agent_of(letter_id)
        return LetterFilter(frozenset({letter_id}))
    agent = agent_in(query)
    if agent is None or not query.get("group"):
        raise ConfigurationError("letters", "no group is named", "choose one on the page")
    return LetterFilter(agent=agent)


def _show_body(masks: Masks, body: bytes | None) -> str:
    if body is None:
        return "(too large to load, or not binary)"
    try:
        return masks.json(from_json(body))
    except ValueError:
        return masks.text(body.decode("utf-8", "backslashreplace"))


@dataclass(frozen=True, slots=True)
class ShownReplica:
    """A replica of an agent. `registered` is `None` if it is only known as the owner of tasks."""

    id: ReplicaId
    agent: AgentName
    running: int
    registered: RegisteredReplica | None


async def _read_replicas(store: OperatorStore) -> list[ShownReplica]:
    """The registered replicas, and replicas of earlier releases that run tasks now."""
    page = await store.due_tasks(TaskState.RUNNING, limit=_MAX_GROUPED)
    running = Counter(
        (each.task.agent, each.task.owner) for each in page.items if each.task.owner is not None
    )
    registered = {(each.agent, each.id): each for each in await store.replicas()}
    return [
        ShownReplica(replica_id, agent, running[agent, replica_id], known)
        for (agent, replica_id), known in {**dict.fromkeys(running), **registered}.items()
    ]


@dataclass(frozen=True, slots=True)
class ShownAgent:
    """An agent: its tasks by state, format and version, its queues and its replicas."""

    name: AgentName
    samples: list[SampledTasks]
    queues: AgentQueues | None
    replicas: list[ShownReplica]

    def count(self, state: TaskState) -> int:
        """Tasks in a state, at most `MAX_SAMPLED`."""
        return sum(each.count for each in self.samples if each.state is state)


async def agents(source: Source, query: Query) -> Context:
    """Agents, their versions and queues, and replicas."""
    store = await source.open()
    replicas = await _read_replicas(store)
    names = sorted({*source.agents, *await store.agents(), *(each.agent for each in replicas)})
    problem: str | None = None
    queues: Mapping[AgentName, AgentQueues] = {}
    try:
        queues = await source.queues(names)
    except (MeshpointError, OSError, TimeoutError) as error:
        problem = f"The broker does not answer: {error}"
    return {
        "agents": [
            ShownAgent(
                name,
                await store.sample(name),
                queues.get(name),
                [each for each in replicas if each.agent == name],
            )
            for name in names
        ],
        "problem": problem,
        "unended": [state for state in TaskState if not state.is_final],
    }


async def audit(source: Source, query: Query) -> Context:
    """Who did what, newest first."""
    store = await source.open()
    target = query.get("target") or None
    page = await store.actions(target=target, before=query.get("before"), limit=_LIST_PAGE)
    return {"actions": page.items, "next": page.next, "target": target}


async def task(source: Source, query: Query) -> Context:
    """One task with everything that is stored of it."""
    task_id = TaskId(query.get("id", ""))
    store, masks = await source.open(), Masks(source.secret_keys)
    found = await store.task(task_id)
    if found is None:
        hint = "a task has no row until it pauses or begins a step or subtask"
        raise OperationNotFound(task_id, f"there is no task {task_id}: {hint}")
    summary, calls = found
    outcome = _outcome_of_row((await store.lookup([task_id])).get(task_id))
    request = await store.stored_request(task_id)
    actions = await store.actions(target=task_id, limit=_MAX_ACTIONS)
    mailbox = await store.mailbox(task_id)
    entries = await store.timeline(task_id, limit=_MAX_ENTRIES)
    return {
        "task": summary,
        "masks": masks,
        "calls": calls[-_MAX_CALLS:],
        "hidden_calls": max(0, len(calls) - _MAX_CALLS),
        "why": explain(summary, calls),
        "input": masks.json(_input_of(request)) if request else None,
        "failure": outcome if isinstance(outcome, Failed) else None,
        "result": masks.json(outcome.value) if isinstance(outcome, Ok) else None,
        "artifacts": masks.json([*outcome.artifacts])
        if isinstance(outcome, Ok) and outcome.artifacts
        else None,
        "questions": await read_open_questions(store, summary, calls),
        "mailbox": mailbox,
        "values": masks.items({key: from_json(value) for key, value in mailbox.values}),
        "timeline": list(zip(entries, durations(entries), strict=True)),
        "is_timeline_cut": len(entries) == _MAX_ENTRIES,
        "checkpoints": list(reversed(await store.history(task_id))),
        "actions": actions.items,
        "trace_id": _trace_id(request),
        "branch": next(iter(await grow(source, [task_id])), None),
        "usage": summary.usage if outcome is None or outcome.usage.is_empty else outcome.usage,
        "can_cancel": not summary.state.is_final,
        "can_suspend": summary.state.can_be_suspended and summary.suspended_at is None,
        "can_resume": summary.suspended_at is not None
        or summary.state in {TaskState.PARKED, TaskState.FAILED, TaskState.CANCELLED},
        "no_deadline": NO_DEADLINE,
        "is_wait": is_wait,
    }


def explain(task: TaskSummary, calls: Sequence[CallSummary]) -> str:
    """Why a task does not run now, in a sentence."""
    if task.suspended_at is not None:
        if task.state is TaskState.RUNNING:
            return "It runs to its next pause and is suspended there."
        return "A person has suspended it. Resume it to let replicas run it."
    match task.state:
        case TaskState.WAITING:
            names = ", ".join(task.waiting_for[:3])
            more = len(task.waiting_for) - 3
            peers = names + (f" and {more} more" if more > 0 else "")
            needs = "" if task.needed is None else f" It continues after {task.needed} results."
            return f"It waits for {peers or 'its calls'}.{needs}"
        case TaskState.READY if task.rescues >= SUSPECT_AFTER_RESCUES:
            return "It waits for a replica that is not running another suspect."
        case TaskState.READY:
            reads = f" that reads {task.state_format}" if task.state_format else ""
            return f"It waits for a replica{reads} with a free slot."
        case TaskState.RUNNING:
            return "A replica runs it."
        case TaskState.PARKED:
            tried = ", ".join(task.tried_versions) or "an earlier release"
            return f"No version that tried it could continue it: {tried}."
        case _:
            return ""


def _input_of(request: bytes) -> JsonValue:
    try:
        return parse_body(RequestBody, decode_request(request).body).input()
    except (ValueError, PoisonMessage):
        return None


def _trace_id(request: bytes | None) -> str | None:
    """The trace of the request of a task, if its sender had one."""
    if request is None:
        return None
    try:
        headers = decode_request(request).headers
    except (ValueError, TypeError):
        return None
    traceparent = readable_traceparent(headers.get(Header.TRACEPARENT.value))
    return None if traceparent is None else traceparent.split("-")[1]


def _outcome_of_row(row: Any) -> Outcome | None:
    return None if row is None or row.reply is None else _outcome_of(row.reply.body)


def _outcome_of(body: bytes) -> Outcome | None:
    try:
        return parse_body(ResponseBody, body).outcome()
    except (ValueError, PoisonMessage):
        return None


async def _agent_choice(source: Source, agent: AgentName | None) -> Context:
    names = sorted({*source.agents, *await (await source.open()).agents()})
    return {"agent": agent, "agents": names}


def agent_in(query: Query) -> AgentName | None:
    """The agent that a query names.

    Raises:
        ConfigurationError: It is not the name of an agent.
    """
    name = query.get("agent") or None
    if name is None:
        return None
    if not is_agent_name(name):
        raise ConfigurationError("agent", f"{name[:80]!r} is not an agent's name", "choose one")
    return AgentName(name)


def _state_in(query: Query) -> TaskState:
    try:
        return TaskState(query.get("state", "waiting"))
    except ValueError as error:
        raise ConfigurationError("state", str(error), "choose one") from error


def _due(query: Query) -> DuePosition | None:
    """The place in a listing after which a page begins."""
    if not query.get("after_id"):
        return None
    try:
        return DuePosition(float(query.get("after_at", "")), query["after_id"])
    except ValueError as error:
        raise ConfigurationError("after_at", "is not a number", "go to the first page") from error
