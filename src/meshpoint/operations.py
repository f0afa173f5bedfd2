"""Inspect and resume the operations of a mesh from outside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Self

from meshpoint.errors import ConfigurationError, OperationNotFound
from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.encryption_keys import read_keys, to_ring
from meshpoint.model.ids import TaskId
from meshpoint.model.memory import SnapshotInfo
from meshpoint.model.messages import validate_agent_name
from meshpoint.model.operations import OperationStatus, OperationSummary, Revived
from meshpoint.model.outcomes import Outcome
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.model.tasks import EVERY_TASK, ListPosition, TaskFilter, TaskState, TaskSummary
from meshpoint.model.timeline import TimelineOptions
from meshpoint.model.transitions import SuspendResult
from meshpoint.ports.agent import ResumeFrom
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.settings import StoreSettings
from meshpoint.subtasks.resuming import parse_operation_id, resume_operation
from meshpoint.wiring import make_store

_POLL_INTERVAL = 0.2  # seconds
_BATCH = 100  # tasks per transaction
_PAGE = 1000  # tasks per read
_MAX_PASSES = 20  # a listing ends even if tasks pause faster than it reads them
_MAX_SEEN = 100_000
"""Tasks whose ids a listing remembers of each pass, to yield them once."""
_MAX_COMMIT_TIME = timedelta(seconds=2)
"""A listing may miss a pause that takes longer to commit, because it appears below later ones."""


class Operations:
    """The operations in one database.

        async with Operations("postgresql://mesh@db/mesh", namespace="demo") as operations:
            for failed in await operations.find(statuses=["failed"]):
                await operations.resume(failed.id)

    Args:
        db_url: The `session_db_url` of the agents.
        namespace: The namespace of their mesh.
        encryption_keys: Their `encryption_keys`, of which the first encrypts.
        encryption_tenant: Their `encryption_tenant`.

    Raises:
        ConfigurationError: The URL is invalid, or the database schema is not up to date.
        StoreUnavailable: The database does not answer.
    """

    def __init__(
        self,
        db_url: str,
        *,
        namespace: str = "meshpoint",
        encryption_keys: Sequence[str] = (),
        encryption_tenant: str | None = None,
    ) -> None:
        ring = to_ring(read_keys(list(encryption_keys), "encryption_keys"), encryption_tenant)
        self._store = _make_store(StoreSettings.at(db_url, key="db_url", keys=ring), namespace)

    @classmethod
    def at(cls, store: StoreSettings, namespace: str) -> Self:
        """The operations in the database of these settings."""
        return cls._on(_make_store(store, namespace))

    @classmethod
    def _on(cls, store: CheckpointStore) -> Self:
        """The operations in a store that another object opens and closes."""
        operations = cls.__new__(cls)
        operations._store = store
        return operations

    async def __aenter__(self) -> Self:
        try:
            await self._store.open()
        except BaseException:
            await self._store.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._store.close()

    async def get(self, id_: str) -> OperationSummary:
        """Return the operation with this id.

        Raises:
            ConfigurationError: `id_` is not a valid id.
            OperationNotFound: No operation has this id.
        """
        found = await self._store.operation(parse_operation_id(id_))
        if found is None:
            raise OperationNotFound(id_, f"there is no operation {id_}")
        return found

    async def find(
        self, *, agent: str | None = None, statuses: Sequence[str] = (), limit: int = 100
    ) -> list[OperationSummary]:
        """Return operations, newest first. Without `statuses`, operations of any status."""
        name = None if agent is None else validate_agent_name(agent)
        return await self._store.operations(
            agent=name, statuses=[OperationStatus(status) for status in statuses], limit=limit
        )

    async def resume(self, id_: str, *, resume_from: ResumeFrom | None = None) -> Revived:
        """Make a failed or cancelled operation resume, in any replica of its agent.

        `resume_from` is "start", where recorded subtasks are skipped, or "last-pause", where steps
        and results are reused and calls without a result are made again under new ids. By default
        the agent chooses.

        Returns when it is ready to be acquired, without waiting for its end: use `wait` for that.

        Raises:
            ConfigurationError: `id_` is not a valid id.
            ResumeRefused: The operation cannot be resumed; the subclass gives the reason.
        """
        task_id = parse_operation_id(id_)
        return await resume_operation(self._store, task_id, resume_from=resume_from)

    async def parked(
        self, *, agent: str | None = None, reason: str = ""
    ) -> AsyncGenerator[list[TaskSummary], None]:
        """Yield all parked tasks whose reason contains `reason`, newest first, in batches."""
        async with aclosing(self._pages(agent, [TaskState.PARKED])) as pages:
            async for page in pages:
                yield [task for task in page if reason in (task.parked_reason or "")]

    async def suspended(
        self, *, agent: str | None = None
    ) -> AsyncGenerator[list[TaskSummary], None]:
        """Yield all suspended tasks, newest first, in batches."""
        async with aclosing(self._pages(agent, where=TaskFilter(suspended=True))) as pages:
            async for page in pages:
                yield page

    async def suspendable(
        self, *, agent: str | None = None, states: Sequence[str] = ()
    ) -> AsyncGenerator[list[TaskSummary], None]:
        """Yield all tasks that can be suspended and are not, newest first, in batches.

        `states`: only tasks in these states, which are among running, waiting and ready.

        Raises:
            ConfigurationError: No task in a state among `states` can be suspended.
        """
        suspendable = [state for state in TaskState if state.can_be_suspended]
        for state in states:
            if state not in suspendable:
                fix = f"use {', '.join(suspendable)}"
                raise ConfigurationError("state", f"{state} tasks cannot be suspended", fix)
        chosen = [TaskState(state) for state in states] or suspendable
        where = TaskFilter(suspended=False)
        async with aclosing(self._pages(agent, chosen, where)) as pages:
            async for page in pages:
                yield page

    async def _pages(
        self,
        agent: str | None,
        states: Sequence[TaskState] = (),
        where: TaskFilter = EVERY_TASK,
    ) -> AsyncGenerator[list[TaskSummary], None]:
        """Yield each matching task once, or twice if it moves and is not among the newest 100,000.

        A task that pauses meanwhile moves to the beginning of the listing. So after several pages,
        the listing begins again with the tasks that have paused since, until one page is enough or
        has nothing new.
        """
        name = None if agent is None else validate_agent_name(agent)
        seen: set[TaskId] = set()
        for _ in range(_MAX_PASSES):
            position: ListPosition | None = None
            since, page_count, room, has_new = where.since, 0, _MAX_SEEN, False
            while page := await self._store.tasks(
                agent=name, states=states, where=where, limit=_PAGE, after=position
            ):
                if not page_count:
                    newest = page[0].checkpointed_at - _MAX_COMMIT_TIME
                    since = newest if since is None else max(since, newest)
                position, page_count = page[-1].position, page_count + 1
                if unseen := [task for task in page if task.task_id not in seen]:
                    seen.update(task.task_id for task in unseen[:room])
                    room, has_new = max(0, room - len(unseen)), True
                    yield unseen
            if page_count <= 1 or not has_new:
                return
            where = replace(where, since=since)

    async def unpark(self, ids: Sequence[str]) -> list[str]:
        """Offer parked tasks to every version again, even if it has tried them.

        Returns the ids of the tasks that were parked.
        """
        return await _apply_in_batches(self._store.unpark, ids)

    async def suspend(self, ids: Sequence[str]) -> list[SuspendResult]:
        """Keep replicas from running tasks, until `unsuspend`. Returns a result for each id.

        A `TaskSuspended` task that is running continues to its next pause. `SuspendRefused` has
        the state of a task that cannot be suspended. Peers' responses are recorded and deadlines
        enforced meanwhile.
        """
        results: list[SuspendResult] = []
        for part in _batches(ids):
            results += await self._store.suspend(part)
        return results

    async def unsuspend(self, ids: Sequence[str]) -> list[str]:
        """Let replicas run tasks again. Returns the ids of the tasks that were suspended."""
        return await _apply_in_batches(self._store.unsuspend, ids)

    async def wait(self, id_: str) -> Outcome:
        """Wait until an operation has ended, and return its outcome.

        Polls the database five times a second.

        Raises:
            OperationNotFound: No operation has this id, or it was deleted meanwhile.
        """
        task_id = parse_operation_id(id_)
        while True:
            row = (await self._store.lookup([task_id])).get(task_id)
            if row is None:
                raise OperationNotFound(id_, f"there is no operation {id_}")
            if row.reply is not None:
                return parse_body(ResponseBody, row.reply.body).outcome()
            await asyncio.sleep(_POLL_INTERVAL)

    async def preserve(self, id_: str, *, preserve: bool = True) -> None:
        """Exempt an operation's checkpoints from deletion, or end the exemption.

        Raises:
            OperationNotFound: No operation has this id.
        """
        if not await self._store.preserve(parse_operation_id(id_), preserve=preserve):
            raise OperationNotFound(id_, f"there is no operation {id_}")

    async def memory(self, id_: str) -> SnapshotInfo | None:
        """Describe the working memory that the database has of an operation.

        Returns `None` without one: it has completed, has no memory, or keeps it only in Redis.

        Raises:
            ConsistencyError: It is damaged.
        """
        from meshpoint.working_memory import packing

        stored = await self._store.l1_snapshot(parse_operation_id(id_))
        if stored is None:
            return None
        label = "the working memory in the database"
        return packing.describe(packing.from_bytes(stored.content, label), label)

    async def checkpoints(self, id_: str) -> list[AgentCheckpoint]:
        """Return the retained checkpoints of an operation, oldest first."""
        return await self._store.history(parse_operation_id(id_))


def _batches(ids: Sequence[str]) -> Iterator[list[TaskId]]:
    for first in range(0, len(ids), _BATCH):
        yield [parse_operation_id(id_) for id_ in ids[first : first + _BATCH]]


async def _apply_in_batches(
    change: Callable[[Sequence[TaskId]], Awaitable[list[bool]]], ids: Sequence[str]
) -> list[str]:
    """Return the ids of the changed tasks."""
    changed: list[str] = []
    for part in _batches(ids):
        results = await change(part)
        changed += [id_ for id_, result in zip(part, results, strict=True) if result]
    return changed


def _make_store(settings: StoreSettings, namespace: str) -> CheckpointStore:
    """The store, which records changes of the tasks that have a timeline."""
    return make_store(settings, namespace, TimelineOptions(known_only=True))
