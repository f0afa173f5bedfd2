"""The ledger, story and picture of the demonstration, without processes."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from meshpoint.demo import run, show
from meshpoint.demo.ledger import Ledger
from meshpoint.demo.plot import KillPlanner
from meshpoint.demo.screen import render
from meshpoint.demo.story import ReplicaEvent, ReplicaState, TaskTracker
from meshpoint.model.events import Phase, Step

GOOD = Ledger(
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
    assert GOOD.ok
    assert GOOD.to_dict()["lost"] == 0


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
def test_any_wrong_number_makes_it_wrong(
    change: dict[str, int],
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = dataclasses.replace(GOOD, **change)
    assert (ledger.ok, ledger.failed_checks) == (False, (wrong,))
    assert _shown(ledger, monkeypatch) == 1
    assert wrong in capsys.readouterr().out.splitlines()[-1]


def test_a_good_ledger_exits_with_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _shown(GOOD, monkeypatch) == 0
    assert "every request was answered once" in capsys.readouterr().out


def test_an_answer_that_came_again_is_told_and_not_wrong() -> None:
    assert dataclasses.replace(GOOD, repeated=2).ok


def _shown(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> int:
    class Finished:
        def __init__(self, *arguments: object) -> None: ...

        async def run(self) -> Ledger:
            return ledger

    monkeypatch.setattr(show, "DemoRun", Finished)
    return run(requests=24, seed=1, as_json=False)


class Telling:
    """A scripted story with replicas A, B and C running."""

    def __init__(self, requests: int = 3) -> None:
        self.story = TaskTracker("ABC", requests, 0.0)
        self.plot = KillPlanner(self.story)
        for name in "ABC":
            self.tell(name, Step.STARTED, Phase.NOTED)
        for number in range(1, requests + 1):
            self.story.request_sent(f"t{number}", number)

    def tell(self, name: str, step: Step, phase: Phase, *task_ids: str, at: float = 0.0, **detail: Any) -> None:
        self.story.handle_event(name, ReplicaEvent(step, phase, "travel", task_ids, detail, at))

    def begin(self, name: str, task_id: str, generation: int, at: float = 0.0) -> None:
        self.tell(name, Step.SEGMENT, Phase.BEFORE, task_id, at=at, generation=generation)

    def pause(self, name: str, task_id: str, generation: int) -> None:
        """End the segment before pause `generation` with that pause."""
        self.tell(name, Step.SEGMENT, Phase.AFTER, task_id, generation=generation - 1)
        self.tell(name, Step.CHECKPOINT, Phase.AFTER, task_id, generation=generation)
        if generation == 1:
            self.tell(name, Step.ACK, Phase.AFTER, task_id)

    def end(self, name: str, task_id: str, generation: int) -> None:
        self.tell(name, Step.SEGMENT, Phase.AFTER, task_id, generation=generation)
        self.tell(name, Step.END, Phase.AFTER, task_id)


@pytest.fixture
def telling() -> Telling:
    return Telling()


def test_a_task_moves_from_running_to_paused_to_another_replica(telling: Telling) -> None:
    replicas = telling.story.replicas
    telling.begin("A", "t1", 0)
    assert len(replicas["A"].running) == 1
    telling.pause("A", "t1", 1)
    assert (len(replicas["A"].running), list(replicas["A"].paused)) == (0, ["t1"])
    telling.begin("B", "t1", 1)
    assert (list(replicas["A"].paused), len(replicas["B"].running), replicas["B"].resumed) == ([], 1, 1)
    assert telling.story.resumed_elsewhere == 1


def test_a_task_that_stays_is_not_resumed_elsewhere(telling: Telling) -> None:
    telling.begin("A", "t1", 0)
    telling.pause("A", "t1", 1)
    telling.begin("A", "t1", 1)
    assert telling.story.resumed_elsewhere == 0


def test_a_checkpoint_without_its_ack_is_not_paused_yet(telling: Telling) -> None:
    telling.begin("A", "t1", 0)
    telling.tell("A", Step.CHECKPOINT, Phase.AFTER, "t1", generation=1)
    assert not telling.story.replicas["A"].paused


def test_who_acks_a_response_has_not_paused_its_task(telling: Telling) -> None:
    telling.begin("A", "t1", 0)
    telling.pause("A", "t1", 1)
    telling.tell("B", Step.ACK, Phase.AFTER, "t1")
    assert [name for name, replica in telling.story.replicas.items() if replica.paused] == ["A"]


def test_what_is_heard_late_does_not_pause_a_task_again(telling: Telling) -> None:
    telling.begin("A", "t1", 0)
    telling.begin("B", "t1", 1)
    telling.pause("A", "t1", 1)
    assert not telling.story.replicas["A"].paused
    assert telling.story.resumed_elsewhere == 1


def test_an_end_that_was_fenced_is_none(telling: Telling) -> None:
    telling.end("A", "t1", 1)
    telling.end("B", "t1", 1)
    assert telling.story.duplicated == 1
    telling.tell("A", Step.FENCED, Phase.NOTED, "t1", what="end")
    assert telling.story.duplicated == 0


def test_events_of_peers_do_not_count(telling: Telling) -> None:
    for step in (Step.SEGMENT, Step.END, Step.END):
        telling.story.handle_event(
            "peers", ReplicaEvent(step, Phase.BEFORE, "flights", ["t1"], {"generation": 0}, 0.0)
        )
    assert not telling.story.peers.running
    assert telling.story.duplicated == 0


def test_the_first_kill_waits_for_paused_tasks(telling: Telling) -> None:
    telling.begin("A", "t1", 0)
    assert telling.plot.next_kill(0.0) is None
    telling.pause("A", "t1", 1)
    kill = telling.plot.next_kill(0.0)
    assert kill is not None
    assert (kill.replica, kill.task_ids) == ("A", {"t1"})
    assert telling.plot.next_kill(0.0) is None, "the second kill must wait for its own moment"


def test_with_many_requests_the_first_kill_waits_for_several() -> None:
    telling = Telling(requests=24)
    for number in (1, 2, 3):
        telling.pause("A", f"t{number}", 1)
        assert telling.plot.next_kill(0.0) is None
    telling.pause("A", "t4", 1)
    assert telling.plot.next_kill(0.0) is not None


def test_the_second_kill_is_inside_a_resumed_segment_of_a_task_of_the_first(telling: Telling) -> None:
    telling.pause("A", "t1", 1)
    assert telling.plot.next_kill(0.0)
    telling.story.replica_killed("A", "with 1 task paused by it", "1 task paused")
    telling.begin("B", "t2", 0, at=1.0)
    telling.pause("B", "t2", 1)
    telling.begin("B", "t2", 1, at=1.0)
    assert telling.plot.next_kill(1.0) is None, "the first victim did not pause t2"
    telling.begin("C", "t1", 1, at=1.0)
    assert telling.plot.next_kill(9.0) is None, "the segment may be over by now"
    kill = telling.plot.next_kill(1.1)
    assert kill is not None
    assert (kill.replica, kill.task_ids) == ("C", {"t1"})


def test_the_picture_fits_80_columns_and_marks_who_was_killed(telling: Telling) -> None:
    telling.pause("A", "t1", 1)
    telling.story.replica_killed("A", "with 1 task paused by it", "1 task paused")
    telling.begin("B", "t1", 1)
    drawn = io.StringIO()
    Console(file=drawn, width=80, highlight=False).print(render(telling.story, "RabbitMQ and PostgreSQL " * 5))
    lines = drawn.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.strip()[0]: line for line in lines if line.strip() and line.strip()[0] in "ABC"}
    assert "✗ killed, 1 task paused" in rows["A"]
    assert rows["B"].split()[-3:] == ["1", "0", "1"], "running, paused, resumed"
    assert any("B resumes trip 1, which A had paused" in line for line in lines)


def test_a_replica_serves_when_all_its_agents_do(telling: Telling) -> None:
    peers = telling.story.peers
    for agent in ("flights", "hotels"):
        telling.story.handle_event("peers", ReplicaEvent(Step.STARTED, Phase.NOTED, agent, [], {}, 0.0))
    assert peers.state is ReplicaState.STARTING
    telling.story.handle_event("peers", ReplicaEvent(Step.STARTED, Phase.NOTED, "weather", [], {}, 0.0))
    assert peers.state is ReplicaState.SERVING
