"""What the demonstration comes to, as numbers that must be right."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The account at the end.

    `duplicated` counts tasks that came to more than one end. `repeated` counts answers that were delivered again,
    which the requester drops: it changes nothing, and is shown so that nothing is hidden.
    """

    requests: int
    answers: int
    failed: int  # answers that are errors
    duplicated: int
    repeated: int
    paused_in_killed: int  # tasks that were paused by the first replica when it was killed
    running_in_killed: int  # segments of tasks that were running in the second when it was killed
    resumed_elsewhere: int  # tasks that one replica paused and another one went on with
    rescued: int  # tasks whose replica died in the middle of a segment
    seconds: float

    @property
    def lost(self) -> int:
        """Requests without an answer."""
        return self.requests - self.answers

    @property
    def failed_checks(self) -> tuple[str, ...]:
        """The names of the numbers that are not what they must be."""
        must_be_zero = ("lost", "failed", "duplicated")
        must_be_positive = ("requests", "paused_in_killed", "running_in_killed", "resumed_elsewhere", "rescued")
        return (
            *(name for name in must_be_zero if getattr(self, name) != 0),
            *(name for name in must_be_positive if getattr(self, name) < 1),
        )

    @property
    def ok(self) -> bool:
        """Whether every number is what it must be."""
        return not self.failed_checks

    def to_dict(self) -> dict[str, Any]:
        """The account for scripts."""
        counts = asdict(self)
        headline = {name: counts.pop(name) for name in ("requests", "answers")}
        return {"ok": self.ok, **headline, "lost": self.lost, **counts, "wrong": list(self.failed_checks)}
