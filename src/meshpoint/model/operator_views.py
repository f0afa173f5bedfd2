"""What operators look at: trees of waiting tasks, open questions, and the record of actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, NamedTuple, TypeVar

from pydantic import JsonValue

from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.tasks import TaskState, TaskSummary

T_co = TypeVar("T_co", covariant=True)


class DuePosition(NamedTuple):
    """Where a task is in the order in which tasks are due. `at` is exact, unlike a `datetime`."""

    at: float
    task_id: str


class QuestionPosition(NamedTuple):
    """Where a question is in the order of tasks."""

    task_id: str
    sub_task_id: str


@dataclass(frozen=True, slots=True)
class Page(Generic[T_co]):
    """A page of a listing. `next` is where the next page begins; `None` at the end."""

    items: Sequence[T_co]
    next: tuple[float | str, str] | None = None


@dataclass(frozen=True, slots=True)
class TreeTask:
    """A task in a tree.

    Attributes:
        completed, expected: calls with an outcome, of all calls of the pause.
        needed: results that complete the join; `None` if it needs the outcomes of all calls.
        limit: when it resumes or fails even if no call ends; `None` without a deadline.
        is_cancelled: its cancel was requested.
    """

    agent: AgentName
    state: TaskState
    completed: int
    expected: int
    needed: int | None
    since: datetime
    limit: datetime | None
    suspended_at: datetime | None
    is_cancelled: bool


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A task, or an open call of the task `parent_id`.

    Attributes:
        task_id: of the task, or of the peer's task that the call waits for.
        peer: the name under which the call is stored; empty at the root.
        since: when the call was made.
        deadline: of the call; `None` without one.
        task: `None` if the database has no such task: the peer keeps it elsewhere or in memory.
    """

    parent_id: TaskId | None
    task_id: TaskId
    call_id: str
    peer: str
    since: datetime | None
    deadline: datetime | None
    depth: int
    task: TreeTask | None


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A question that a task waits for. `sub_task_id` names it within the task."""

    task_id: TaskId
    sub_task_id: TaskId
    agent: AgentName
    since: datetime
    deadline: datetime | None


@dataclass(frozen=True, slots=True)
class DueTask:
    """A listed task and its position."""

    position: DuePosition
    task: TaskSummary


@dataclass(frozen=True, slots=True)
class SampledTasks:
    """Tasks of one agent in one state that are alike, among the first `MAX_SAMPLED` due."""

    state: TaskState
    state_format: str | None
    version: str | None
    count: int
    oldest: datetime


MAX_SAMPLED = 1000


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """Something that a person has done to a task or to dead letters.

    Attributes:
        target: the id of the task or the letter, or the agent of a bulk action.
        details: its parameters, without secrets.
        ended_at: `None` while it runs, and if its process died.
        succeeded: `None` until it has ended.
        result: what it changed, or why it failed.
    """

    id: str
    actor: str
    action: str
    target: str
    details: JsonValue
    started_at: datetime
    ended_at: datetime | None = None
    succeeded: bool | None = None
    result: str | None = None
