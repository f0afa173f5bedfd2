"""The verdict of a run, and its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .event_counts import Effects
from .fault_injector import AppliedFault
from .fault_plan import FaultKind
from .ledger import Ledger, RequestRecord
from .leftovers import Leftovers
from .replica_pool import LATE_DRAIN

_RECOVERY_SECONDS = 10.0
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
    started_at: float
    ledger: Ledger
    applied_faults: list[AppliedFault]
    faults: dict[str, int]
    events: dict[str, int]
    exits: dict[str, int]
    may_end_twice: set[str]
    effects: Effects
    leftovers: Leftovers

    def failed_requests(self) -> dict[str, list[RequestRecord]]:
        """The failed requests, by kind of failure."""
        record_by_number = {record.work.number: record for record in self.ledger.records.values()}
        return {
            "lost": self.ledger.open_requests,
            "duplicated": [
                *self.ledger.duplicated_requests(self.may_end_twice),
                *(
                    record_by_number[number]
                    for number in sorted(self.effects.doubled_calls)
                    if number in record_by_number
                ),
            ],
            "stuck": [
                record_by_number[number]
                for number, ids in self.effects.tasks.items()
                if ids & self.leftovers.tasks and number in record_by_number
            ],
            "wrong": [
                *self.ledger.wrong_requests(),
                *(record_by_number[number] for number in sorted(self.effects.missing)),
            ],
        }


def make_report(findings: Findings) -> Report:
    """Turn the findings into a report."""
    failed, ledger = findings.failed_requests(), findings.ledger
    last = max(
        (record.answers[0].at for record in ledger.records.values() if record.answers),
        default=findings.started_at,
    )
    return Report(
        seed=findings.seed,
        seconds=findings.seconds,
        requests=len(ledger.records),
        answers=ledger.answered_count,
        lost=len(failed["lost"]),
        duplicated=len(failed["duplicated"]),
        stuck=findings.leftovers.total,
        wrong=len(failed["wrong"]) + len(ledger.unknown_replies),
        repeated=ledger.repeated_answer_count,
        faults=findings.faults,
        events=findings.events,
        exits=findings.exits,
        leftovers=findings.leftovers.to_dict(),
        effects=findings.effects.count,
        effects_repeated=findings.effects.repeated,
        effects_missing=len(findings.effects.missing),
        calls_doubled=len(findings.effects.doubled_calls),
        late_drains=findings.exits.get(LATE_DRAIN, 0),
        answered_last_after=round(last - findings.started_at - findings.seconds, 1),
        latency=_latency(ledger, findings.applied_faults),
        per_second=_per_second(ledger, findings.started_at),
        timeline=[
            {
                "kind": fault.kind.value,
                "what": fault.description,
                "at": _since_start(fault.started_at, findings),
                "until": _since_start(fault.ended_at, findings),
            }
            for fault in sorted(
                findings.applied_faults, key=lambda applied_fault: applied_fault.started_at
            )
        ],
    )


def _since_start(at: float, findings: Findings) -> float:
    return round(at - findings.started_at, 2)


def _per_second(ledger: Ledger, started_at: float) -> list[int]:
    seconds = Counter(
        int(record.answers[0].at - started_at)
        for record in ledger.records.values()
        if record.answers
    )
    return [seconds[second] for second in range(max(seconds, default=-1) + 1)]


def _latency(ledger: Ledger, applied_faults: Sequence[AppliedFault]) -> dict[str, float | None]:
    """Percentiles in seconds: from sending to the answer, and, for requests in flight at a kill,
    from the kill to the answer.
    """
    spans = [
        (record.sent_at, record.answers[0].at)
        for record in ledger.records.values()
        if record.answers
    ]
    unsettled = [
        (fault.started_at, fault.ended_at + _RECOVERY_SECONDS) for fault in applied_faults
    ]
    quiet_spans = [
        (start, end)
        for start, end in spans
        if not any(at < end and start < until for at, until in unsettled)
    ]
    kills = [each.started_at for each in applied_faults if each.kind is FaultKind.KILL]
    recovery = [end - kill for kill in kills for start, end in spans if start < kill < end]
    latencies: dict[str, float | None] = {
        "samples in quiet": len(quiet_spans),
        "in flight at kills": len(recovery),
    }
    for name, values in (
        ("all", [end - start for start, end in spans]),
        ("quiet", [end - start for start, end in quiet_spans]),
        ("recovery", recovery),
    ):
        for share in (50, 99):
            latencies[f"{name} p{share}"] = _percentile(values, share)
        latencies[f"{name} max"] = _percentile(values, 100)
    return latencies


def _percentile(values: Iterable[float], share: int) -> float | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 3)
