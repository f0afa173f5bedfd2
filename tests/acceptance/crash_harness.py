"""One mesh of the crash matrix: a replica is killed at one step, another finishes, and the peer
and the client, which the test plays, check the result.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

from pydantic import JsonValue

from meshpoint import SignalNotKept
from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import dead_letter_queue
from meshpoint.model.outcomes import Failed, Outcome
from meshpoint.subtasks.resuming import resume_operation
from plain_client import Reply

from .mesh import EndedEarly, Mesh, Process, count_rows

CHIEF, VICTIM = "chief", "root"
"""The client calls `chief`, which calls `root`, which calls the peer that the test plays.

Only replicas of `root` are killed. `chief` has a replica of its own that survives and sends each
message once, so it cannot hide a message that `root` loses.
"""
_FAST_OPTIONS: Mapping[str, JsonValue] = {
    "lease_seconds": 2,
    "renew_interval_seconds": 0.25,
    "sweep_interval_seconds": 0.2,
    "settle_time_seconds": 0.3,
    "dispatch_lease_seconds": 2,
    "drain_timeout_seconds": 0.2,
    "db_pool_size": 1,
}
_SURVIVOR_OPTIONS: Mapping[str, JsonValue] = {**_FAST_OPTIONS, "lease_seconds": 60}


class CrashHarness:
    """A mesh in which one replica dies at one event.

    A scenario leads there; `finish` checks the result.
    """

    def __init__(self, mesh: Mesh, at: str, skip: int) -> None:
        self.mesh = mesh
        self.victim: Process | None = None
        self.expected: JsonValue = None
        self.all_purged = False
        self.unanswered: set[TaskId] = set()
        self._at, self._skip = at, skip
        self._gate = mesh.backends.folder / f"{new_id()}.gate"
        self._repair_marker = mesh.backends.folder / f"{new_id()}.mended"
        self._calls_by_question: defaultdict[tuple[JsonValue, str], set[TaskId]] = defaultdict(set)
        self._answered_count = 0
        self._resume_count = 0
        self._peer_task: asyncio.Task[None] | None = None
        self._signals_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the peer and the client, and declare every queue."""
        self.peer, self.client = await self.mesh.peer(), await self.mesh.client()
        for agent in (CHIEF, VICTIM):
            await self.peer.broker.declare(AgentName(agent))
        self.configure()
        self._peer_task = asyncio.create_task(self._serve_peer())

    def configure(self, **options: JsonValue) -> None:
        """Set the options of replicas started from now on."""
        self._config = self.mesh.backends.config(VICTIM, **{**_FAST_OPTIONS, **options})

    async def replica(self, *arguments: str) -> Process:
        """Start a replica; with `--at`, it dies at that event of the victim."""
        return await self.mesh.replica(self._config, *arguments, started=0)

    async def start_victim(self) -> Process:
        """Start the replica that dies at the event under test."""
        self.victim = await self.replica("--at", self._at, "--skip", str(self._skip))
        return self.victim

    async def start_and_kill_at(self, at: str, skip: int = 0) -> None:
        """Start a replica that dies at `at`, and wait for its death."""
        await (await self.replica("--at", at, "--skip", str(skip))).wait_ended()

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
        request: dict[str, JsonValue] = {"numbers": [*numbers], "rounds": rounds, **work}
        if gated:
            request["gate"] = str(self._gate)
        if broken:
            request["mended_by"], self.expected = str(self._repair_marker), "error"
        reply = await self.client.send(agent, request, task_id=self._task_id)
        self._outcome: Awaitable[Outcome] = asyncio.ensure_future(_outcome_of(reply))
        if agent == CHIEF:
            self._chief = await self.mesh.replica(
                self.mesh.backends.config(CHIEF, **_SURVIVOR_OPTIONS), started=0
            )

    def open_gate(self) -> None:
        """Let gated code continue."""
        self._gate.touch()

    async def cancel(self) -> None:
        """Cancel the task once it waits for the peer."""
        assert self.victim is not None
        self.expected = "cancelled"
        await self.victim.wait("ack:after")
        await self.client.cancel(self._agent, self._task_id)

    async def send_signals(self, *values: int) -> None:
        """Send signals once the task waits, each until a replica accepts it."""
        assert self.victim is not None
        await self.victim.wait("ack:after")
        self._signals_task = asyncio.create_task(self._send_signals(values))

    async def _send_signals(self, values: Sequence[int]) -> None:
        for number, value in enumerate(values):
            is_kept = False
            while not is_kept:
                with suppress(SignalNotKept):
                    await self.client.signal(
                        self._agent, self._task_id, "chat", str(number), value
                    )
                    is_kept = True

    async def resume(self) -> None:
        """Wait for the failure, mend the work and resume `chief`; await its second end."""
        assert isinstance(await self._outcome, Failed)
        end_count = len(await self._chief.wait("end:after"))
        self._repair_marker.touch()
        async with self.mesh.store() as store:
            await resume_operation(store, self._task_id)
            self._resume_count += 1
        self._outcome = asyncio.ensure_future(self._recorded_outcome(end_count + 1))

    async def _recorded_outcome(self, end_count: int) -> Outcome:
        """The resumed operation's outcome, from the database: the client gets no reply."""
        await self._chief.wait("end:after", end_count)
        async with self.mesh.store() as store:
            existing = (await store.lookup([self._task_id]))[self._task_id]
        assert existing.reply is not None
        return parse_body(ResponseBody, existing.reply.body).outcome()

    async def _serve_peer(self) -> None:
        while True:
            request = await self.peer.requests.get()
            parent = str(request.delivery.message.headers["x-parent-task-id"])
            self._calls_by_question[request.input, parent].add(request.sub_task_id)
            number = int(str(request.input))
            if number < 0:
                self.unanswered.add(request.sub_task_id)
                await request.delivery.ack()
            else:
                await self._wait_for_victim_acks()
                await request.answer(number * 10)

    async def _wait_for_victim_acks(self) -> None:
        """Wait until the doomed replica has acked all earlier deliveries or is dead.

        This gives its steps one order.
        """
        self._answered_count += 1
        if self.victim is not None:
            with suppress(EndedEarly):
                await self.victim.wait("ack:after", self._answered_count)

    async def finish(self) -> None:
        """Let another replica finish; check for one outcome, one set of calls, no leftovers."""
        await self._wait_for_death()
        self.open_gate()
        survivor = await self.replica()
        outcome = await self._outcome
        result = outcome.kind.value if isinstance(outcome, Failed) else outcome.value
        assert result == self.expected, f"{outcome} instead of {self.expected}"
        await self._wait_until_idle(survivor)
        # The same reply may arrive again; a reply not yet recorded as sent is sent after a resume
        # too, and then its content may differ.
        assert self.client.conflicts <= self._resume_count, "a second reply had other content"
        for question, ids in self._calls_by_question.items():
            assert len(ids) == self._rounds, f"a second set of calls: {question} was sent as {ids}"
        assert not survivor.matching_events("dead_task")
        self._assert_no_saved_subtask_ran_again()
        self._assert_no_recorded_step_ran_again()
        for agent in (CHIEF, VICTIM, self.peer.name):
            assert await self.peer.broker.depth(dead_letter_queue(AgentName(agent))) == 0, (
                f"dead letters at {agent}"
            )

    def _assert_no_saved_subtask_ran_again(self) -> None:
        for earlier, later in combinations(self.mesh.processes, 2):
            rerun = _subtasks(earlier, "save:after") & _subtasks(later, "subtask:before")
            assert not rerun, f"saved subtasks ran again: {rerun}"

    def _assert_no_recorded_step_ran_again(self) -> None:
        """Each step ran once, and once more after each rescue that came before it was recorded.

        A victim on a busy machine may renew its lease too late, and rescue its own task.
        """
        recorded = set[tuple[str, str]]()
        for process in self.mesh.processes:
            began = list[tuple[str, str]]()
            rescues = 0
            for event in process.events:
                match f"{event['step']}:{event['phase']}":
                    case "rescue:after":
                        rescues += len(event["task_ids"])
                    case "record:after":
                        task_id, names = event["task_ids"][0], event["detail"]["recorded"]
                        recorded |= {(task_id, name) for name in names}
                    case "step:before":
                        step = _step(event)
                        assert step not in recorded, f"a recorded step ran again: {step}"
                        assert began.count(step) <= rescues, f"steps ran twice: {step}, {began}"
                        began.append(step)

    async def _wait_for_death(self) -> None:
        assert self.victim is not None
        try:
            code = await self.victim.wait_ended()
        except TimeoutError:
            last_events = [
                f"{event['agent']} {event['step']}:{event['phase']}"
                for event in self.victim.events
            ]
            raise AssertionError(
                f"no replica died at {self._at}; its last events: {last_events[-20:]}"
            ) from None
        assert code == -signal.SIGKILL

    async def _wait_until_idle(self, survivor: Process) -> None:
        """Return once no task is open and every unanswered call was cancelled at the peer."""
        async with self.mesh.store() as store:
            while (
                (counts := await count_rows(store))["open"]
                or counts["calls"]
                or (self.all_purged and counts["tasks"])
            ):
                sweeps = len(survivor.matching_events("sweep:after", durable=True))
                await survivor.wait("sweep:after", sweeps + 1, durable=True)
        while self.unanswered:
            cancel = await self.peer.cancels.get()
            self.unanswered.discard(TaskId(cancel.message.correlation_id))

    async def close(self) -> None:
        for task in (self._peer_task, self._signals_task):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.mesh.close()


async def _outcome_of(reply: asyncio.Future[Reply]) -> Outcome:
    return (await reply).outcome


def _subtasks(process: Process, at: str) -> set[tuple[str, str]]:
    """Pairs of task and subtask in a process's events at `step:phase`."""
    subtask_events = [
        event for event in process.matching_events(at) if "subtask" in event["detail"]
    ]
    return {
        (task_id, event["detail"]["subtask"])
        for event in subtask_events
        for task_id in event["task_ids"]
    }


def _step(event: Mapping[str, Any]) -> tuple[str, str]:
    """Task and step of an event about the code of a step."""
    return event["task_ids"][0], event["detail"]["name"]
