"""Tables and transactions of the seed design, as in its source document."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from uuid import uuid4

from sqlalchemy import create_engine, delete, make_url
from sqlalchemy.orm import sessionmaker

from benchmarks.contenders.seed import ParallelInvocation, PausedTask, PeerSubTask
from benchmarks.rivals import job


class SeedStore:
    """Checkpoint, claim, record and restore with the synchronous SQLAlchemy ORM."""

    def __init__(self, db_url: str, threads: int) -> None:
        self._engine = create_engine(
            make_url(db_url).set(drivername="postgresql+psycopg"), pool_size=max(threads, 1)
        )
        self._session = sessionmaker(self._engine)
        PausedTask.metadata.create_all(self._engine)

    def close(self) -> None:
        """Disconnect."""
        self._engine.dispose()

    def checkpoint(self, task_id: str, requester: str, sub_task_ids: Sequence[str]) -> None:
        """Write the task, its calls and the answer count in one transaction."""
        now, invocation = time.time(), str(uuid4())
        with self._session.begin() as session:
            session.add(_paused(task_id, invocation, requester))
            session.flush()  # the calls reference this row
            correlation = json.dumps(
                {"task_id": task_id, "invocation_id": invocation, "peer_agent_name": "peer"}
            )
            session.add_all(
                PeerSubTask(
                    sub_task_id=sub_task_id,
                    logical_task_id=task_id,
                    invocation_id=invocation,
                    correlation_data=correlation,
                    timeout_deadline=now + 600,
                    created_at=now,
                )
                for sub_task_id in sub_task_ids
            )
            session.add(
                ParallelInvocation(
                    logical_task_id=task_id,
                    invocation_id=invocation,
                    total_expected=len(sub_task_ids),
                    completed_count=0,
                    results="[]",
                )
            )

    def record_answer(self, sub_task_id: str, answer: str) -> str | None:
        """Claim a call, then record its answer, in two transactions.

        Returns the task id if this was the task's last answer.
        """
        with self._session.begin() as session:
            row = session.get(PeerSubTask, sub_task_id, with_for_update=True)
            if row is None:
                return None
            correlation = json.loads(row.correlation_data)
            session.delete(row)
        key = correlation["task_id"], correlation["invocation_id"]
        with self._session.begin() as session:
            invocation = session.get_one(ParallelInvocation, key, with_for_update=True)
            invocation.results = json.dumps([*json.loads(invocation.results), answer])
            invocation.completed_count += 1
            return (
                correlation["task_id"]
                if invocation.completed_count == invocation.total_expected
                else None
            )

    def restore(self, task_id: str) -> tuple[str, list[str]]:
        """The requester and all answers of a task, which is then deleted.

        This takes two reads and a transaction.
        """
        with self._session() as session:
            context = json.loads(session.get_one(PausedTask, task_id).a2a_context)
        with self._session() as session:
            rows = session.query(ParallelInvocation).filter_by(logical_task_id=task_id).one()
            answers: list[str] = json.loads(rows.results)
        with self._session.begin() as session:
            for table in (PeerSubTask, ParallelInvocation, PausedTask):
                session.execute(delete(table).where(table.logical_task_id == task_id))
        return context["requester"], answers


def _paused(task_id: str, invocation: str, requester: str) -> PausedTask:
    return PausedTask(
        logical_task_id=task_id,
        agent_name="root",
        a2a_context=json.dumps({"requester": requester, "history": job.history()}),
        effective_session_id="session-1",
        user_id="user-1",
        current_invocation_id=invocation,
        produced_artifacts="[]",
        artifact_signals_to_return="[]",
        response_buffer="",
        flags="{}",
        security_context="{}",
        token_usage="{}",
        checkpointed_at=time.time(),
    )
