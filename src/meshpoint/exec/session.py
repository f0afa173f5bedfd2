"""A session of `meshpoint exec`: one operation, and the attempts at it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from meshpoint.errors import ConfigurationError
from meshpoint.exec.canonical import json_digest
from meshpoint.exec.report import StepReport
from meshpoint.model.ids import AgentName, TaskId

NO_EXPIRY = timedelta(days=36_500)
"""The time of what is not deleted."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,50}")  # a namespace is made of it


class _SessionModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AttemptStatus(StrEnum):
    """How an attempt ended. KILLED: its process was gone before it could tell."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    KILLED = "killed"


class AttemptRecord(_SessionModel):
    """One attempt, as its session remembers it. `ending` is None while it runs."""

    number: int
    pid: int
    started: datetime
    ended: datetime | None = None
    ending: AttemptStatus | None = None
    error: str | None = None
    steps: list[StepReport] = []


class Session(_SessionModel):
    """A line of attempts at one operation. `again` says why steps that a file brought along run again."""

    format: Literal["meshpoint-session/1"] = "meshpoint-session/1"
    id: str
    entrypoint: str
    agent: AgentName
    input: JsonValue
    input_digest: str
    operation_id: TaskId
    created_at: datetime
    expires_at: datetime
    again: dict[str, str] = {}
    attempts: list[AttemptRecord] = []

    @property
    def namespace(self) -> str:
        """Of its broker and database."""
        return session_namespace(self.id)

    @property
    def last_status(self) -> AttemptStatus | None:
        """How its last attempt ended; None: it has none, or that one has not told."""
        return self.attempts[-1].ending if self.attempts else None

    @property
    def last_used_at(self) -> datetime:
        """When its last attempt began."""
        return self.attempts[-1].started if self.attempts else self.created_at


@dataclass(frozen=True, slots=True)
class ExecInput:
    """The input of an operation."""

    value: JsonValue

    @property
    def digest(self) -> str:
        """What tells it from others."""
        return json_digest(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The session that is asked for: of this agent, kept for `ttl` after its last attempt.

    Without `input` it is one that has one.
    """

    entrypoint: str
    agent: AgentName
    input: ExecInput | None
    ttl: timedelta

    @property
    def required_input(self) -> ExecInput:
        """The input.

        Raises:
            ConfigurationError: there is none.
        """
        if self.input is None:
            raise ConfigurationError("--input", "a new session needs one", "give --input JSON or --input @FILE")
        return self.input


def session_namespace(session_id: str) -> str:
    """The namespace of a session's broker and database."""
    return f"exec-{session_id}"


def validate_session_id(session_id: str) -> str:
    """`session_id`, if it can name a session.

    Raises:
        ConfigurationError: it cannot.
    """
    if not _ID.fullmatch(session_id):
        fix = "use letters, digits, '_' and '-' (51 at most)"
        raise ConfigurationError("session", f"{session_id!r} is no id of a session", fix)
    return session_id
