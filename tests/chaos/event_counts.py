"""Counts from the replicas' events and from the file of side effects."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .ledger import Ledger

EventLine = tuple[float, str, str, str, list[str], dict[str, Any]]

_LABEL_BY_STEP = {
    "rescue": "tasks rescued",
    "redelivered": "messages redelivered",
    "doubled": "messages doubled on purpose",
    "duplicate": "duplicates dropped",
    "late": "late responses dropped",
    "fenced": "zombies fenced",
    "lease_lost": "leases lost",
    "degraded": "tasks degraded to memory",
    "expire": "deadlines enforced",
    "acquire": "ready tasks acquired",
    "release": "tasks released",
    "code_cancelled": "runs cancelled",
    "dead_letter": "dead letters",
    "dead_task": "dead tasks",
    "parked": "tasks parked",
    "reply_unroutable": "replies given up",
    "store_unavailable": "database outages seen",
    "broker_unavailable": "broker outages seen",
}

_STEPS_OF_ROWS = {"begin", "checkpoint", "save", "record", "acquire", "rescue", "end"}
"""Events of a replica whose task has a row, or may have one."""


@dataclass
class Effects:
    """Side effects of the agents."""

    count: int = 0
    repeated: int = 0  # leaves that ran again, which at-least-once allows
    # requests for which one peer call became two
    doubled_calls: set[int] = field(default_factory=set)
    # requests whose answer holds a value that no leaf returned
    missing: set[int] = field(default_factory=set)
    # task ids by request
    tasks: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))


def read_events(folder: Path) -> Iterator[EventLine]:
    """Every event of all replicas, replica by replica."""
    for path in sorted(folder.glob("*.events")):
        yield from read_replica_events(path)


def read_replica_events(path: Path) -> Iterator[EventLine]:
    """Every event that one replica has written. Leaves out an event that is not complete yet."""
    yield from read_new_events(path, {})


def read_new_events(path: Path, positions: dict[Path, int]) -> Iterator[EventLine]:
    """The events after the position of the file in `positions`, which moves behind them."""
    with path.open("rb") as file:
        file.seek(positions.setdefault(path, 0))
        for line in file:
            if not line.endswith(b"\n"):
                return
            positions[path] += len(line)
            at, step, phase, agent, ids, detail = json.loads(line)
            yield at, step, phase, agent, ids, detail


def count_events(folder: Path) -> tuple[Counter[str], set[str]]:
    """Number of events by kind, and the tasks that fell back to the in-process backend."""
    count_by_label: Counter[str] = Counter(dict.fromkeys(_LABEL_BY_STEP.values(), 0))
    degraded: set[str] = set()
    for _, step, phase, _, ids, _ in read_events(folder):
        if step == "degraded":
            degraded.update(ids)
        if step in _LABEL_BY_STEP and phase in {"info", "after"}:
            count_by_label[_LABEL_BY_STEP[step]] += max(1, len(ids))
    return count_by_label, degraded


def find_replies_in_doubt(folder: Path) -> set[str]:
    """Tasks without a row whose request came back after a first attempt to reply.

    The broker may have taken that reply, and the next run of the task replies too, as the
    guarantees say.
    """
    replied: set[str] = set()
    redelivered: set[str] = set()
    for path in sorted(folder.glob("*.events")):
        ran: set[str] = set()
        has_row: set[str] = set()
        for _, step, phase, _, ids, detail in read_replica_events(path):
            if step == "segment":
                ran.update(ids)
            elif step in _STEPS_OF_ROWS:
                has_row.update(ids)
            elif step == "reply" and phase == "before":
                replied.update((ran - has_row).intersection(ids))
            elif step == "redelivered" and detail["type"] == "request":
                redelivered.update(ids)
    return replied & redelivered


def collect_effects(folder: Path, ledger: Ledger, degraded: set[str]) -> Effects:
    """Side effects of the agents, checked against the answers."""
    result = Effects()
    count_by_task: Counter[str] = Counter()
    task_ids_by_piece: dict[tuple[int, ...], set[str]] = defaultdict(set)
    degraded_requests: set[int] = set()
    for line in (folder / "effects").read_text().splitlines():
        agent, task_id, *numbers = line.split()
        number = int(numbers[0])
        result.tasks[number].add(task_id)
        if task_id in degraded:
            degraded_requests.add(number)
        if agent == "leaf":
            count_by_task[task_id] += 1
            task_ids_by_piece[tuple(int(part) for part in numbers)].add(task_id)
    result.count, result.repeated = (
        count_by_task.total(),
        count_by_task.total() - len(count_by_task),
    )
    result.doubled_calls = {
        piece[0] for piece, ids in task_ids_by_piece.items() if len(ids) > 1
    } - degraded_requests
    result.missing = {
        number for number, piece in _expected_effects(ledger) if piece not in task_ids_by_piece
    }
    return result


def _expected_effects(ledger: Ledger) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """For each value in a correct answer, the piece of work that must have had its effect."""
    for record in ledger.records.values():
        if record.answers and not record.is_wrong and record.agent == "root":
            answer: Any = record.answers[0].outcome
            for round_number, values in enumerate(answer.value):
                for index, value in enumerate(values):
                    if value is not None:
                        yield record.work.number, (record.work.number, round_number, index)
