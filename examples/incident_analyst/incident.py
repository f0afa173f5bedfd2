"""Types, peers and the question, shared by the service and the agents."""

from __future__ import annotations

import os
from datetime import timedelta

from pydantic import AwareDatetime, BaseModel, Field

from meshpoint import Peer, Question, RetryPolicy

DAY = timedelta(seconds=float(os.environ.get("INCIDENT_DAY_SECONDS", "86400")))
"""Shorten the day to see reminders and the follow-up within seconds."""


ID_PATTERN = r"^[A-Za-z0-9-]{1,64}$"


class Incident(BaseModel):
    id: str = Field(pattern=ID_PATTERN)
    service: str
    summary: str


class Finding(BaseModel):
    source: str
    text: str


class Draft(BaseModel):
    """A proposed cause. `answers` has one answer for each objection of the critic."""

    incident: Incident
    cause: str
    answers: list[str]
    written_at: AwareDatetime


class Review(BaseModel):
    objection: str | None


class Decision(BaseModel):
    approved: bool
    by: str


class Report(BaseModel):
    """The result. `timeline` is what the analyst noted in its working memory."""

    cause: str
    written_at: AwareDatetime
    decision: Decision
    reminders: int
    follow_up: str | None
    timeline: list[str]


ask_analyst = Peer("analyst", Incident, Report)
ask_logs = Peer("logs", str, Finding)
ask_metrics = Peer(
    "metrics",
    str,
    Finding,
    retry=RetryPolicy(max_attempts=12, initial_interval=0.2, max_interval=5),
)
ask_changes = Peer("changes", str, Finding)
ask_owner = Peer("owners", str, str)
ask_critic = Peer("critic", Draft, Review)

approval = Question("approval", Decision)
