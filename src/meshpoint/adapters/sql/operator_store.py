"""The SQL store as operators use it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import JsonValue
from sqlalchemy import Row

from meshpoint.adapters.sql import inventory
from meshpoint.adapters.sql import operator_statements as sql
from meshpoint.adapters.sql.rows import instant
from meshpoint.adapters.sql.store import SqlStore
from meshpoint.errors import KeyMissing
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.operator_views import (
    MAX_SAMPLED,
    DuePosition,
    DueTask,
    OpenQuestion,
    OperatorAction,
    Page,
    QuestionPosition,
    SampledTasks,
    TreeNode,
    TreeTask,
)
from meshpoint.model.tasks import NO_DEADLINE, TaskState

_MAX_DEPTH = 8
_SCANNED = 500
"""Rows that one scan reads at most, per agent, to find what a page shows."""
_MAX_SCANS = 8
"""Scans for a page of waiting tasks, as long as they find only tasks for which others wait."""
_LAST = "~"
"""Above every id of an action."""


class SqlOperatorStore(SqlStore):
    """`meshpoint.ports.operator_store.OperatorStore`. Replicas do not load it."""

    async def agents(self) -> list[AgentName]:
        """The agents of this namespace that have tasks."""
        names = self._database.options.names
        return [names.plain(each) for each in await self._agents()]

    async def waiting_roots(
        self, agent: AgentName | None = None, *, after: DuePosition | None = None, limit: int
    ) -> Page[TaskId]:
        """Waiting tasks for which no other task waits, or all waiting tasks of one agent.

        A page may be short before the end.
        """
        names = await self._chosen(agent)
        roots: list[DuePosition] = []
        for _ in range(_MAX_SCANS):
            roots, after = await self._scan_waiting(names, after, all_=agent is not None)
            if roots or after is None:
                break
        if len(roots) > limit:
            after = roots[limit - 1]
        return Page([TaskId(each.task_id) for each in roots[:limit]], after)

    async def _scan_waiting(
        self, agents: Sequence[str], after: DuePosition | None, *, all_: bool
    ) -> tuple[list[DuePosition], DuePosition | None]:
        """The next roots, or all tasks, and up to where every agent was read if more follow."""
        statement = sql.READ_WAITING if after is None else sql.READ_WAITING_AFTER
        found: list[DuePosition] = []
        ends: list[DuePosition] = []
        for name in agents:
            rows = await self._database.fetch(
                statement, agent=name, limit=_SCANNED, **_after(after)
            )
            found += [_position(row) for row in rows if all_ or row.is_root]
            if len(rows) == _SCANNED:
                ends.append(_position(rows[-1]))
        end = min(ends, default=None)
        return sorted(at for at in found if end is None or at <= end), end

    async def trees(self, roots: Sequence[TaskId], *, limit: int) -> list[TreeNode]:
        """Each task with the calls it waits for, their tasks, and so on.

        Level by level, and the calls of a task in their order.
        """
        if not roots:
            return []
        rows = await self._database.fetch(
            sql.READ_TREES,
            ids=list(roots),
            prefix=self._database.options.names.prefix,
            max_depth=_MAX_DEPTH,
            limit=limit,
        )
        in_order = sorted(rows, key=lambda row: (row.depth, row.parent_id or "", row.seq))
        return [self._node(row) for row in in_order]

    def _node(self, row: Row[Any]) -> TreeNode:
        return TreeNode(
            parent_id=None if row.parent_id is None else TaskId(row.parent_id),
            task_id=TaskId(row.task_id),
            call_id=row.call_id,
            peer=row.peer,
            since=None if row.since is None else instant(row.since),
            deadline=_limit(row.deadline),
            depth=row.depth,
            task=None if row.agent_name is None else self._tree_task(row),
        )

    def _tree_task(self, row: Row[Any]) -> TreeTask:
        state = TaskState(row.status)
        is_waiting = state is TaskState.WAITING
        deadlines = [row.task_deadline, row.join_deadline if is_waiting else None]
        return TreeTask(
            agent=self._database.options.names.plain(row.agent_name),
            state=state,
            completed=(row.completed_count or 0) if is_waiting else 0,
            expected=(row.total_expected or 0) if is_waiting else 0,
            needed=row.needed if is_waiting else None,
            since=instant(row.checkpointed_at),
            limit=_limit(min((each for each in deadlines if each is not None), default=None)),
            suspended_at=None if row.suspended_at is None else instant(row.suspended_at),
            is_cancelled=bool(row.cancel_requested),
        )

    async def due_tasks(
        self,
        state: TaskState,
        agent: AgentName | None = None,
        *,
        after: DuePosition | None = None,
        limit: int,
    ) -> Page[DueTask]:
        """Tasks in a state, the next due first. Ended ones: the last to be deleted first."""
        first, later = (
            (sql.LIST_ENDED, sql.LIST_ENDED_AFTER)
            if state.is_final
            else (sql.LIST_DUE, sql.LIST_DUE_AFTER)
        )
        rows: list[Row[Any]] = []
        for name in await self._chosen(agent):
            rows += await self._database.fetch(
                first if after is None else later,
                agent=name,
                status=state.value,
                limit=limit + 1,
                **_after(after),
            )
        rows.sort(key=_position, reverse=state.is_final)
        shown = rows[:limit]
        is_last = len(rows) <= limit
        return Page(
            [DueTask(_position(row), self._summary(row, ())) for row in shown],
            None if is_last else _position(shown[-1]),
        )

    async def open_questions(
        self, *, after: QuestionPosition | None = None, limit: int
    ) -> Page[OpenQuestion]:
        """Questions that tasks wait for. A page may be short before the end."""
        place = after or QuestionPosition("", "")
        unanswered = await self._database.fetch(
            sql.READ_UNANSWERED,
            after_task=place.task_id,
            after_question=place.sub_task_id,
            limit=_SCANNED,
        )
        keys = [QuestionPosition(row.logical_task_id, row.sub_task_id) for row in unanswered]
        rows = await self._database.fetch(
            sql.READ_WAITING_FOR,
            pairs=json.dumps(keys),
            prefix=self._database.options.names.prefix,
        )
        found = sorted(map(self._question, rows), key=_question_position)
        end = keys[-1] if len(keys) == _SCANNED else None
        if len(found) > limit:
            end = _question_position(found[limit - 1])
        return Page(found[:limit], end)

    def _question(self, row: Row[Any]) -> OpenQuestion:
        return OpenQuestion(
            TaskId(row.logical_task_id),
            TaskId(row.sub_task_id),
            self._database.options.names.plain(row.agent_name),
            instant(row.created_at),
            _limit(row.timeout_deadline),
        )

    async def sample(self, agent: AgentName) -> list[SampledTasks]:
        """The unended tasks of an agent by state, format and version: `MAX_SAMPLED` per state."""
        name = self._database.options.names.qualified(agent)
        return [
            SampledTasks(state, row.state_format, row.app_version, row.tasks, instant(row.oldest))
            for state in TaskState
            if not state.is_final
            for row in await self._database.fetch(
                sql.SAMPLE_TASKS, agent=name, status=state.value, limit=MAX_SAMPLED
            )
        ]

    async def _chosen(self, agent: AgentName | None) -> list[str]:
        """The qualified names of all agents, or of one."""
        names = self._database.options.names
        return await self._agents() if agent is None else [names.qualified(agent)]

    async def record_action(self, actor: str, action: str, target: str, details: JsonValue) -> str:
        """Record an action that is about to begin, and return its id."""
        action_id = new_id()
        await self._database.transact(
            lambda tx: tx.execute(
                sql.RECORD_ACTION,
                namespace=self._namespace,
                action_id=action_id,
                actor=actor,
                action=action,
                target=target,
                details=self._seal(
                    json.dumps(details, ensure_ascii=False), inventory.ACTION_DETAILS, action_id
                ),
            )
        )
        return action_id

    async def complete_action(self, action_id: str, *, succeeded: bool, result: str) -> None:
        """Record the result of an action, once."""
        await self._database.transact(
            lambda tx: tx.execute(
                sql.COMPLETE_ACTION,
                namespace=self._namespace,
                action_id=action_id,
                succeeded=succeeded,
                result=self._seal(result, inventory.ACTION_RESULT, action_id),
            )
        )

    def _seal(self, text: str, column: inventory.Sealed, action_id: str) -> str | None:
        options = self._database.options
        return options.codec.text(text, column, options.names.prefix, action_id)

    def _action(self, row: Row[Any]) -> OperatorAction:
        codec, place = self._database.options.codec, self._database.options.names.prefix
        try:
            stored = codec.read_text(row.details, inventory.ACTION_DETAILS, place, row.action_id)
            details = json.loads(stored or "null")
        except (KeyMissing, ValueError) as error:
            details = {"problem": str(error)}
        return OperatorAction(
            id=row.action_id,
            actor=row.actor,
            action=row.action,
            target=row.target,
            details=details,
            started_at=instant(row.started_at),
            ended_at=None if row.ended_at is None else instant(row.ended_at),
            succeeded=None if row.succeeded is None else bool(row.succeeded),
            result=codec.show_text(row.result, inventory.ACTION_RESULT, place, row.action_id),
        )

    async def actions(
        self, *, target: str | None = None, before: str | None = None, limit: int
    ) -> Page[OperatorAction]:
        """Actions, newest first. With `before`, an action's id, only older ones."""
        on_target = {} if target is None else {"target": target}
        rows = await self._database.fetch(
            sql.LIST_ACTIONS if target is None else sql.LIST_ACTIONS_ON,
            namespace=self._namespace,
            before=before or _LAST,
            limit=limit + 1,
            **on_target,
        )
        shown = [self._action(row) for row in rows[:limit]]
        is_last = len(rows) <= limit
        return Page(shown, None if is_last else (shown[-1].id, ""))

    async def action(self, action_id: str) -> OperatorAction | None:
        """One action, or `None` if it does not exist."""
        rows = await self._database.fetch(
            sql.SHOW_ACTION, namespace=self._namespace, action_id=action_id, limit=1
        )
        return self._action(rows[0]) if rows else None

    @property
    def _namespace(self) -> str:
        return self._database.options.names.namespace


def _after(position: DuePosition | None) -> dict[str, Any]:
    return {} if position is None else {"after_at": position.at, "after_id": position.task_id}


def _position(row: Row[Any]) -> DuePosition:
    return DuePosition(row.wake_at, row.logical_task_id)


def _question_position(question: OpenQuestion) -> QuestionPosition:
    return QuestionPosition(question.task_id, question.sub_task_id)


def _limit(seconds: float | None) -> datetime | None:
    at = None if seconds is None else instant(seconds)
    return None if at is None or at >= NO_DEADLINE else at
