"""The ledger, the tracked tasks and the picture of the demo, without processes."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from meshpoint.demo import run
from meshpoint.demo.screen import render
from meshpoint.demo.tracker import KillPlanner, Ledger, ReplicaState, TaskTracker
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId

GOOD_LEDGER = Ledger(
    requests=24,
    answers=24,
    failed=0,
    duplicated=0,
    repeated=0,
    paused_in_killed=4,
    running_in_killed=1,
    resumed_elsewhere=9,
    rescued=1,
    seconds=8.5,
)


def test_a_good_ledger_is_ok() -> None:
    assert GOOD_LEDGER.ok
    assert GOOD_LEDGER.to_dict()["lost"] == 0


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"answers": 23}, "lost"),
        ({"answers": 25}, "lost"),
        ({"duplicated": 1}, "duplicated"),
        ({"failed": 1}, "failed"),
        ({"paused_in_killed": 0}, "paused_in_killed"),
        ({"running_in_killed": 0}, "running_in_killed"),
        ({"resumed_elsewhere": 0}, "resumed_elsewhere"),
        ({"rescued": 0}, "rescued"),
    ],
)
def test_any_unexpected_number_fails_the_demo(
    change: dict[str, int],
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = dataclasses.replace(GOOD_LEDGER, **change)
    assert (ledger.ok, ledger.failed_checks) == (False, (wrong,))
    assert run_demo_with(ledger, monkeypatch) == 1
    assert wrong in capsys.readouterr().out.splitlines()[-1]


def test_a_good_ledger_exits_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo_with(GOOD_LEDGER, monkeypatch) == 0
    assert "every request was answered once" in capsys.readouterr().out


def test_a_repeated_answer_is_not_an_error() -> None:
    assert dataclasses.replace(GOOD_LEDGER, repeated=2).ok


def run_demo_with(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> int:
    class Finished:
        def __init__(self, *arguments: object) -> None: ...

        async def run(self) -> Ledger:
            return ledger

    monkeypatch.setattr(run, "DemoRun", Finished)
    return run.run_demo(broker_url=None, db_url=None, requests=24, seed=1, as_json=False)


def make_event(step: Step, phase: Phase, agent: str, *task_ids: str, **detail: Any) -> Event:
    ids = tuple(map(TaskId, task_ids))
    return Event(step, phase, AgentName(agent), ReplicaId("r"), ids, detail)


class ScriptedRun:
    """A scripted story with replicas A, B and C running."""

    def __init__(self, requests: int = 3) -> None:
        self.tracker = TaskTracker("ABC", requests, 0.0)
        self.kill_planner = KillPlanner(self.tracker)
        for name in "ABC":
            self.emit(name, Step.STARTED, Phase.INFO)
        for number in range(1, requests + 1):
            self.tracker.request_sent(f"t{number}", number)

    def emit(
        self, name: str, step: Step, phase: Phase, *task_ids: str, at: float = 0.0, **detail: Any
    ) -> None:
        event = make_event(step, phase, "travel", *task_ids, **detail)
        self.tracker.handle_event(name, event, at)

    def begin(self, name: str, task_id: str, generation: int, at: float = 0.0) -> None:
        self.emit(name, Step.SEGMENT, Phase.BEFORE, task_id, at=at, generation=generation)

    def pause(self, name: str, task_id: str, generation: int) -> None:
        """End the segment before pause `generation` with that pause."""
        self.emit(name, Step.SEGMENT, Phase.AFTER, task_id, generation=generation - 1)
        self.emit(name, Step.CHECKPOINT, Phase.AFTER, task_id, generation=generation)
        if generation == 1:
            self.emit(name, Step.ACK, Phase.AFTER, task_id)

    def end(self, name: str, task_id: str, generation: int) -> None:
        self.emit(name, Step.SEGMENT, Phase.AFTER, task_id, generation=generation)
        self.emit(name, Step.END, Phase.AFTER, task_id)


@pytest.fixture
def scripted_run() -> ScriptedRun:
    return ScriptedRun()


def test_a_task_moves_from_running_to_paused_to_another_replica(scripted_run: ScriptedRun) -> None:
    replicas = scripted_run.tracker.replicas
    scripted_run.begin("A", "t1", 0)
    assert len(replicas["A"].running) == 1
    scripted_run.pause("A", "t1", 1)
    assert (len(replicas["A"].running), list(replicas["A"].paused)) == (0, ["t1"])
    scripted_run.begin("B", "t1", 1)
    assert (list(replicas["A"].paused), len(replicas["B"].running), replicas["B"].resumed) == (
        [],
        1,
        1,
    )
    assert scripted_run.tracker.resumed_elsewhere == 1


def test_a_task_that_stays_on_its_replica_is_not_counted_as_resumed(
    scripted_run: ScriptedRun,
) -> None:
    scripted_run.begin("A", "t1", 0)
    scripted_run.pause("A", "t1", 1)
    scripted_run.begin("A", "t1", 1)
    assert scripted_run.tracker.resumed_elsewhere == 0


def test_a_checkpoint_without_its_ack_is_not_paused_yet(scripted_run: ScriptedRun) -> None:
    scripted_run.begin("A", "t1", 0)
    scripted_run.emit("A", Step.CHECKPOINT, Phase.AFTER, "t1", generation=1)
    assert not scripted_run.tracker.replicas["A"].paused


def test_acking_a_response_does_not_count_as_a_pause(scripted_run: ScriptedRun) -> None:
    scripted_run.begin("A", "t1", 0)
    scripted_run.pause("A", "t1", 1)
    scripted_run.emit("B", Step.ACK, Phase.AFTER, "t1")
    assert [name for name, replica in scripted_run.tracker.replicas.items() if replica.paused] == [
        "A"
    ]


def test_a_late_event_does_not_pause_a_task_again(scripted_run: ScriptedRun) -> None:
    scripted_run.begin("A", "t1", 0)
    scripted_run.begin("B", "t1", 1)
    scripted_run.pause("A", "t1", 1)
    assert not scripted_run.tracker.replicas["A"].paused
    assert scripted_run.tracker.resumed_elsewhere == 1


def test_a_fenced_end_does_not_count(scripted_run: ScriptedRun) -> None:
    scripted_run.end("A", "t1", 1)
    scripted_run.end("B", "t1", 1)
    assert scripted_run.tracker.duplicated == 1
    scripted_run.emit("A", Step.FENCED, Phase.INFO, "t1", what="end")
    assert scripted_run.tracker.duplicated == 0


def test_events_of_peers_do_not_count(scripted_run: ScriptedRun) -> None:
    for step in (Step.SEGMENT, Step.END, Step.END):
        scripted_run.tracker.handle_event(
            "peers", make_event(step, Phase.BEFORE, "flights", "t1", generation=0), 0.0
        )
    assert not scripted_run.tracker.peers.running
    assert scripted_run.tracker.duplicated == 0


def test_the_first_kill_waits_for_paused_tasks(scripted_run: ScriptedRun) -> None:
    scripted_run.begin("A", "t1", 0)
    assert scripted_run.kill_planner.next_kill(0.0) is None
    scripted_run.pause("A", "t1", 1)
    kill = scripted_run.kill_planner.next_kill(0.0)
    assert kill is not None
    assert (kill.replica, set(kill.task_ids)) == ("A", {"t1"})
    assert scripted_run.kill_planner.next_kill(0.0) is None, (
        "the second kill must wait for its own moment"
    )


def test_with_many_requests_the_first_kill_waits_for_several() -> None:
    scripted_run = ScriptedRun(requests=24)
    for number in (1, 2, 3):
        scripted_run.pause("A", f"t{number}", 1)
        assert scripted_run.kill_planner.next_kill(0.0) is None
    scripted_run.pause("A", "t4", 1)
    assert scripted_run.kill_planner.next_kill(0.0) is not None


def test_the_second_kill_hits_a_resumed_task_of_the_first(scripted_run: ScriptedRun) -> None:
    scripted_run.pause("A", "t1", 1)
    assert scripted_run.kill_planner.next_kill(0.0)
    scripted_run.tracker.replica_killed("A", "with 1 task paused by it", "1 task paused")
    scripted_run.begin("B", "t2", 0, at=1.0)
    scripted_run.pause("B", "t2", 1)
    scripted_run.begin("B", "t2", 1, at=1.0)
    assert scripted_run.kill_planner.next_kill(1.0) is None, "the first victim did not pause t2"
    scripted_run.begin("C", "t1", 1, at=1.0)
    assert scripted_run.kill_planner.next_kill(9.0) is None, "the segment may be over by now"
    kill = scripted_run.kill_planner.next_kill(1.1)
    assert kill is not None
    assert (kill.replica, set(kill.task_ids)) == ("C", {"t1"})


def test_the_picture_fits_80_columns_and_marks_killed_replicas(scripted_run: ScriptedRun) -> None:
    scripted_run.pause("A", "t1", 1)
    scripted_run.tracker.replica_killed("A", "with 1 task paused by it", "1 task paused")
    scripted_run.begin("B", "t1", 1)
    picture = io.StringIO()
    Console(file=picture, width=80, highlight=False).print(
        render(scripted_run.tracker, "RabbitMQ and PostgreSQL " * 5)
    )
    lines = picture.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.strip()[0]: line for line in lines if line.strip() and line.strip()[0] in "ABC"}
    assert "✗ killed, 1 task paused" in rows["A"]
    assert rows["B"].split()[-3:] == ["1", "0", "1"], "running, paused, resumed"
    assert any("B resumes trip 1, which A had paused" in line for line in lines)


def test_a_replica_is_ready_when_all_its_agents_are(scripted_run: ScriptedRun) -> None:
    def state() -> ReplicaState:
        return scripted_run.tracker.peers.state

    for agent in ("flights", "hotels"):
        scripted_run.tracker.handle_event(
            "peers", make_event(Step.STARTED, Phase.INFO, agent), 0.0
        )
    assert state() is ReplicaState.STARTING
    scripted_run.tracker.handle_event(
        "peers", make_event(Step.STARTED, Phase.INFO, "weather"), 0.0
    )
    assert state() is ReplicaState.SERVING
