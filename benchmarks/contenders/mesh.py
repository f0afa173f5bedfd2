"""Meshpoint's SQL store behind its port, called as the worker calls it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from benchmarks.contenders import job
from benchmarks.contenders.job import Job, run_concurrently
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.calls import ALL
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import PlannedCall, Replica, Requester, Resumable, Run, TaskState
from meshpoint.model.timeline import TimelineOptions
from meshpoint.model.transitions import (
    Claim,
    ClaimResult,
    End,
    EndCommitted,
    JoinCompleted,
    Pause,
    PauseCommitted,
    StillWaiting,
)

REPLICA = Replica(
    ReplicaId("A"),
    AgentName(job.AGENT),
    frozenset({job.STATE_FORMAT}),
    timedelta(seconds=job.LEASE),
)
_SLOTS = 100_000
_MAX_CLAIM_BATCH = 1024
_PREFETCH = 100
"""Concurrent responses when each is claimed alone, as limited by the broker's prefetch."""


@dataclass(frozen=True, slots=True)
class MeshJob:
    """A job as values of the store's port."""

    pause: Pause
    claims: tuple[Claim, ...]
    reply: bytes


class Mesh:
    """Pauses and marks each task separately; claims waiting responses in batches or one by one."""

    def __init__(self, *, claim_together: bool = True, timeline: bool = False) -> None:
        self._claim_together = claim_together
        self._timeline = TimelineOptions(REPLICA.id) if timeline else None
        self._arrived_claims: deque[Claim] = deque()
        self._responses_available = asyncio.Event()
        self._resume_futures: dict[str, asyncio.Future[Resumable]] = {}
        self._prefetch = asyncio.Semaphore(_PREFETCH)

    async def open(self, url: str) -> None:
        """Connect, and claim arriving responses until `close`."""
        self._store = SqlStore(
            url,
            namespace=job.NAMESPACE,
            dispatch_lease=timedelta(seconds=job.DISPATCH_LEASE),
            tombstone_ttl=timedelta(seconds=job.TOMBSTONE_TTL),
            confirm_linger=timedelta(seconds=job.DISPATCH_LEASE) / 25,
            timeline=self._timeline,
        )
        await self._store.open()
        self._claim_task = asyncio.create_task(self._serve_arrivals())

    async def close(self) -> None:
        """Stop claiming and disconnect."""
        self._claim_task.cancel()
        await self._store.close()

    def prepared(self, jobs: Sequence[Job]) -> Sequence[MeshJob]:
        """Convert `jobs` as an agent hands them over."""
        return [mesh_job(job_) for job_ in jobs]

    async def run(self, prepared: Sequence[MeshJob], in_flight: int) -> None:
        """Run all jobs."""
        await run_concurrently(in_flight, prepared, self._run_job)
        await self.wait_for_background_writes()

    async def _run_job(self, task: MeshJob) -> None:
        await self.pause(task)
        await self.end(task, await self._answer_all(task))

    async def pause(self, task: MeshJob) -> None:
        """Checkpoint the task, then mark its requests as sent."""
        [committed] = await self._store.pause([task.pause])
        assert isinstance(committed, PauseCommitted), committed
        await self._store.confirm_sent(committed.dispatches)

    async def wait_for_background_writes(self) -> None:
        """Wait for Meshpoint's background writes."""
        await self._store.flush_confirms()

    async def claim(self, claims: Sequence[Claim]) -> list[ClaimResult]:
        """Record answers."""
        return await self._store.claim(claims, REPLICA, _SLOTS)

    async def end(self, task: MeshJob, resumed: Resumable) -> None:
        """Turn the task into a tombstone, then mark its reply as sent."""
        await self.mark_replied(await self.commit_end(task, resumed))

    async def commit_end(self, task: MeshJob, resumed: Resumable) -> EndCommitted:
        """Turn the task into a tombstone."""
        assert len(resumed.outcomes) == len(task.claims)
        [ended] = await self._store.end([End(resumed.run, TaskState.COMPLETED, task.reply)])
        assert isinstance(ended, EndCommitted), ended
        return ended

    async def mark_replied(self, ended: EndCommitted) -> None:
        """Mark the reply as sent."""
        await self._store.confirm_sent([ended.reply])

    async def _answer_all(self, task: MeshJob) -> Resumable:
        if not self._claim_together:
            return await self._answer_one_by_one(task)
        waiting: asyncio.Future[Resumable] = asyncio.get_running_loop().create_future()
        self._resume_futures[task.pause.run.task_id] = waiting
        self._arrived_claims.extend(task.claims)
        self._responses_available.set()
        return await waiting

    async def _answer_one_by_one(self, task: MeshJob) -> Resumable:
        arrivals = await asyncio.gather(*[self._claim_one(claim) for claim in task.claims])
        [resumed] = [arrival.task for arrival in arrivals if isinstance(arrival, JoinCompleted)]
        return resumed

    async def _claim_one(self, claim: Claim) -> ClaimResult:
        async with self._prefetch:
            return (await self.claim([claim]))[0]

    async def _serve_arrivals(self) -> None:
        """Claim responses that arrived during the last batch together, as the worker does."""
        try:
            while await self._responses_available.wait():
                batch = [
                    self._arrived_claims.popleft()
                    for _ in range(min(_MAX_CLAIM_BATCH, len(self._arrived_claims)))
                ]
                if not self._arrived_claims:
                    self._responses_available.clear()
                for arrival in await self.claim(batch):
                    assert isinstance(arrival, JoinCompleted | StillWaiting), arrival
                    if isinstance(arrival, JoinCompleted):
                        self._resume_futures.pop(arrival.task_id).set_result(arrival.task)
        except Exception as error:
            for waiting in self._resume_futures.values():
                waiting.set_exception(error)


def mesh_job(job_: Job) -> MeshJob:
    """Convert a job to values of the store's port."""
    task_id, agent = TaskId(job_.task_id), AgentName(job.AGENT)
    return MeshJob(
        pause=Pause(
            run=Run(task_id, agent, RunId(job_.run_id)),
            context=job_.context,
            state=job_.state,
            state_format=job.STATE_FORMAT,
            calls=tuple(
                PlannedCall(
                    sub_task_id=TaskId(call.sub_task_id),
                    call_id=call.call_id,
                    peer=AgentName(job.PEER),
                    body=call.body,
                    timeout=timedelta(seconds=job.TIMEOUT),
                    headers={"x-call-depth": 2},
                )
                for call in job_.calls
            ),
            join=ALL,
            requester=Requester(Address(job.REPLY_TO), job.REQUESTER, job_.parent_task_id),
            request=job_.request,
            app_version=job.APP_VERSION,
        ),
        claims=tuple(
            Claim(
                RunId(call.claim_id), task_id, TaskId(call.sub_task_id), Ok(job_.answer), job.PEER
            )
            for call in job_.calls
        ),
        reply=job_.reply,
    )
