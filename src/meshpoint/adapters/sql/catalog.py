"""The methods of the SQL store that list and show tasks for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import catalog_statements as sql
from meshpoint.adapters.sql import inventory, statements, timeline_statements
from meshpoint.adapters.sql.codec import Codec
from meshpoint.adapters.sql.database import Database, StoreOptions
from meshpoint.adapters.sql.owning import read_log_in_parts
from meshpoint.adapters.sql.records import usage_from_column
from meshpoint.adapters.sql.rows import (
    epoch_seconds,
    instant,
    is_suspended,
    read_outcome,
    resumable_from_row,
    tried_versions,
    unpack_request,
)
from meshpoint.adapters.sql.timelines import entry_from_row
from meshpoint.errors import KeyMissing, StoreUnavailable
from meshpoint.model.call_attempts import CallAttempt
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.tasks import (
    EVERY_TASK,
    NO_DEADLINE,
    CallState,
    CallSummary,
    ListPosition,
    StoredCall,
    StoredTask,
    TaskFilter,
    TaskState,
    TaskSummary,
    has_log,
)
from meshpoint.model.timeline import TimelineEntry
from meshpoint.model.waits import display_name

_MAX_READS = 5


class SqlCatalog:
    """`meshpoint.ports.task_store.Catalog`, a base class of `SqlStore`."""

    _database: Database

    async def tasks(
        self,
        *,
        agent: AgentName | None = None,
        states: Sequence[TaskState] = (),
        where: TaskFilter = EVERY_TASK,
        limit: int = 100,
        after: ListPosition | None = None,
    ) -> list[TaskSummary]:
        """List tasks, newest first. Without `states`, in every state."""
        parameters = self._parameters(states, where)
        if after is not None:
            parameters |= {"after_at": after.at, "after_id": after.task_id}
        rows = await self._list(agent, parameters, limit)
        waits = await self._read_waits(
            [row.logical_task_id for row in rows if row.status == TaskState.WAITING]
        )
        return [self._summary(row, waits.get(row.logical_task_id, ())) for row in rows]

    async def _list(
        self, agent: AgentName | None, parameters: dict[str, Any], limit: int
    ) -> list[Row[Any]]:
        names = self._database.options.names
        if parameters.keys() & {
            "subject",
            "subjects",
            "user",
            "users",
        }:  # they have their own indexes
            place = (
                {"prefix": names.prefix} if agent is None else {"agent": names.qualified(agent)}
            )
            values = place | parameters
            rows = list(await self._database.fetch(sql.list_tasks(values), **values, limit=limit))
        else:
            agents = await self._agents() if agent is None else [names.qualified(agent)]
            rows = [
                row for each in agents for row in await self._list_agent(each, parameters, limit)
            ]
        rows.sort(key=lambda row: (row.checkpointed_at, row.logical_task_id), reverse=True)
        return rows[:limit]

    async def _list_agent(
        self, agent: str, parameters: dict[str, Any], limit: int
    ) -> Sequence[Row[Any]]:
        """List the tasks of an agent, one state at a time, as the index orders them."""
        states = parameters.get("states", [state.value for state in TaskState])
        conditions = {name: value for name, value in parameters.items() if name != "states"}
        if "waiting_for" in parameters:
            states = [state for state in states if state == TaskState.WAITING]
        if parameters.get("suspended"):
            states = [state for state in states if not TaskState(state).is_final]
        if not states:
            return []
        conditions["agent"] = agent
        statement = sql.list_tasks_of_states(conditions, len(states))
        chosen = {f"status_{number}": state for number, state in enumerate(states)}
        return await self._database.fetch(statement, **conditions, **chosen, limit=limit)

    async def _agents(self) -> list[str]:
        """The qualified names of the agents of this namespace that have tasks."""
        prefix = self._database.options.names.prefix
        rows = await self._database.fetch(sql.READ_AGENTS)
        return [row.name for row in rows if row.name.startswith(prefix)]

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        """One task of this namespace and its calls in call order. `None` if it does not exist."""
        rows = await self._database.fetch(sql.SHOW_TASK, task_id=task_id)
        if not rows or not self._is_in_namespace(rows[0]):
            return None
        calls = [
            (row.seq, await _call_summary(row, self._database.options.codec))
            for row in await self._database.fetch(sql.SHOW_CALLS, task_id=task_id)
        ]
        calls.sort(key=lambda each: (each[1].generation, each[0], each[1].attempt))
        waits = await self._read_waits([task_id])
        summary = self._summary(rows[0], waits.get(task_id, ()), rows[0].token_usage)
        return summary, [call for _, call in calls]

    async def timeline(
        self, task_id: TaskId, *, after: int = 0, limit: int = 1000
    ) -> list[TimelineEntry]:
        """Read the changes of a task of this namespace, oldest first."""
        names = self._database.options.names
        values = {"task_id": task_id, "after": after, "limit": limit}
        rows = await self._database.fetch(
            timeline_statements.READ_TIMELINE, prefix=names.prefix, **values
        )
        return [entry_from_row(row, names) for row in rows]

    async def stored_request(self, task_id: TaskId) -> bytes | None:
        """The encoded request of a task of this namespace. `None` if missing."""
        for row in await self._database.fetch(sql.READ_REQUEST, task_id=task_id):
            if self._is_in_namespace(row):
                return await self._database.options.codec.unpack(
                    row.request, inventory.REQUEST, row.agent_name, task_id
                )
        return None

    async def stored_task(self, task_id: TaskId) -> StoredTask | None:
        """A task that has not ended, with its calls and its log. Takes no locks.

        Reads the row again at the end. If it has changed, the parts may be inconsistent, so all
        of them are read again.

        Raises:
            StoreUnavailable: The task changed during every read.
            ValueError: A value in its row is damaged.
        """
        row = await self._read_stored(task_id)
        for _ in range(_MAX_READS):
            if row is None:
                return None
            parameters = {"task_id": task_id, "generation": row.generation}
            calls = await self._database.fetch(sql.READ_CALLS, **parameters)
            has_entries = row.log_seq and (not row.generation or has_log(row.state_format))
            log = await read_log_in_parts(self._database, row) if has_entries else ()
            again = await self._read_stored(task_id)
            if again is not None and _version(again) == _version(row):
                return await _stored_task(row, calls, log, self._database.options)
            row = again
        raise StoreUnavailable(f"task {task_id} changes faster than it can be read")

    async def _read_stored(self, task_id: TaskId) -> Row[Any] | None:
        for row in await self._database.fetch(statements.READ_TASKS, ids=[task_id]):
            if self._is_in_namespace(row) and not TaskState(row.status).is_final:
                return row
        return None

    def _is_in_namespace(self, row: Row[Any]) -> bool:
        return bool(row.agent_name.startswith(self._database.options.names.prefix))

    async def _read_waits(self, ids: Sequence[str]) -> dict[str, list[str]]:
        """The peers that have not answered yet, by task."""
        waits: dict[str, list[str]] = {}
        for row in await self._database.fetch(sql.READ_WAITS, ids=list(ids)) if ids else ():
            waits.setdefault(row.logical_task_id, []).append(display_name(row.peer_agent))
        return waits

    def _parameters(self, states: Sequence[TaskState], where: TaskFilter) -> dict[str, Any]:
        codec, prefix = self._database.options.codec, self._database.options.names.prefix
        parameters = {
            "states": [state.value for state in states] or None,
            "requester": where.requester,
            "since": epoch_seconds(where.since),
            "until": epoch_seconds(where.until),
            "waiting_for": where.waiting_for,
            "suspended": where.suspended,
        }
        if where.subject is not None:
            subjects = codec.variants(where.subject, inventory.SUBJECT, prefix)
            parameters |= _one_or_many("subject", subjects)
        if where.user is not None:
            parameters |= _one_or_many("user", codec.digests(where.user, inventory.USER))
        return {name: value for name, value in parameters.items() if value is not None}

    def _summary(
        self, row: Row[Any], waiting_for: Sequence[str], usage: str | None = None
    ) -> TaskSummary:
        has_ended, names = row.ended_at is not None, self._database.options.names
        codec, agent = self._database.options.codec, row.agent_name
        usage = codec.show_text(usage, inventory.TOKEN_USAGE, agent, row.logical_task_id)
        return TaskSummary(
            task_id=TaskId(row.logical_task_id),
            agent=names.plain(agent),
            state=TaskState(row.status),
            generation=row.generation,
            fence=row.fence,
            attempt=row.attempt,
            owner=None if row.owner is None else ReplicaId(row.owner),
            completed=0 if has_ended else row.completed_count or 0,
            expected=0 if has_ended else row.total_expected or 0,
            checkpointed_at=instant(row.checkpointed_at),
            wake_at=instant(row.wake_at),
            dead_reason=codec.show_text(row.dead_reason, inventory.REASON, agent),
            rescues=row.rescues,
            subject=codec.show_text(row.subject, inventory.SUBJECT, names.prefix),
            requester=row.requester_app_id,
            parent_task_id=row.parent_task_id,
            user_id=row.user_id,
            session_id=row.effective_session_id,
            deadline=None if row.task_deadline is None else instant(row.task_deadline),
            ended_at=None if row.ended_at is None else instant(row.ended_at),
            retry_count=row.retry_count,
            waiting_for=tuple(sorted(waiting_for)),
            state_format=row.state_format,
            app_version=row.app_version,
            incompatible_since=None
            if row.incompatible_since is None
            else instant(row.incompatible_since),
            join_deadline=None
            if has_ended or row.join_deadline is None
            else instant(row.join_deadline),
            usage=usage_from_column(usage),
            parked_reason=codec.show_text(row.parked_reason, inventory.PARKED_REASON, agent),
            tried_versions=tried_versions(row.tried_versions),
            suspended_at=instant(row.suspended_at) if is_suspended(row) else None,
            position=ListPosition(row.checkpointed_at, row.logical_task_id),
            needed=None if has_ended else row.needed,
        )


def _one_or_many(name: str, values: list[str]) -> dict[str, Any]:
    """The parameter for a condition: with one value, it is found in the order of the index."""
    return {name: values[0]} if len(values) == 1 else {f"{name}s": values}


def _version(row: Row[Any]) -> tuple[Any, ...]:
    """Columns that change with a task's owner, its calls or its log."""
    return row.run_id, row.fence, row.generation, row.log_seq


