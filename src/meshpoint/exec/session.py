"""Sessions of `meshpoint exec`: one operation and its attempts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal

from pydantic import AwareDatetime, BaseModel, JsonValue

from meshpoint.errors import ConfigurationError
from meshpoint.exec.report import StepReport
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.json_values import document_digest

NO_EXPIRY = timedelta(days=36_500)
"""TTL of sessions that are never deleted."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,50}")  # part of a namespace and of file names


class AttemptStatus(StrEnum):
    """How an attempt ended. `KILLED`: its process died before it recorded an end."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    KILLED = "killed"


class AttemptRecord(BaseModel, extra="forbid"):
    """One attempt of a session.

    `flow` is the number of the version of the flow that it ran. `ending` is `None` while it runs.
    """

    number: int
    pid: int
    flow: int | None = None
    started: AwareDatetime
    ended: AwareDatetime | None = None
    ending: AttemptStatus | None = None
    error: str | None = None
    steps: list[StepReport] = []


class Session(BaseModel, extra="forbid"):
    """One operation and its attempts. `again` has reasons why imported steps must run again."""

    format: Literal["meshpoint-session/1"] = "meshpoint-session/1"
    id: str
    entrypoint: str
    agent: AgentName
    input: JsonValue
    input_digest: str
    operation_id: TaskId
    created_at: AwareDatetime
    expires_at: AwareDatetime
    again: dict[str, str] = {}
    attempts: list[AttemptRecord] = []

    @property
    def namespace(self) -> str:
        """Namespace of its broker and database."""
        return session_namespace(self.id)

    @property
    def last_status(self) -> AttemptStatus | None:
        """How the last attempt ended; `None` before the first one, or if no end is recorded."""
        return self.attempts[-1].ending if self.attempts else None

    @property
    def last_flow(self) -> int | None:
        """Number of the version of the flow that the last attempt ran; `None` if unknown."""
        return self.attempts[-1].flow if self.attempts else None

    @property
    def last_used_at(self) -> datetime:
        """When the last attempt began."""
        return self.attempts[-1].started if self.attempts else self.created_at


@dataclass(frozen=True, slots=True)
class ExecInput:
    """The input of an operation."""

    value: JsonValue

    @property
    def digest(self) -> str:
        """Digest that identifies the input."""
        return document_digest(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The requested session: its agent and input, and how long to keep it after its last attempt.

    Without `input`, the session must exist and have one.
    """

    entrypoint: str
    agent: AgentName
    input: ExecInput | None
    ttl: timedelta

    @property
    def required_input(self) -> ExecInput:
        """The input.

        Raises:
            ConfigurationError: No input was given.
        """
        if self.input is None:
            fix = "use --input JSON or --input @FILE"
            raise ConfigurationError("--input", "a new session needs an input", fix)
        return self.input


def is_session_id(text: str) -> bool:
    """Whether `text` can be the id of a session, and thus part of the name of its files."""
    return _ID.fullmatch(text) is not None


def validate_session_id(session_id: str) -> str:
    """Return `session_id`.

    Raises:
        ConfigurationError: It is not a valid id.
    """
    if not is_session_id(session_id):
        fix = "use letters, digits, '_' and '-' (51 at most)"
        raise ConfigurationError("session", f"{session_id!r} is not a valid session id", fix)
    return session_id


def session_namespace(session_id: str) -> str:
    """Return the namespace of a session's broker and database."""
    return f"exec-{session_id}"
