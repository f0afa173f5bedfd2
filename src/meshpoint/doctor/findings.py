"""What the doctor reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import JsonValue

from meshpoint.errors import ConfigurationError

CONFIG = "CONFIG.yaml"
"""Placeholder for the examined file in the fix of a finding."""


class Severity(StrEnum):
    """How bad a finding is, worst first."""

    ERROR = "error"  # replicas would not start, or would not work
    UNAVAILABLE = "unavailable"  # a server does not answer, so that checks are missing
    WARNING = "warning"  # tasks would wait for something that this deploy does not bring
    NOTE = "note"  # what happens anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        check: a stable name for scripts, such as `tasks.unread`.
        subject: the agent or the server.
        problem: the cause.
        fix: what to do; empty if nothing.
        data: the values in `problem`, for scripts.
    """

    check: str
    severity: Severity
    subject: str
    problem: str
    fix: str = ""
    data: dict[str, JsonValue] = field(default_factory=dict)


def error(check: str, subject: str, problem: str, fix: str = "", **data: JsonValue) -> Finding:
    """A finding that must stop a deploy."""
    return _finding(Severity.ERROR, check, subject, problem, fix, data)


def warning(check: str, subject: str, problem: str, fix: str = "", **data: JsonValue) -> Finding:
    """A finding that a person should look at."""
    return _finding(Severity.WARNING, check, subject, problem, fix, data)


def note(check: str, subject: str, problem: str, fix: str = "", **data: JsonValue) -> Finding:
    """A finding that needs no action."""
    return _finding(Severity.NOTE, check, subject, problem, fix, data)


def unavailable(check: str, subject: str, problem: str, fix: str) -> Finding:
    """A server that does not answer."""
    return _finding(Severity.UNAVAILABLE, check, subject, problem, fix, {})


def refused(check: str, subject: str, refusal: ConfigurationError) -> Finding:
    """A server that refuses what the configuration says."""
    problem = f"{refusal.key}: {refusal.problem}"
    return _finding(Severity.ERROR, check, subject, problem, refusal.fix, {})


def worst(findings: Sequence[Finding]) -> Severity:
    """The worst severity of `findings`, `NOTE` if they are empty."""
    order = list(Severity)
    return min((each.severity for each in findings), key=order.index, default=Severity.NOTE)


def _finding(
    severity: Severity,
    check: str,
    subject: str,
    problem: str,
    fix: str,
    data: dict[str, JsonValue],
) -> Finding:
    return Finding(
        check=check, severity=severity, subject=subject, problem=problem, fix=fix, data=data
    )