async def _stored_task(
    row: Row[Any],
    calls: Sequence[Row[Any]],
    log: Sequence[bytes] | None,
    options: StoreOptions,
) -> StoredTask:
    stored_calls = [
        StoredCall(
            call.call_id,
            AgentName(call.peer_agent),
            await unpack_request(call, options.codec),
            None if call.status == CallState.PENDING else await read_outcome(call, options.codec),
        )
        for call in calls
    ]
    resumable = await resumable_from_row(
        row, (), log, options.names, options.codec, options.max_join_bytes
    )
    return StoredTask(resumable, TaskState(row.status), tuple(stored_calls), row.app_version)


async def _call_summary(row: Row[Any], codec: Codec) -> CallSummary:
    outcome, sealed = None, None
    try:
        outcome = None if row.outcome is None else await read_outcome(row, codec)
    except KeyMissing as error:
        sealed = f"({error})"
    absolute_deadline = instant(row.absolute_deadline)
    attempt = CallAttempt.decode(row.retry)
    is_later = attempt is not None and attempt.number > 1
    dispatched_at, sends = row.dispatched_at, row.send_attempts
    if row.send_attempts > 0 and not is_later:
        sends = max(sends, row.join_send_attempts or 0)
        if dispatched_at is None and (row.status != CallState.PENDING or row.send_due_at is None):
            dispatched_at = row.join_dispatched_at
    is_unsent = row.status == CallState.PENDING and sends == 0 and row.send_due_at is not None
    return CallSummary(
        sub_task_id=TaskId(row.sub_task_id),
        call_id=row.call_id,
        peer=AgentName(row.peer_agent),
        generation=row.generation,
        state=CallState(row.status),
        outcome=None
        if outcome is None
        else "ok"
        if isinstance(outcome, Ok)
        else outcome.kind.value,
        dispatched_at=None if dispatched_at is None else instant(dispatched_at),
        deadline=instant(row.timeout_deadline),
        message=outcome.message if isinstance(outcome, Failed) else sealed,
        since=instant(row.created_at),
        sends=sends,
        absolute_deadline=absolute_deadline if absolute_deadline < NO_DEADLINE else None,
        attempt=1 if attempt is None else attempt.number,
        max_attempts=None if attempt is None else attempt.policy.max_attempts,
        is_superseded=bool(row.is_superseded),
        due_at=instant(row.send_due_at) if is_unsent else None,
    )
