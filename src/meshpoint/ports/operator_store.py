"""What operators read and record in a database, in addition to what replicas do.

All reads are bounded: a page costs the same with ten tasks and with a million.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import JsonValue

from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.operator_views import (
    DuePosition,
    DueTask,
    OpenQuestion,
    OperatorAction,
    Page,
    QuestionPosition,
    SampledTasks,
    TreeNode,
)
from meshpoint.model.tasks import TaskState
from meshpoint.ports.task_store import CheckpointStore


class OperatorViews(Protocol):
    """Bounded reads for pages that people watch."""

    async def agents(self) -> list[AgentName]:
        """The agents of this namespace that have tasks."""

    async def waiting_roots(
        self, agent: AgentName | None = None, *, after: DuePosition | None = None, limit: int
    ) -> Page[TaskId]:
        """Waiting tasks for which no other task of this database waits, the next due first."""

    async def trees(self, roots: Sequence[TaskId], *, limit: int) -> list[TreeNode]:
        """Each task with the calls it waits for, their tasks, and so on, level by level.

        At most `limit` nodes. A root that does not exist is left out.
        """

    async def due_tasks(
        self,
        state: TaskState,
        agent: AgentName | None = None,
        *,
        after: DuePosition | None = None,
        limit: int,
    ) -> Page[DueTask]:
        """Tasks in a state, the next due first. Ended ones: the last to be deleted first."""

    async def open_questions(
        self, *, after: QuestionPosition | None = None, limit: int
    ) -> Page[OpenQuestion]:
        """Questions that tasks wait for, in the order of their tasks."""

    async def sample(self, agent: AgentName) -> list[SampledTasks]:
        """The unended tasks of an agent by state, format and version: `MAX_SAMPLED` per state."""


class ActionLog(Protocol):
    """The record of what operators have done."""

    async def record_action(self, actor: str, action: str, target: str, details: JsonValue) -> str:
        """Record an action that is about to begin, and return its id."""

    async def complete_action(self, action_id: str, *, succeeded: bool, result: str) -> None:
        """Record the result of an action, once."""

    async def actions(
        self, *, target: str | None = None, before: str | None = None, limit: int
    ) -> Page[OperatorAction]:
        """Actions, newest first. With `before`, an action's id, only older ones."""

    async def action(self, action_id: str) -> OperatorAction | None:
        """One action, or `None` if it does not exist."""


class OperatorStore(CheckpointStore, OperatorViews, ActionLog, Protocol):
    """The store of a mesh, for operators."""
