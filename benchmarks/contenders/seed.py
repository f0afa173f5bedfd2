"""The seed design, which Meshpoint started from.

It uses the synchronous SQLAlchemy ORM with one transaction per step, a JSON array of results that
is rewritten for each answer, and the context as JSON in one column. This is its faster variant:
eight threads, each running one task from pause to resume, so that no two threads wait for the same
row. It does less than the other contenders: no sent marks, no durable end, no tombstone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sqlalchemy import ForeignKey, create_engine, delete, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from benchmarks.contenders import job
from benchmarks.contenders.job import Job


class _Base(DeclarativeBase):
    pass


class PausedTask(_Base):
    """A serialized waiting task."""

    __tablename__ = "agent_paused_tasks"
    logical_task_id: Mapped[str] = mapped_column(primary_key=True)
    agent_name: Mapped[str] = mapped_column(index=True)
    a2a_context: Mapped[str]
    effective_session_id: Mapped[str | None]
    user_id: Mapped[str | None]
    current_invocation_id: Mapped[str | None]
    produced_artifacts: Mapped[str | None]
    artifact_signals_to_return: Mapped[str | None]
    response_buffer: Mapped[str | None]
    flags: Mapped[str | None]
    security_context: Mapped[str | None]
    token_usage: Mapped[str | None]
    checkpointed_at: Mapped[float]


class PeerSubTask(_Base):
    """A pending call, deleted when its peer answers."""

    __tablename__ = "agent_peer_sub_tasks"
    sub_task_id: Mapped[str] = mapped_column(primary_key=True)
    logical_task_id: Mapped[str] = mapped_column(
        ForeignKey(PausedTask.logical_task_id, ondelete="CASCADE"), index=True
    )
    invocation_id: Mapped[str] = mapped_column(index=True)
    correlation_data: Mapped[str]
    timeout_deadline: Mapped[float] = mapped_column(index=True)
    created_at: Mapped[float]


class ParallelInvocation(_Base):
    """The number of answered calls of a task, and all their results."""

    __tablename__ = "agent_parallel_invocations"
    logical_task_id: Mapped[str] = mapped_column(
        ForeignKey(PausedTask.logical_task_id, ondelete="CASCADE"), primary_key=True
    )
    invocation_id: Mapped[str] = mapped_column(primary_key=True)
    total_expected: Mapped[int]
    completed_count: Mapped[int]
    results: Mapped[str]


class SeedDesign:
    """The design of the source document.

    One thread corresponds to its text, where each step blocks the event loop.
    """

    def __init__(self, threads: int = 8) -> None:
        self._parallelism = threads

    async def open(self, url: str) -> None:
        """Connect and create the tables."""
        self._engine = create_engine(
            make_url(url).set(drivername="postgresql+psycopg"), pool_size=self._parallelism
        )
        self._session = sessionmaker(self._engine)
        await asyncio.to_thread(_Base.metadata.create_all, self._engine)
        self._threads = ThreadPoolExecutor(self._parallelism)

    async def close(self) -> None:
        """Disconnect."""
        self._threads.shutdown()
        self._engine.dispose()

    def prepared(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Return `jobs` unchanged."""
        return jobs

    async def run(self, prepared: Sequence[Job], in_flight: int) -> None:
        """Run all jobs, one at a time per thread."""
        remaining = deque(prepared)
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *[
                loop.run_in_executor(self._threads, self._serve, remaining)
                for _ in range(self._parallelism)
            ]
        )

    def _serve(self, remaining: deque[Job]) -> None:
        while True:
            try:
                job_ = remaining.popleft()
            except IndexError:
                return
            self._run_job(job_)

    def _run_job(self, job_: Job) -> None:
        self._checkpoint(job_)
        for call in job_.calls:
            correlation = self._claim(call.sub_task_id)
            assert correlation is not None
            completed, total = self._record(job_, {**correlation, "result": job_.answer})
        assert completed == total
        results = self._restore(job_)
        assert len(results) == len(job_.calls)

    def _checkpoint(self, job_: Job) -> None:
        with self._session.begin() as session:
            session.add(_paused(job_))
            session.flush()  # the calls reference this row
            now = time.time()
            session.add_all(
                PeerSubTask(
                    sub_task_id=call.sub_task_id,
                    logical_task_id=job_.task_id,
                    invocation_id=job_.run_id,
                    correlation_data=json.dumps(
                        {
                            "function_call_id": call.call_id,
                            "peer_tool_name": "search",
                            "peer_agent_name": job.PEER,
                        }
                    ),
                    timeout_deadline=now + job.TIMEOUT,
                    created_at=now,
                )
                for call in job_.calls
            )
            session.add(
                ParallelInvocation(
                    logical_task_id=job_.task_id,
                    invocation_id=job_.run_id,
                    total_expected=len(job_.calls),
                    completed_count=0,
                    results="[]",
                )
            )

    def _claim(self, sub_task_id: str) -> dict[str, Any] | None:
        with self._session.begin() as session:
            row = session.get(PeerSubTask, sub_task_id, with_for_update=True)
            if row is None:
                return None
            correlation: dict[str, Any] = json.loads(row.correlation_data)
            session.delete(row)
            return correlation

    def _record(self, job_: Job, result: dict[str, Any]) -> tuple[int, int]:
        with self._session.begin() as session:
            row = session.get_one(
                ParallelInvocation, (job_.task_id, job_.run_id), with_for_update=True
            )
            row.results = json.dumps([*json.loads(row.results), result])
            row.completed_count += 1
            return row.completed_count, row.total_expected

    def _restore(self, job_: Job) -> list[Any]:
        with self._session() as session:
            row = session.get_one(PausedTask, job_.task_id)
            json.loads(row.a2a_context)
        with self._session() as session:
            invocation = session.get_one(ParallelInvocation, (job_.task_id, job_.run_id))
            results: list[Any] = json.loads(invocation.results)
        with self._session.begin() as session:
            _clean_up(session, job_.task_id)
        return results


def _clean_up(session: Session, task_id: str) -> None:
    for table in (PeerSubTask, ParallelInvocation, PausedTask):
        session.execute(delete(table).where(table.logical_task_id == task_id))


def _paused(job_: Job) -> PausedTask:
    context = {**job_.context, "state": json.loads(job_.state)}
    return PausedTask(
        logical_task_id=job_.task_id,
        agent_name=job.AGENT,
        a2a_context=json.dumps(context),
        effective_session_id="session-7781",
        user_id="user-12",
        current_invocation_id=job_.run_id,
        produced_artifacts="[]",
        artifact_signals_to_return="[]",
        response_buffer="",
        flags="{}",
        security_context=json.dumps(context["security_context"]),
        token_usage=json.dumps(context["token_usage"]),
        checkpointed_at=time.time(),
    )
