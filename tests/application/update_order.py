"""Check the order of a task's updates, as a caller sees them over several streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Number:
    generation: int
    fence: int
    run: str
    position: int


class UpdateOrder:
    """Per reporting task: a greater position within a run, and otherwise a later run.

    A run that repeats a generation must begin with `reset`.
    """

    def __init__(self) -> None:
        self._latest: dict[str, _Number] = {}
        self._is_first = False

    def begin_stream(self) -> None:
        """Begin another stream. If it cannot continue the last one, it begins with `reset`."""
        self._is_first = True

    def find_problem(self, update: dict[str, Any]) -> str | None:
        """What is wrong with the place of this update, or `None`."""
        if self._is_first and update["reset"]:
            self._latest.clear()
        self._is_first = False
        if "." not in update["id"]:  # an open question, shown to a stream that is opened late
            return None
        origin, number = _parse_id(update["id"])
        latest = self._latest.get(origin)
        self._latest[origin] = number
        if latest is None:
            return None
        if number.run == latest.run:
            is_later = number.position > latest.position
        else:
            is_later = (number.fence, number.run) > (latest.fence, latest.run)
        if not is_later:
            return f"{number} after {latest}"
        is_repeated = number.run != latest.run and number.generation <= latest.generation
        return (
            f"{number} repeats {latest} without reset"
            if is_repeated and not update["reset"]
            else None
        )


def _parse_id(update_id: str) -> tuple[str, _Number]:
    *origin, generation, fence, run, position = update_id.split(".")
    return ".".join(origin), _Number(int(generation), int(fence), run, int(position))
