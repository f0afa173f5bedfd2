"""The results of the demo, as numbers that can be checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The final numbers.

    `duplicated` counts tasks with more than one outcome. `repeated` counts answers that were
    delivered again and dropped by the requester: harmless, but shown for completeness.
    """

    requests: int
    answers: int
    failed: int  # answers that are errors
    duplicated: int
    repeated: int
    paused_in_killed: int  # tasks that the first killed replica had paused
    running_in_killed: int  # segments running in the second killed replica
    resumed_elsewhere: int  # tasks paused by one replica and resumed by another
    rescued: int  # tasks whose replica died in the middle of a segment
    seconds: float

    @property
    def lost(self) -> int:
        """Number of requests without an answer."""
        return self.requests - self.answers

    @property
    def failed_checks(self) -> tuple[str, ...]:
        """Names of the numbers that are not as expected."""
        must_be_zero = ("lost", "failed", "duplicated")
        must_be_positive = ("requests", "paused_in_killed", "running_in_killed", "resumed_elsewhere", "rescued")
        return (
            *(name for name in must_be_zero if getattr(self, name) != 0),
            *(name for name in must_be_positive if getattr(self, name) < 1),
        )

    @property
    def ok(self) -> bool:
        """Whether all numbers are as expected."""
        return not self.failed_checks

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger for JSON output."""
        counts = asdict(self)
        headline = {name: counts.pop(name) for name in ("requests", "answers")}
        return {"ok": self.ok, **headline, "lost": self.lost, **counts, "wrong": list(self.failed_checks)}
