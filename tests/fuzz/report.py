"""The verdict of a fuzzer run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chaos import tally
from chaos.ledger import Ledger

from .branches import Branch, branches
from .excluded import is_a_matter_of_time, reason_never, reason_to_exclude
from .replica import SETTLED

REACHED = 20
"""Required hits of each branch."""
SLOWER = 5.0
"""Maximum ratio of the honest p99 under fuzz to the p99 before it."""
GROWN = 20.0
"""Maximum memory growth of a replica, in MB."""
PER_MINUTE = 5000
_ONCE = 4
"""Connections of two replicas.

On a busy machine a replica may lose a silent broker and reconnect once.
"""
_OUTCOMES = {
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
class Accounts:
    """Fate of each mutated message."""

    by: Counter[str]
    missing: list[str]


def account(sent: Mapping[str, str], folder: Path, refused: set[str], dead: set[str], replied: set[str]) -> Accounts:
    """Find the fate of each marked message. `sent` maps marks to recipes."""
    settled: dict[str, tuple[str, str, str]] = {}
    outcomes: set[str] = set()
    for _, step, _, _, ids, detail in tally.events(folder):
        if step == SETTLED:
            for mark in detail["marks"]:
                settled[mark] = (detail["how"], detail["type"], ids[0] if ids else "")
        elif step in _OUTCOMES:
            outcomes.update(ids)
    by, missing = Counter[str](), list[str]()
    for mark, recipe in sent.items():
        how, kind, task_id = settled.get(mark, ("", "", ""))
        if mark in refused:
            by["refused by the broker"] += 1
        elif mark in dead or how == "dead":
            by["dead letter"] += 1
        elif how == "ack" and (kind != "request" or task_id in outcomes):
            by["outcome of a request" if kind == "request" else f"{kind} settled"] += 1
        elif mark in replied:
            by["answered"] += 1
        else:
            missing.append(f"{mark} {recipe} ({how or 'never settled'})")
    return Accounts(by, missing)


@dataclass
class Reached:
    """Result of the branch count: total, rarely reached, forbidden but reached, and excluded."""

    count: int
    few: list[str]
    defects: list[str]
    excluded: dict[str, str]


def reached(folder: Path, often: int, *, by_the_clock: bool) -> Reached:
    """Check that each branch was reached at least `often` times.

    Without `by_the_clock`, skip the branches that depend on timing.
    """
    counts: Counter[tuple[str, int]] = Counter()
    for path in folder.glob("*.branches"):
        for module, line, count in json.loads(path.read_text()):
            counts[module, line] += count
    every = branches()
    excluded = {branch.name: reason for branch in every if (reason := reason_to_exclude(branch))}

    def shown(branch: Branch) -> str:
        return f"{branch.name} ({counts[branch.module, branch.line]})"

    forbidden = [branch for branch in every if reason_never(branch)]
    judged = [branch for branch in every if branch.name not in excluded and branch not in forbidden]
    if not by_the_clock:
        judged = [branch for branch in judged if not is_a_matter_of_time(branch)]
    few = [shown(branch) for branch in judged if counts[branch.module, branch.line] < often]
    defects = [shown(branch) for branch in forbidden if counts[branch.module, branch.line]]
    return Reached(len(every), few, defects, excluded)


def p99(ledger: Ledger, start: float, end: float) -> float:
    """p99 latency in seconds of the requests sent between `start` and `end`."""
    spans = [
        entry.answers[0].at - entry.sent_at
        for entry in ledger.entries.values()
        if entry.answers and start <= entry.sent_at < end
    ]
    return percentile(spans, 99)


def percentile(values: Iterable[float], share: int) -> float:
    """The percentile, rounded; 0 if there are no values."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 4) if ordered else 0.0


def judge(report: Report, *, by_the_clock: bool) -> None:
    """Fill in `faults`.

    Rates and latencies count only `by_the_clock`, since a busy machine spoils them.
    """
    zero = {
        "honest requests lost": report.lost,
        "honest answers wrong": report.wrong,
        "honest outcomes duplicated": report.duplicated,
        "replicas that fell": report.fell,
        "drains that failed": report.bad_drains,
        "connections lost": report.lost_connections,
        "connections opened again": report.reconnects if by_the_clock or report.reconnects > _ONCE else 0,
        "mutated messages unaccounted for": len(report.unaccounted),
        "branches reached too rarely": len(report.unreached),
        "forbidden branches reached": len(report.defects),
    }
    report.faults = [f"{count} {what}" for what, count in zero.items() if count]
    if report.grown > GROWN:
        report.faults.append(f"a replica grew by {report.grown:.1f} MB")
    if by_the_clock and report.slower > SLOWER:
        report.faults.append(f"the honest p99 is {report.slower:.1f} times its value without fuzz")
    if by_the_clock and report.per_minute < PER_MINUTE:
        report.faults.append(f"only {report.per_minute:,.0f} messages per minute")
