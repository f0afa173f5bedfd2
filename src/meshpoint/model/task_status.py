"""The status of a task, as `TaskHandle.status` returns it and as replicas send it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal, TypeAlias

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_WAITS = 100
"""Maximum waits that a status lists. Questions come first."""

WaitKind: TypeAlias = Literal["peer", "sleep", "question", "signal", "other"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


class OpenWait(_Value):
    """Something that a task waits for.

    Attributes:
        kind: "peer", "sleep", "question" or "signal"; "other" for kinds that a later release adds.
        name: Name of the peer, the question or the signal; "sleep" for a sleep.
        since: When the task paused for it.
        until: When the wait ends without a result, or the sleep ends; `None` if never. Status
            updates of a peer may extend it.
        question_id: Id of a question, for `Mesh.complete` and `Mesh.reject`.
        prompt: Prompt of a question; at most its first 300 characters.
    """

    kind: WaitKind
    name: str
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    question_id: str | None = None
    prompt: str | None = None

    def __str__(self) -> str:
        name = self.kind if self.kind == "sleep" else f"{self.kind} {self.name!r}"
        since = "" if self.since is None else f" since {_format_time(self.since)}"
        return name + since + ("" if self.until is None else f" until {_format_time(self.until)}")


ENDED_STATES = frozenset({"completed", "failed", "cancelled"})
"""The states of a `TaskStatus` in which the task has an outcome."""


class TaskStatus(_Value):
    """What is known about a task.

    Attributes:
        state: "running", "waiting", "ready" (it waits for a free slot or for its start), "parked"
            (the agent's current code cannot continue it), "completed", "failed" or "cancelled";
            "queued" if no replica has received its request yet; "unknown" if no replica says.
        is_served: Whether a replica of the agent has replied within five seconds, or the outcome
            is known here.
        is_suspended: Whether a person has suspended it.
        reason: Why it is parked.
        waits: The open waits, questions first; at most 100.
        wait_count: Number of open waits.
    """

    state: Literal[
        "queued",
        "running",
        "waiting",
        "ready",
        "parked",
        "completed",
        "failed",
        "cancelled",
        "unknown",
    ]
    is_served: bool = True
    is_suspended: bool = False
    reason: str | None = None
    waits: Annotated[tuple[OpenWait, ...], Field(max_length=MAX_WAITS)] = ()
    wait_count: int = 0

    def __str__(self) -> str:
        facts = [
            "" if self.is_served else "no replica has replied",
            "suspended" if self.is_suspended else "",
            self.reason or "",
            *map(str, self.waits),
            f"and {more} more" if (more := self.wait_count - len(self.waits)) > 0 else "",
        ]
        return ": ".join(filter(None, (self.state, "; ".join(filter(None, facts)))))


def _format_time(instant: datetime) -> str:
    return f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
