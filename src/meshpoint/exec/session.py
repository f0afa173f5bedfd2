"""A session of `meshpoint exec`: one operation, and the attempts at it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from meshpoint.errors import ConfigurationError
from meshpoint.exec.canonical import digest_of
from meshpoint.exec.report import StepReport
from meshpoint.model.ids import AgentName, TaskId

NEVER = timedelta(days=36_500)
"""The time of what is not deleted."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,50}")  # a namespace is made of it


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Ending(StrEnum):
    """How an attempt ended. KILLED: its process was gone before it could tell."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    KILLED = "killed"


class AttemptEntry(_Kept):
    """One attempt, as its session remembers it. `ending` is None while it runs."""

    number: int
    pid: int
    started: datetime
    ended: datetime | None = None
    ending: Ending | None = None
    error: str | None = None
    steps: list[StepReport] = []


class Session(_Kept):
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
    attempts: list[AttemptEntry] = []

    @property
    def namespace(self) -> str:
        """Of its broker and database."""
        return namespace_of(self.id)

    @property
    def ending(self) -> Ending | None:
        """How its last attempt ended; None: it has none, or that one has not told."""
        return self.attempts[-1].ending if self.attempts else None

    @property
    def last_use(self) -> datetime:
        """When its last attempt began."""
        return self.attempts[-1].started if self.attempts else self.created_at


@dataclass(frozen=True, slots=True)
class Input:
    """The input of an operation."""

    value: JsonValue

    @property
    def digest(self) -> str:
        """What tells it from others."""
        return digest_of(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The session that is asked for: of this agent, kept for `ttl` after its last attempt.

    Without `input` it is one that has one.
    """

    entrypoint: str
    agent: AgentName
    input: Input | None
    ttl: timedelta

    @property
    def given(self) -> Input:
        """The input.

        Raises:
            ConfigurationError: there is none.
        """
        if self.input is None:
            raise ConfigurationError("--input", "a new session needs one", "give --input JSON or --input @FILE")
        return self.input


def namespace_of(id_: str) -> str:
    """The namespace of a session's broker and database."""
    return f"exec-{id_}"


def checked_id(id_: str) -> str:
    """`id_`, if it can name a session.

    Raises:
        ConfigurationError: it cannot.
    """
    if not _ID.fullmatch(id_):
        fix = "use letters, digits, '_' and '-' (51 at most)"
        raise ConfigurationError("session", f"{id_!r} is no id of a session", fix)
    return id_
