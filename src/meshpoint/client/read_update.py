"""Read an update from a status message."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any, Literal

from meshpoint.client.updates import (
    ArtifactUpdate,
    LiveUpdate,
    QuestionUpdate,
    StatusUpdate,
    TextDelta,
)
from meshpoint.errors import QuestionNotOpen
from meshpoint.model.bodies import A2ATaskState, StatusBody
from meshpoint.model.envelopes import KEEP_ALIVE
from meshpoint.model.messages import Message
from meshpoint.model.questions import QuestionKey
from meshpoint.model.status_metadata import StatusMetadata, UpdateKind

_STATES: dict[A2ATaskState, Literal["submitted", "working"]] = {
    A2ATaskState.SUBMITTED: "submitted",
    A2ATaskState.WORKING: "working",
}


_MAX_QUESTION_ID_LENGTH = 4_000
"""Maximum characters of the id of a question. Its three names have at most 248 bytes each."""


def read_update(
    message: Message, body: StatusBody, metadata: StatusMetadata, *, reset: bool
) -> LiveUpdate | None:
    """The update in a status message, or `None` for keep-alives and unknown states."""
    status = body.status_update.status
    if (state := _STATES.get(status.state)) is None:
        return None
    part = status.message.parts[0] if status.message else None
    content = None if part is None else part.data if part.text is None else part.text
    if content == KEEP_ALIVE:
        return None
    fields: dict[str, Any] = {
        "id": _update_id(message, metadata),
        "at": _parse_time(status.timestamp),
        "path": metadata.path,
        "task_id": metadata.source or message.correlation_id,
        "generation": None if metadata.number is None else metadata.number.generation,
        "reset": reset,
    }
    match metadata.kind, content:
        case UpdateKind.TEXT, str(text):
            return TextDelta(text=text, **fields)
        case UpdateKind.ARTIFACT, dict(artifact):
            return ArtifactUpdate(artifact=artifact, **fields)
        case UpdateKind.QUESTION, {
            "name": str(name),
            "questionId": str(question_id),
            "prompt": str() | None as prompt,
            "answerSchema": dict(schema),
        } if _is_of_task(question_id, fields["task_id"]):
            if metadata.number is None:  # a snapshot: the same in each
                fields["id"] = _digest(question_id)
            fields |= {"question_id": question_id, "prompt": prompt, "answer_schema": schema}
            return QuestionUpdate(name=name, **fields)
        case _:
            return StatusUpdate(state=state, message=content, **fields)


def _is_of_task(question_id: str, task_id: str) -> bool:
    """Whether the id is of a question of this task, and not of another one's."""
    if len(question_id) > _MAX_QUESTION_ID_LENGTH:
        return False
    try:
        return QuestionKey.from_id(question_id).task_id == task_id
    except QuestionNotOpen:
        return False


def _update_id(message: Message, metadata: StatusMetadata) -> str:
    if (number := metadata.number) is None:
        return _digest(message.message_id)
    run = f"{number.generation}.{number.fence}.{number.run}.{number.position}"
    return f"{metadata.origin}.{run}" if metadata.path else run


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=12).hexdigest()


def _parse_time(text: str | None) -> datetime:
    """The time of a message; now if it is missing or has no time zone."""
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return datetime.now(UTC)
    return time if time.tzinfo is not None else datetime.now(UTC)
