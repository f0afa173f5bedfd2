"""One mesh of the crash matrix: a replica is killed at one step, another finishes, and the peer
and the client, which the test plays, check the result.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from itertools import combinations

from pydantic import JsonValue

from meshpoint.client import Reply
from meshpoint.model.bodies import ResponseBody, parse
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import dead_letters_of
from meshpoint.model.outcomes import Failed, Outcome
from meshpoint.subtasks.resuming import resume_operation

from .kit import EndedBefore, Mesh, Process, count_rows

CHIEF, VICTIM = "chief", "root"
"""The client calls `chief`, which calls `root`, which calls the peer that the test plays.

Only replicas of `root` are killed. `chief` has a replica of its own that survives and sends each
message once, so it cannot hide a message that `root` loses.
"""
_QUICK: Mapping[str, JsonValue] = {
    "lease_seconds": 2,
    "renew_interval_seconds": 0.25,
    "sweep_interval_seconds": 0.2,
    "settle_time_seconds": 0.3,
    "dispatch_lease_seconds": 2,
    "drain_timeout_seconds": 0.2,
    "db_pool_size": 1,
}
_UNHARMED: Mapping[str, JsonValue] = {**_QUICK, "lease_seconds": 60}


class Stage:
    """A mesh in which one replica dies at one event.

    A scenario leads there; `finish` checks the result.
    """

    def __init__(self, mesh: Mesh, at: str, skip: int) -> None:
        self.mesh = mesh
        self.doomed: Process | None = None
        self.expected: JsonValue = None
        self.all_purged = False
        self.silent: set[TaskId] = set()
        self._at, self._skip = at, skip
        self._gate = mesh.rung.folder / f"{new_id()}.gate"
        self._mended = mesh.rung.folder / f"{new_id()}.mended"
        self._asked_as: defaultdict[tuple[JsonValue, str], set[TaskId]] = defaultdict(set)
        self._turns = 0
        self._resumes = 0
        self._playing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the peer and the client, and declare every queue."""
        self.peer, self.client = await self.mesh.peer(), await self.mesh.client()
        for agent in (CHIEF, VICTIM):
            await self.peer.broker.declare(AgentName(agent))
        self.configure()
        self._playing = asyncio.create_task(self._play())

    def configure(self, **options: JsonValue) -> None:
        """Set the options of replicas started from now on."""
        self._config = self.mesh.rung.config(VICTIM, **{**_QUICK, **options})

    async def replica(self, *arguments: str) -> Process:
        """Start a replica; with `--at`, it dies at that event of the victim."""
        return await self.mesh.replica(self._config, *arguments, started=0)

    async def doom(self) -> Process:
        """Start the replica that dies at the event under test."""
        self.doomed = await self.replica("--at", self._at, "--skip", str(self._skip))
        return self.doomed

    async def kill_one_at(self, at: str, skip: int = 0) -> None:
        """Start a replica that dies at `at`, and wait for its death."""
        await (await self.replica("--at", at, "--skip", str(skip))).ended()

    async def terminate_while_it_runs(self, replica: Process | None) -> None:
        """Send SIGTERM to a replica in the middle of a segment."""
        assert replica is not None
        await replica.wait("segment:before")
        replica.signal(signal.SIGTERM)

    async def ask(
        self,
        *numbers: int,
        agent: str = CHIEF,
        rounds: int = 1,
        gated: bool = False,
        broken: bool = False,
        **work: JsonValue,
    ) -> None:
        """Send the request; the peer ignores negative numbers, `broken` work fails at its end."""
        self._task_id, self._agent = TaskId(new_id()), agent
        self.expected = [number * 10 for number in numbers]
        self._rounds = rounds
        asked: dict[str, JsonValue] = {"numbers": [*numbers], "rounds": rounds, **work}
        if gated:
            asked["gate"] = str(self._gate)
        if broken:
            asked["mended_by"], self.expected = str(self._mended), "error"
        reply = await self.client.send(agent, asked, task_id=self._task_id)
        self._outcome: Awaitable[Outcome] = asyncio.ensure_future(_outcome_of(reply))
        if agent == CHIEF:
            self._chief = await self.mesh.replica(self.mesh.rung.config(CHIEF, **_UNHARMED), started=0)

    def open_gate(self) -> None:
        """Let gated code continue."""
        self._gate.touch()

    async def cancel(self) -> None:
        """Cancel the task once it waits for the peer."""
        assert self.doomed is not None
        self.expected = "cancelled"
        await self.doomed.wait("ack:after")
        await self.client.cancel(self._agent, self._task_id)

    async def resume(self) -> None:
        """Wait for the failure, mend the work and resume `chief`; await its second end."""
        assert isinstance(await self._outcome, Failed)
        ends = len(await self._chief.wait("end:after"))
        self._mended.touch()
        store = self.mesh.store()
        await store.open()
        try:
            await resume_operation(store, self._task_id)
            self._resumes += 1
        finally:
            await store.close()
        self._outcome = asyncio.ensure_future(self._recorded_outcome(ends + 1))

    async def _recorded_outcome(self, ends: int) -> Outcome:
        """The resumed operation's outcome, from the database: a resume sends the client no reply."""
        await self._chief.wait("end:after", ends)
        store = self.mesh.store()
        await store.open()
        try:
            known = (await store.lookup([self._task_id]))[self._task_id]
        finally:
            await store.close()
        assert known.reply is not None
        return parse(ResponseBody, known.reply.body).outcome()

    async def _play(self) -> None:
        while True:
            asked = await self.peer.requests.get()
            parent = str(asked.delivery.message.headers["x-parent-task-id"])
            self._asked_as[asked.input, parent].add(asked.sub_task_id)
            number = int(str(asked.input))
            if number < 0:
                self.silent.add(asked.sub_task_id)
                await asked.delivery.ack()
            else:
                await self._in_turn()
                await asked.answer(number * 10)

    async def _in_turn(self) -> None:
        """Wait until the doomed replica has acked all earlier deliveries or is dead.

        This gives its steps one order.
        """
        self._turns += 1
        if self.doomed is not None:
            with suppress(EndedBefore):
                await self.doomed.wait("ack:after", self._turns)

    async def finish(self) -> None:
        """Let another replica finish; check for one outcome, one set of calls, and no leftovers."""
        await self._death()
        self.open_gate()
        survivor = await self.replica()
        outcome = await self._outcome
        came = outcome.kind.value if isinstance(outcome, Failed) else outcome.value
        assert came == self.expected, f"{outcome} instead of {self.expected}"
        await self._at_rest(survivor)
        # The same reply may arrive again; a reply not yet recorded as sent is sent after a resume
        # too, and then its content may differ.
        assert self.client.conflicts <= self._resumes, "a second reply had other content"
        for question, ids in self._asked_as.items():
            assert len(ids) == self._rounds, f"a second set of calls: {question} was sent as {ids}"
        assert not survivor.of("dead_task")
        self._nothing_saved_ran_again()
        for agent in (CHIEF, VICTIM, self.peer.name):
            assert await self.peer.broker.depth(dead_letters_of(AgentName(agent))) == 0, f"dead letters at {agent}"

    def _nothing_saved_ran_again(self) -> None:
        for earlier, later in combinations(self.mesh.processes, 2):
            again = _subtasks(earlier, "save:after") & _subtasks(later, "subtask:before")
            assert not again, f"saved subtasks ran again: {again}"

    async def _death(self) -> None:
        assert self.doomed is not None
        try:
            code = await self.doomed.ended()
        except TimeoutError:
            told = [f"{event['agent']} {event['step']}:{event['phase']}" for event in self.doomed.events]
            raise AssertionError(f"no replica died at {self._at}; its last events: {told[-20:]}") from None
        assert code == -signal.SIGKILL

    async def _at_rest(self, survivor: Process) -> None:
        """Return once no task is open and every unanswered call was cancelled at the peer."""
        store = self.mesh.store()
        await store.open()
        try:
            while (left := await count_rows(store))["open"] or left["calls"] or (self.all_purged and left["tasks"]):
                looks = len(survivor.of("sweep:after", durable=True))
                await survivor.wait("sweep:after", looks + 1, durable=True)
        finally:
            await store.close()
        while self.silent:
            cancel = await self.peer.cancels.get()
            self.silent.discard(TaskId(cancel.message.correlation_id))

    async def close(self) -> None:
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)
        await self.mesh.close()


async def _outcome_of(reply: asyncio.Future[Reply]) -> Outcome:
    return (await reply).outcome


def _subtasks(process: Process, at: str) -> set[tuple[str, str]]:
    """Pairs of task and subtask in a process's events at `step:phase`."""
    told = [event for event in process.of(at) if "subtask" in event["detail"]]
    return {(task_id, event["detail"]["subtask"]) for event in told for task_id in event["task_ids"]}
