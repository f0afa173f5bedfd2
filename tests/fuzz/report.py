"""The verdict of a fuzzer run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chaos import event_counts
from chaos.ledger import Ledger

from .branches import Branch, branches
from .excluded_branches import depends_on_timing, reason_to_exclude, reason_unreachable
from .replica import SETTLED_EVENT

MIN_BRANCH_HITS = 20
"""Required hits of each branch."""
MAX_SLOWDOWN = 5.0
"""Maximum ratio of the honest p99 under fuzz to the p99 before it."""
MAX_GROWTH_MB = 20.0
"""Maximum memory growth of a replica, in MB."""
MIN_PER_MINUTE = 5000
_ALLOWED_RECONNECTS = 4
"""Connections of two replicas.

On a busy machine a replica may lose a silent broker and reconnect once.
"""
_OUTCOME_STEPS = {
    "segment",
    "reply",
    "end",
    "cancel",
    "reply_unroutable",
    "dead_task",
    "duplicate",
    "late",
    "checkpoint",
    "begin",
}


@dataclass
class Report:
    """The result, written as JSON and shown as a table.

    `reconnects` counts connections that replicas opened again, `probes` the ones opened to try
    suspicious messages, and `lost_connections` the ones closed by the broker or found closed by
    it. `connections` has the broker's log lines on reconnected and lost connections.
    """

    broker: str
    seed: int
    seconds: float
    messages: int
    per_minute: float
    recipes: int
    requests: int
    answers: int
    lost: int
    wrong: int
    duplicated: int
    fell: int
    bad_drains: int
    reconnects: int
    probes: int
    lost_connections: int
    connections: list[str]
    p99_quiet: float
    p99_fuzz: float
    slower: float
    memory: dict[str, list[float]]
    grown: float
    accounts: dict[str, int]
    closings: dict[str, int]
    unaccounted: list[str]
    rows_held: int
    branches: int
    unreached: list[str]
    defects: list[str]
    excluded: dict[str, str]
    honest: list[str] = field(default_factory=list)  # honest requests that failed a check
    faults: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether all conditions are met."""
        return not self.faults


@dataclass
class Fates:
    """Fate of each mutated message."""

    count_by_fate: Counter[str]
    missing: list[str]


class RecordedFates:
    """What the replicas have recorded of marked messages. Each event is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions: dict[Path, int] = {}
        self.settled: dict[str, tuple[str, str, str]] = {}
        self.outcomes: set[str] = set()

    def read_new(self) -> None:
        """Read the events since the last call."""
        for path in sorted(self._folder.glob("*.events")):
            for _, step, _, _, ids, detail in event_counts.read_new_events(path, self._positions):
                if step == SETTLED_EVENT:
                    for mark in detail["marks"]:
                        self.settled[mark] = (detail["how"], detail["type"], ids[0] if ids else "")
                elif step in _OUTCOME_STEPS:
                    self.outcomes.update(ids)


def find_fates(
    sent: Mapping[str, str],
    recorded: RecordedFates,
    refused: set[str],
    dead: set[str],
    replied: set[str],
) -> Fates:
    """Find the fate of each marked message. `sent` maps marks to recipes."""
    recorded.read_new()
    fate_counts, missing = Counter[str](), list[str]()
    for mark, recipe in sent.items():
        fate, kind, task_id = recorded.settled.get(mark, ("", "", ""))
        if mark in refused:
            fate_counts["refused by the broker"] += 1
        elif mark in dead or fate == "dead":
            fate_counts["dead letter"] += 1
        elif fate == "ack" and (kind != "request" or task_id in recorded.outcomes):
            fate_counts["outcome of a request" if kind == "request" else f"{kind} settled"] += 1
        elif mark in replied:
            fate_counts["answered"] += 1
        else:
            missing.append(f"{mark} {recipe} ({fate or 'never settled'})")
    return Fates(fate_counts, missing)


@dataclass
class BranchCoverage:
    """Result of the branch count: total, rarely reached, forbidden but reached, and excluded."""

    count: int
    rarely_reached: list[str]
    defects: list[str]
    excluded: dict[str, str]


def measure_coverage(folder: Path, min_hits: int, *, by_the_clock: bool) -> BranchCoverage:
    """Check that each branch was reached at least `min_hits` times.

    Without `by_the_clock`, skip the branches that depend on timing.
    """
    counts: Counter[tuple[str, int]] = Counter()
    for path in folder.glob("*.branches"):
        for module, line, count in json.loads(path.read_text()):
            counts[module, line] += count
    every = branches()
    excluded = {branch.name: reason for branch in every if (reason := reason_to_exclude(branch))}

    def describe(branch: Branch) -> str:
        return f"{branch.name} ({counts[branch.module, branch.line]})"

    forbidden = [branch for branch in every if reason_unreachable(branch)]
    judged = [
        branch for branch in every if branch.name not in excluded and branch not in forbidden
    ]
    if not by_the_clock:
        judged = [branch for branch in judged if not depends_on_timing(branch)]
    rarely = [
        describe(branch) for branch in judged if counts[branch.module, branch.line] < min_hits
    ]
    defects = [describe(branch) for branch in forbidden if counts[branch.module, branch.line]]
    return BranchCoverage(len(every), rarely, defects, excluded)


def p99(ledger: Ledger, start: float, end: float) -> float:
    """p99 latency in seconds of the requests sent between `start` and `end`."""
    spans = [
        record.answers[0].at - record.sent_at
        for record in ledger.records.values()
        if record.answers and start <= record.sent_at < end
    ]
    return percentile(spans, 99)


def percentile(values: Iterable[float], share: int) -> float:
    """The percentile, rounded; 0 if there are no values."""
    ordered = sorted(values)
    return (
        round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 4) if ordered else 0.0
    )


def find_faults(report: Report, *, by_the_clock: bool) -> None:
    """Fill in `faults`.

    Rates and latencies count only `by_the_clock`, since a busy machine spoils them.
    """
    must_be_zero = {
        "honest requests lost": report.lost,
        "honest answers wrong": report.wrong,
        "honest outcomes duplicated": report.duplicated,
        "replicas that fell": report.fell,
        "drains that failed": report.bad_drains,
        "connections lost": report.lost_connections,
        "connections opened again": report.reconnects
        if by_the_clock or report.reconnects > _ALLOWED_RECONNECTS
        else 0,
        "mutated messages unaccounted for": len(report.unaccounted),
        "branches reached too rarely": len(report.unreached),
        "forbidden branches reached": len(report.defects),
    }
    report.faults = [
        f"{count} {description}" for description, count in must_be_zero.items() if count
    ]
    if report.grown > MAX_GROWTH_MB:
        report.faults.append(f"a replica grew by {report.grown:.1f} MB")
    if by_the_clock and report.slower > MAX_SLOWDOWN:
        report.faults.append(f"the honest p99 is {report.slower:.1f} times its value without fuzz")
    if by_the_clock and report.per_minute < MIN_PER_MINUTE:
        report.faults.append(f"only {report.per_minute:,.0f} messages per minute")
