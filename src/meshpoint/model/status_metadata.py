"""The metadata of a status update: its kind, number and origin.

It travels in the metadata of the A2A status update. Earlier releases ignore it and show the
content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeGuard

from pydantic import JsonValue

from meshpoint.model.messages import is_agent_name, is_valid_name

MAX_PATH_LENGTH = 32
"""Maximum agents in the path of a status update. The agents nearest to the caller are kept."""
_MAX_NUMBER = 2**53


class UpdateKind(StrEnum):
    """What the content of a status update is."""

    STATUS = "status"  # the JSON given to `ctx.update_status`
    TEXT = "text"  # the next piece of the response
    ARTIFACT = "artifact"
    QUESTION = "question"  # a question that the task now waits for


@dataclass(frozen=True, slots=True)
class StatusNumber:
    """The place of a status update among all updates of its task.

    Attributes:
        generation: Number of the task's pauses before this run.
        fence: Grows with each run of a task that has a row; 0 without one.
        run: Id of the run. Of runs with equal fences, the one with the greater id is the later.
        position: Grows within the run. Gaps are allowed.
    """

    generation: int
    fence: int
    run: str
    position: int

    def is_of_later_run(self, other: StatusNumber) -> bool:
        """Whether its run began after the run of `other`."""
        return self.run != other.run and (self.fence, self.run) > (other.fence, other.run)


@dataclass(frozen=True, slots=True)
class StatusMetadata:
    """The metadata of a status update.

    Attributes:
        number: `None` if the sender does not number its updates.
        path: Names of the agents below the sender, from its own peer to the reporting agent.
            Empty for updates of the sender's own task.
        source: Id of the reporting task, or `None` for updates of the sender's own task.
    """

    kind: UpdateKind = UpdateKind.STATUS
    number: StatusNumber | None = None
    path: tuple[str, ...] = ()
    source: str | None = None

    def to_json(self) -> dict[str, JsonValue]:
        """The metadata as sent."""
        metadata: dict[str, JsonValue] = {}
        if self.kind is not UpdateKind.STATUS:
            metadata["kind"] = self.kind.value
        if (number := self.number) is not None:
            metadata |= {name: getattr(number, name) for name in _NUMBER_FIELDS}
        if self.path:
            metadata |= {"path": list(self.path), "source": self.source}
        return metadata

    @classmethod
    def from_json(cls, metadata: Mapping[str, JsonValue]) -> StatusMetadata:
        """Read metadata. Entries that are missing or invalid count as not sent."""
        kind, path = metadata.get("kind"), _read_path(metadata.get("path"))
        source = metadata.get("source")
        is_nested = bool(path) and isinstance(source, str) and is_valid_name(source)
        return cls(
            UpdateKind(kind) if isinstance(kind, str) and kind in _KINDS else UpdateKind.STATUS,
            _read_number(metadata),
            path if is_nested else (),
            str(source) if is_nested else None,
        )

    def forwarded(self, peer: str, task_id: str) -> StatusMetadata:
        """The metadata under which the requester of `peer` forwards the update.

        `task_id` is the id of the task of `peer`.
        """
        path = (peer, *self.path)[:MAX_PATH_LENGTH]
        return replace(self, path=path, source=self.source or task_id)

    @property
    def origin(self) -> str:
        """A short key of the task that reports; empty for the task itself."""
        if not self.path:
            return ""
        text = "\n".join((*self.path, self.source or ""))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


NO_METADATA = StatusMetadata()
"""The metadata of a status update that has only content."""
_KINDS = frozenset(kind.value for kind in UpdateKind)
_NUMBER_FIELDS = ("generation", "fence", "run", "position")


def _read_number(metadata: Mapping[str, JsonValue]) -> StatusNumber | None:
    generation, fence = metadata.get("generation"), metadata.get("fence")
    run, position = metadata.get("run"), metadata.get("position")
    if not (_is_count(generation) and _is_count(fence) and _is_count(position)):
        return None
    if not isinstance(run, str) or not run or not is_valid_name(run):
        return None
    return StatusNumber(generation, fence, run, position)


def _is_count(value: JsonValue) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NUMBER


def _read_path(value: JsonValue) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_PATH_LENGTH:
        return ()
    names = tuple(name for name in value if isinstance(name, str) and is_agent_name(name))
    return names if len(names) == len(value) else ()
