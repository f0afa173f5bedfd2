"""Operations of a mesh, from outside of it: look at them, resume them, keep their checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from meshpoint.errors import OperationNotFound
from meshpoint.model.bodies import ResponseBody, parse
from meshpoint.model.ids import agent_name
from meshpoint.model.operations import OperationStatus, OperationSummary, Revived
from meshpoint.model.outcomes import Outcome
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.settings import AgentSettings
from meshpoint.subtasks.resuming import parse_operation_id, resume_operation
from meshpoint.wiring import make_store

_POLL_INTERVAL = 0.2  # seconds


class Operations:
    """The operations in one database.

        async with Operations("postgresql://mesh@db/mesh", namespace="demo") as operations:
            for failed in await operations.find(statuses=["failed"]):
                await operations.resume(failed.id)

    Args:
        db_url: the `session_db_url` of the agents.
        namespace: that of their mesh.

    Raises:
        ConfigurationError: the URL is none, or the database is not migrated.
        StoreUnavailable: the database does not answer.
    """

    def __init__(self, db_url: str, *, namespace: str = "meshpoint") -> None:
        settings = AgentSettings(name="operations", entrypoint="m:a", session_service="sql", session_db_url=db_url)
        self._store = make_store(settings, namespace)

    async def __aenter__(self) -> Self:
        try:
            await self._store.open()
        except BaseException:
            await self._store.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._store.close()

    async def get(self, id_: str) -> OperationSummary:
        """One operation.

        Raises:
            ConfigurationError: no operation can have this id.
            OperationNotFound: there is none.
        """
        found = await self._store.operation(parse_operation_id(id_))
        if found is None:
            raise OperationNotFound(id_, f"there is no operation {id_}")
        return found

    async def find(
        self, *, agent: str | None = None, statuses: Sequence[str] = (), limit: int = 100
    ) -> list[OperationSummary]:
        """Operations, newest first; without `statuses`, all."""
        name = None if agent is None else agent_name(agent)
        return await self._store.operations(
            agent=name, statuses=[OperationStatus(status) for status in statuses], limit=limit
        )

    async def resume(self, id_: str) -> Revived:
        """Let a failed or cancelled operation go on from its checkpoint, in any replica; see `resume`.

        Raises:
            ConfigurationError: no operation can have this id.
            ResumeRefused: one of its five classes says why not.
        """
        return await resume_operation(self._store, parse_operation_id(id_))

    async def wait(self, id_: str) -> Outcome:
        """How an operation ended; waits for it, with a look at the database five times a second.

        Raises:
            OperationNotFound: there is none, or it is gone.
        """
        task_id = parse_operation_id(id_)
        while True:
            row = (await self._store.lookup([task_id])).get(task_id)
            if row is None:
                raise OperationNotFound(id_, f"there is no operation {id_}")
            if row.reply is not None:
                return parse(ResponseBody, row.reply.body).outcome()
            await asyncio.sleep(_POLL_INTERVAL)

    async def preserve(self, id_: str, *, preserve: bool = True) -> None:
        """Exempt an operation's checkpoints from every deletion, or stop that.

        Raises:
            OperationNotFound: there is no such operation.
        """
        if not await self._store.preserve(parse_operation_id(id_), preserve=preserve):
            raise OperationNotFound(id_, f"there is no operation {id_}")

    async def checkpoints(self, id_: str) -> list[AgentCheckpoint]:
        """What is kept of an operation's checkpoints, oldest first."""
        return await self._store.history(parse_operation_id(id_))
