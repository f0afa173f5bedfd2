"""Counts from the replicas' events and from the file of side effects."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .ledger import Ledger

Line = tuple[float, str, str, str, list[str], dict[str, Any]]

_COUNTED = {
    "take_over": "tasks rescued",
    "redelivered": "messages redelivered",
    "doubled": "messages doubled on purpose",
    "duplicate": "duplicates dropped",
    "late": "late responses dropped",
    "fenced": "zombies fenced",
    "lease_lost": "leases lost",
    "degraded": "tasks degraded to memory",
    "expire": "deadlines enforced",
    "take": "ready tasks acquired",
    "release": "tasks released",
    "code_cancelled": "runs cancelled",
    "dead_letter": "dead letters",
    "dead_task": "dead tasks",
    "parked": "tasks parked",
    "reply_unroutable": "replies given up",
    "store_away": "database outages seen",
    "broker_away": "broker outages seen",
}


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


def events(folder: Path) -> Iterator[Line]:
    """Every event of all replicas, replica by replica."""
    for path in sorted(folder.glob("*.events")):
        yield from events_of(path)


def events_of(path: Path) -> Iterator[Line]:
    """Every event that one replica wrote."""
    with path.open() as file:
        for line in file:
            at, step, phase, agent, ids, detail = json.loads(line)
            yield at, step, phase, agent, ids, detail


def counts(folder: Path) -> tuple[Counter[str], set[str]]:
    """Number of events by kind, and the tasks that fell back to the in-process backend."""
    found: Counter[str] = Counter(dict.fromkeys(_COUNTED.values(), 0))
    degraded: set[str] = set()
    for _, step, phase, _, ids, _ in events(folder):
        if step == "degraded":
            degraded.update(ids)
        if step in _COUNTED and phase in {"noted", "after"}:
            found[_COUNTED[step]] += max(1, len(ids))
    return found, degraded


def effects(folder: Path, ledger: Ledger, degraded: set[str]) -> Effects:
    """Side effects of the agents, checked against the answers."""
    found = Effects()
    by_task: Counter[str] = Counter()
    by_piece: dict[tuple[int, ...], set[str]] = defaultdict(set)
    in_memory: set[int] = set()
    for line in (folder / "effects").read_text().splitlines():
        agent, task_id, *numbers = line.split()
        number = int(numbers[0])
        found.tasks[number].add(task_id)
        if task_id in degraded:
            in_memory.add(number)
        if agent == "leaf":
            by_task[task_id] += 1
            by_piece[tuple(int(each) for each in numbers)].add(task_id)
    found.count, found.repeated = by_task.total(), by_task.total() - len(by_task)
    found.doubled_calls = {piece[0] for piece, ids in by_piece.items() if len(ids) > 1} - in_memory
    found.missing = {number for number, piece in _given(ledger) if piece not in by_piece}
    return found


def _given(ledger: Ledger) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """For each value in a correct answer, the piece of work that must have had its effect."""
    for entry in ledger.entries.values():
        if entry.answers and not entry.wrong and entry.agent == "root":
            answer: Any = entry.answers[0].outcome
            for turn, values in enumerate(answer.value):
                for index, value in enumerate(values):
                    if value is not None:
                        yield entry.work.number, (entry.work.number, turn, index)
