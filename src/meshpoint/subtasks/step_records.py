"""The record of a step, and its form in the log of its task."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum

from meshpoint.errors import IncompatibleState, StepFailed


@dataclass(frozen=True, slots=True)
class StepPlace:
    """The place of a step in its task.

    Attributes:
        generation: Number of pauses before it.
        subtask: The subtask around it, or `None`.
        name: Its name.
        use: How often this place had used the name before.
    """

    generation: int
    subtask: str | None
    name: str
    use: int


class StepEnd(StrEnum):
    """How a step ended."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by the code around it, which cancels it again in every run


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that has ended.

    Attributes:
        text: The result as JSON text, or the parts of the failure.
        context: Changes of the task's context, as JSON text, or `None`.
    """

    place: StepPlace
    end: StepEnd
    text: str = ""
    context: str | None = None

    @classmethod
    def of_failure(
        cls, place: StepPlace, failure: StepFailed, context: str | None = None
    ) -> StepRecord:
        """Record a failure."""
        parts = [failure.error_type, failure.message, str(failure.kind)]
        return cls(place, StepEnd.FAILED, json.dumps(parts), context)

    def failure(self) -> StepFailed:
        """Rebuild the recorded failure."""
        return StepFailed(self.place.name, *json.loads(self.text))

    def without_usage(self) -> StepRecord:
        """A copy whose tokens are not counted."""
        changes = {} if self.context is None else json.loads(self.context)
        if changes.pop("token_usage", None) is None:
            return self
        return replace(self, context=json.dumps(changes) if changes else None)

    def to_bytes(self) -> bytes:
        """Encode the record: a line of JSON, and the text."""
        place = self.place
        header = [
            place.generation,
            place.subtask,
            place.name,
            place.use,
            self.end.value,
            self.context,
        ]
        line = json.dumps(header, separators=(",", ":")).encode()
        return line + b"\n" + self.text.encode("utf-8", "surrogatepass")

    @classmethod
    def from_bytes(cls, encoded: bytes) -> StepRecord:
        """Decode what `to_bytes` returned.

        Raises:
            IncompatibleState: A later version of Meshpoint wrote it, or it is damaged.
        """
        line, _, text = encoded.partition(b"\n")
        try:
            *place, end, context = json.loads(line)
            decoded = text.decode("utf-8", "surrogatepass")
            return cls(StepPlace(*place), StepEnd(end), decoded, context)
        except (ValueError, TypeError) as error:
            raise IncompatibleState(f"a step record cannot be read: {error}") from error
