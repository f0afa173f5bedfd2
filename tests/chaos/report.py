"""The verdict of a run, and its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .crew import LATE
from .ledger import Entry, Ledger
from .leftovers import Leftovers
from .plan import Kind
from .strikes import Strike
from .tally import Effects

_UNREST = 10.0
"""Seconds after a fault in which a latency does not count as fault-free."""


@dataclass
class Report:
    """The result, written as JSON and shown as a table."""

    seed: int
    seconds: float
    requests: int
    answers: int
    lost: int
    duplicated: int
    stuck: int
    wrong: int
    repeated: int
    faults: dict[str, int]
    events: dict[str, int]
    exits: dict[str, int]
    leftovers: dict[str, Any]
    effects: int
    effects_repeated: int
    effects_missing: int
    calls_doubled: int
    late_drains: int
    answered_last_after: float
    latency: dict[str, float | None] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    per_second: list[int] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing was lost, duplicated, stuck or wrong, and each drain ended in time."""
        return not (self.lost or self.duplicated or self.stuck or self.wrong or self.late_drains)


@dataclass
class Findings:
    """Everything that a run leaves to be judged."""

    seed: int
    seconds: float
    began: float
    ledger: Ledger
    strikes: list[Strike]
    faults: dict[str, int]
    events: dict[str, int]
    exits: dict[str, int]
    degraded: set[str]
    effects: Effects
    leftovers: Leftovers

    def bad(self) -> dict[str, list[Entry]]:
        """The failed requests, by kind of failure."""
        of = {entry.work.number: entry for entry in self.ledger.entries.values()}
        return {
            "lost": self.ledger.open,
            "duplicated": [
                *self.ledger.duplicated(self.degraded),
                *(of[number] for number in sorted(self.effects.doubled_calls) if number in of),
            ],
            "stuck": [
                of[number]
                for number, ids in self.effects.tasks.items()
                if ids & self.leftovers.tasks and number in of
            ],
            "wrong": [*self.ledger.wrong(), *(of[number] for number in sorted(self.effects.missing))],
        }


def judge(found: Findings) -> Report:
    """Turn the findings into a report."""
    bad, ledger = found.bad(), found.ledger
    last = max((entry.answers[0].at for entry in ledger.entries.values() if entry.answers), default=found.began)
    return Report(
        seed=found.seed,
        seconds=found.seconds,
        requests=len(ledger.entries),
        answers=ledger.answered,
        lost=len(bad["lost"]),
        duplicated=len(bad["duplicated"]),
        stuck=found.leftovers.total,
        wrong=len(bad["wrong"]) + len(ledger.strangers),
        repeated=ledger.repeated,
        faults=found.faults,
        events=found.events,
        exits=found.exits,
        leftovers=found.leftovers.to_dict(),
        effects=found.effects.count,
        effects_repeated=found.effects.repeated,
        effects_missing=len(found.effects.missing),
        calls_doubled=len(found.effects.doubled_calls),
        late_drains=found.exits.get(LATE, 0),
        answered_last_after=round(last - found.began - found.seconds, 1),
        latency=_latency(ledger, found.strikes),
        per_second=_per_second(ledger, found.began),
        timeline=[
            {"kind": each.kind.value, "what": each.what, "at": _ago(each.at, found), "until": _ago(each.until, found)}
            for each in sorted(found.strikes, key=lambda strike: strike.at)
        ],
    )


def _ago(at: float, found: Findings) -> float:
    return round(at - found.began, 2)


def _per_second(ledger: Ledger, began: float) -> list[int]:
    seconds = Counter(int(entry.answers[0].at - began) for entry in ledger.entries.values() if entry.answers)
    return [seconds[second] for second in range(max(seconds, default=-1) + 1)]


def _latency(ledger: Ledger, strikes: Sequence[Strike]) -> dict[str, float | None]:
    """Percentiles in seconds: from sending to the answer, and, for requests in flight at a kill,
    from the kill to the answer.
    """
    spans = [(entry.sent_at, entry.answers[0].at) for entry in ledger.entries.values() if entry.answers]
    unrest = [(each.at, each.until + _UNREST) for each in strikes]
    quiet = [(start, end) for start, end in spans if not any(at < end and start < until for at, until in unrest)]
    kills = [each.at for each in strikes if each.kind is Kind.KILL]
    recovery = [end - kill for kill in kills for start, end in spans if start < kill < end]
    found: dict[str, float | None] = {"samples in quiet": len(quiet), "in flight at kills": len(recovery)}
    for name, values in (
        ("all", [end - start for start, end in spans]),
        ("quiet", [end - start for start, end in quiet]),
        ("recovery", recovery),
    ):
        for share in (50, 99):
            found[f"{name} p{share}"] = _percentile(values, share)
        found[f"{name} max"] = _percentile(values, 100)
    return found


def _percentile(values: Iterable[float], share: int) -> float | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 3)
