"""The points at which a test can kill a replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from meshpoint.model.events import Event, Phase, Step

CrashPoint: TypeAlias = Literal[
    "request",
    "segment",
    "step",
    "subtask",
    "record",
    "checkpoint",
    "dispatch",
    "response",
    "signal",
    "resume",
    "end",
    "reply",
    "ack",
]
"""What a replica does for a task:

- `request`: it looks up a request that has arrived;
- `segment`: code of the agent runs, up to its next pause or its end;
- `step`, `subtask`: the function of a `ctx.step` or `ctx.subtask` runs;
- `record`: the results of steps and subtasks, or a value, are written;
- `checkpoint`: a pause is written;
- `dispatch`: the calls of a pause are sent;
- `response`: a peer's response, or an answer, is written;
- `signal`: a signal is written;
- `resume`: a task is restored for its next segment;
- `end`: the outcome is written;
- `reply`: the outcome is sent;
- `ack`: a message is acked.
"""

When: TypeAlias = Literal["before", "after"]

_POINTS: Mapping[Step, CrashPoint] = {
    Step.RECEIVE: "request",
    Step.SEGMENT: "segment",
    Step.STEP: "step",
    Step.SUBTASK: "subtask",
    Step.RECORD: "record",
    Step.SAVE: "record",
    Step.SET_VALUE: "record",
    Step.CHECKPOINT: "checkpoint",
    Step.DISPATCH: "dispatch",
    Step.CLAIM: "response",
    Step.SIGNAL: "signal",
    Step.RESTORE: "resume",
    Step.END: "end",
    Step.REPLY: "reply",
    Step.ACK: "ack",
}
_WHEN: Mapping[Phase, When] = {Phase.BEFORE: "before", Phase.AFTER: "after"}


@dataclass
class PlannedCrash:
    """Kill a replica at this point: after `skip` passes, on each of the next `times` passes."""

    when: When
    point: CrashPoint
    times: int = 1
    skip: int = 0

    def __post_init__(self) -> None:
        if self.point not in get_args(CrashPoint):
            known = ", ".join(get_args(CrashPoint))
            raise ValueError(
                f"{self.when}={self.point!r}: there is no such point; the points are {known}"
            )
        if self.times < 1:
            raise ValueError(f"times is {self.times}; it must be positive")

    def __str__(self) -> str:
        return f"{self.when}={self.point!r}"

    def is_at(self, event: Event) -> bool:
        """Count a pass of the point. Returns `True` if the replica dies now."""
        if find_point(event) != (self.when, self.point):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


def find_point(event: Event) -> tuple[When, CrashPoint] | None:
    """The crash point of an event, or `None`."""
    point, when = _POINTS.get(event.step), _WHEN.get(event.phase)
    return None if point is None or when is None else (when, point)
