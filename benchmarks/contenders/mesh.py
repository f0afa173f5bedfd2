"""Meshpoint's SQL store behind its port, called as the worker calls it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from benchmarks.contenders import job
from benchmarks.contenders.job import Job, at_a_time
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.calls import ALL
from meshpoint.model.checkpoint import (
    AllArrived,
    Arrival,
    Claim,
    Committed,
    End,
    Ended,
    Pause,
    PlannedCall,
    Replica,
    Requester,
    Resumable,
    Run,
    StillWaiting,
    TaskState,
)
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Ok

REPLICA = Replica(ReplicaId("A"), AgentName(job.AGENT), frozenset({job.STATE_FORMAT}), timedelta(seconds=job.LEASE))
_SLOTS = 100_000
_MOST_TOGETHER = 1024
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

    def __init__(self, *, claim_together: bool = True) -> None:
        self._claim_together = claim_together
        self._arrived: deque[Claim] = deque()
        self._some = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[Resumable]] = {}
        self._prefetch = asyncio.Semaphore(_PREFETCH)

    async def open(self, url: str) -> None:
        """Connect, and claim arriving responses until `close`."""
        self._store = SqlStore(
            url,
            namespace=job.NAMESPACE,
            dispatch_lease=timedelta(seconds=job.DISPATCH_LEASE),
            tombstone_ttl=timedelta(seconds=job.TOMBSTONE_TTL),
            confirm_linger=timedelta(seconds=job.DISPATCH_LEASE) / 25,
        )
        await self._store.open()
        self._claimer = asyncio.create_task(self._serve_arrivals())

    async def close(self) -> None:
        """Stop claiming and disconnect."""
        self._claimer.cancel()
        await self._store.close()

    def prepared(self, jobs: Sequence[Job]) -> Sequence[MeshJob]:
        """Convert `jobs` as an agent hands them over."""
        return [mesh_job(each) for each in jobs]

    async def run(self, prepared: Sequence[MeshJob], in_flight: int) -> None:
        """Run all jobs."""
        await at_a_time(in_flight, prepared, self._life)
        await self.marks_written()

    async def _life(self, task: MeshJob) -> None:
        await self.pause(task)
        await self.end(task, await self._answered(task))

    async def pause(self, task: MeshJob) -> None:
        """Checkpoint the task, then mark its requests as sent."""
        [saved] = await self._store.pause([task.pause])
        assert isinstance(saved, Committed), saved
        await self._store.mark_sent(saved.dispatches)

    async def marks_written(self) -> None:
        """Wait for Meshpoint's background writes."""
        await self._store.marks_written()

    async def claim(self, claims: Sequence[Claim]) -> list[Arrival]:
        """Record answers."""
        return await self._store.claim(claims, REPLICA, _SLOTS)

    async def end(self, task: MeshJob, resumed: Resumable) -> None:
        """Turn the task into a tombstone, then mark its reply as sent."""
        await self.mark_replied(await self.bury(task, resumed))

    async def bury(self, task: MeshJob, resumed: Resumable) -> Ended:
        """Turn the task into a tombstone."""
        assert len(resumed.outcomes) == len(task.claims)
        [ended] = await self._store.end([End(resumed.run, TaskState.COMPLETED, task.reply)])
        assert isinstance(ended, Ended), ended
        return ended

    async def mark_replied(self, ended: Ended) -> None:
        """Mark the reply as sent."""
        await self._store.mark_sent([ended.reply])

    async def _answered(self, task: MeshJob) -> Resumable:
        if not self._claim_together:
            return await self._each_alone(task)
        waiting: asyncio.Future[Resumable] = asyncio.get_running_loop().create_future()
        self._waiting[task.pause.run.task_id] = waiting
        self._arrived.extend(task.claims)
        self._some.set()
        return await waiting

    async def _each_alone(self, task: MeshJob) -> Resumable:
        arrivals = await asyncio.gather(*[self._alone(claim) for claim in task.claims])
        [resumed] = [arrival.task for arrival in arrivals if isinstance(arrival, AllArrived)]
        return resumed

    async def _alone(self, claim: Claim) -> Arrival:
        async with self._prefetch:
            return (await self.claim([claim]))[0]

    async def _serve_arrivals(self) -> None:
        """Claim responses that arrived during the last batch together, as the worker does."""
        try:
            while await self._some.wait():
                batch = [self._arrived.popleft() for _ in range(min(_MOST_TOGETHER, len(self._arrived)))]
                if not self._arrived:
                    self._some.clear()
                for arrival in await self.claim(batch):
                    assert isinstance(arrival, AllArrived | StillWaiting), arrival
                    if isinstance(arrival, AllArrived):
                        self._waiting.pop(arrival.task_id).set_result(arrival.task)
        except Exception as error:
            for waiting in self._waiting.values():
                waiting.set_exception(error)


def mesh_job(each: Job) -> MeshJob:
    """Convert a job to values of the store's port."""
    task_id, agent = TaskId(each.task_id), AgentName(job.AGENT)
    return MeshJob(
        pause=Pause(
            run=Run(task_id, agent, RunId(each.run_id)),
            context=each.context,
            state=each.state,
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
                for call in each.calls
            ),
            join=ALL,
            requester=Requester(Address(job.REPLY_TO), job.REQUESTER, each.parent_task_id),
            request=each.request,
            app_version=job.APP_VERSION,
        ),
        claims=tuple(
            Claim(RunId(call.claim_id), task_id, TaskId(call.sub_task_id), Ok(each.answer), job.PEER)
            for call in each.calls
        ),
        reply=each.reply,
    )
