"""Events as log lines, for people on a terminal or as JSON for machines, without payloads."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from textwrap import indent
from typing import Any, TextIO, TypedDict

from pydantic import JsonValue

from meshpoint.model.error_text import escape_unprintable
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.log_context import NO_TASK, LogContextFilter
from meshpoint.model.outcomes import FailureKind

_WARNING_STEPS = frozenset(
    {
        Step.FENCED,
        Step.DEGRADED,
        Step.DEAD_LETTER,
        Step.TASK_FAILED,
        Step.DEAD_TASK,
        Step.PARKED,
        Step.UNREAD,
        Step.STORE_UNAVAILABLE,
        Step.BROKER_UNAVAILABLE,
        Step.ROW_LOCKED,
        Step.REPLY_UNROUTABLE,
        Step.PEER_MISSING,
        Step.UNDELIVERABLE,
        Step.STATUS_DROPPED,
        Step.REPLY_DROPPED,
        Step.MESSAGE_REJECTED,
        Step.LEASE_LOST,
        Step.OWNER_LOST,
        Step.ISOLATED,
        Step.ISOLATED_PROCESS_DIED,
        Step.DEFECT,
        Step.ABANDONED,
        Step.MEMORY_FULL,
        Step.MEMORY_PROBLEM,
        Step.SUBTASK_DIFFERS,
    }
)
_INFO_STEPS = frozenset(
    {Step.STARTED, Step.DRAINING, Step.DRAINED, Step.STORE_AVAILABLE, Step.BROKER_AVAILABLE}
)
_TASK_INFO_STEPS = frozenset(
    {
        Step.CHECKPOINT,
        Step.RESTORE,
        Step.END,
        Step.CANCEL,
        Step.CODE_CANCELLED,
        Step.RESCUE,
        Step.SAVE,
        Step.RESUME,
        Step.CALL_RETRIED,
        Step.SUBTASK_REUSED,
        Step.SUBTASK_RERUN,
        Step.CHECKPOINT_RESTORED,
        Step.CHECKPOINT_COPY,
        Step.MEMORY_RECOVERED,
    }
)
_TRACE = logging.DEBUG // 2
"""Level of sweep queries that find no work: several per sweep, which has an event of its own."""
_NOISY_LOGGERS = ("aio_pika", "aiormq", "aiosqlite", "sqlalchemy")
_EXPECTED_ERRORS = frozenset(
    {"CancelledError", "StoreUnavailable", "CommitInDoubt", "BrokerUnavailable"}
)
"""Draining cancels running steps, and outages have their own events: such failures are debug."""
_MAX_VALUE_LENGTH = 200
"""Characters of a string in a log line. Details describe events and must not leak payloads."""
_MAX_FAILURE_LENGTH = 8_000
"""Maximum characters of a failed task's reason and traceback. Secrets in both are masked."""
_MAX_IDS_SHOWN = 3


class LogSettings(TypedDict):
    """Log settings of this process, passed on to its child processes."""

    level: str
    as_json: bool


_log_settings: LogSettings = {"level": "warning", "as_json": False}


def log_settings() -> LogSettings:
    """The log settings of this process."""
    return _log_settings


class LoggingObserver:
    """Writes events to the logger `meshpoint.events`.

    Lost or delayed work is logged as a warning, milestones of a task as info, everything else as
    debug. Safe to call from any thread.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("meshpoint.events")

    def emit(self, event: Event) -> None:
        """Log `event` if its level is enabled."""
        level = level_of(event)
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", _EventLine(event), extra={"event": _fields(event)})


def level_of(event: Event) -> int:
    """The log level of `event`: WARNING, INFO or DEBUG, or below DEBUG for sweep queries."""
    if event.step.is_search and event.phase is not Phase.AFTER:
        return _TRACE  # the enclosing sweep reports the failure
    if event.phase is Phase.FAILED:
        return (
            logging.DEBUG
            if event.detail.get("error_type") in _EXPECTED_ERRORS
            else logging.WARNING
        )
    if event.step in _WARNING_STEPS and event.phase is Phase.INFO:
        return logging.INFO if _is_ordinary_end(event) else logging.WARNING
    if event.step in _INFO_STEPS and event.phase is Phase.INFO:
        return logging.INFO
    if (
        event.step in _TASK_INFO_STEPS
        and event.phase in {Phase.AFTER, Phase.INFO}
        and event.task_ids
    ):
        return logging.INFO
    return logging.DEBUG


def _is_ordinary_end(event: Event) -> bool:
    """Whether a task was cancelled, or its request refused: senders cause any number of these."""
    return event.step is Step.TASK_FAILED and (
        event.detail.get("kind") == FailureKind.CANCELLED.value
        or event.detail.get("refused") is True
    )


@contextmanager
def logging_to(stream: TextIO, level: str, *, as_json: bool = False) -> Iterator[None]:
    """Send this process's logs to `stream` while the block runs.

    A terminal gets readable lines if rich is installed; otherwise, or with `as_json`, each record
    is a JSON line. A separate thread writes, so a slow terminal does not block the event loop.
    """
    global _log_settings  # noqa: PLW0603 - process-wide, like the root logger
    handler: logging.Handler
    previous_settings, _log_settings = _log_settings, LogSettings(level=level, as_json=as_json)
    if stream.isatty() and not as_json and find_spec("rich") is not None:
        handler = _rich_handler(stream)
    else:
        handler = logging.StreamHandler(stream)
        handler.setFormatter(_JsonLinesFormatter())
    records: SimpleQueue[Any] = SimpleQueue()
    queue = QueueHandler(records)
    queue.addFilter(LogContextFilter())  # runs in the thread that logs
    listener = QueueListener(records, handler)
    root = logging.getLogger()
    previous_level = root.level
    root.addHandler(queue)
    root.setLevel(level.upper())
    _silence_libraries(level)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(queue)
        root.setLevel(previous_level)
        _log_settings = previous_settings
        listener.stop()


class _JsonLinesFormatter(logging.Formatter):
    """Formats each record as one JSON object, with an event's fields next to the record's own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return `record` as a single JSON line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event = getattr(record, "event", None)
        if event is None:
            event = _context_fields(record) | {"message": super().format(record)}
        return json.dumps(line | event, default=str)


class _ContextFormatter(logging.Formatter):
    """Formats records logged by agent code with the agent and the task."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message of `record`."""
        text = super().format(record)
        fields = {} if hasattr(record, "event") else _context_fields(record)
        if not fields:
            return text
        return escape_unprintable(f"{fields['agent']} {fields['task_id']}: ") + text


def _context_fields(record: logging.LogRecord) -> dict[str, Any]:
    """The task fields of a record logged by agent code; empty for other records."""
    names = ("task_id", "agent", "generation")
    fields = {name: getattr(record, name, NO_TASK) for name in names}
    return {} if NO_TASK in fields.values() else fields


class _EventLine:
    """Formats an event only when a handler writes it."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def __str__(self) -> str:
        event, shown = self._event, ", ".join(self._event.task_ids[:_MAX_IDS_SHOWN])
        more = len(event.task_ids) - _MAX_IDS_SHOWN
        phase = "" if event.phase in {Phase.INFO, Phase.AFTER} else f" {event.phase}"
        parts = [
            f"{event.agent} {event.replica[-8:]} {event.step}{phase}",
            shown + (f" and {more} more" * (more > 0)),
        ]
        detail = _scalars(event)
        traceback = detail.pop("traceback", None)
        # `error` begins with the type.
        parts += [f"{key}={value}" for key, value in detail.items() if key != "error_type"]
        line = escape_unprintable(" ".join(filter(None, parts)))
        if isinstance(traceback, str):  # indented, so that none of its lines looks like a record
            escaped = escape_unprintable(traceback, allowed="\n")
            line += "\n" + indent(escaped, "  ", lambda _: True)
        return line


def _fields(event: Event) -> dict[str, JsonValue]:
    fields: dict[str, JsonValue] = {
        "step": event.step.value,
        "phase": event.phase.value,
        "agent": event.agent,
        "replica": event.replica,
    }
    if event.task_ids:
        fields["task_ids"] = list(event.task_ids)
    detail = _scalars(event)
    return fields | {"detail": detail} if detail else fields


def _scalars(event: Event) -> dict[str, JsonValue]:
    limit = _MAX_FAILURE_LENGTH if event.step is Step.TASK_FAILED else _MAX_VALUE_LENGTH
    return {
        key: value[:limit] if isinstance(value, str) else value
        for key, value in event.detail.items()
        if value is None or isinstance(value, str | int | float)
    }


def _rich_handler(stream: TextIO) -> logging.Handler:
    from rich.console import Console
    from rich.highlighter import NullHighlighter
    from rich.logging import RichHandler

    # Without a highlighter, ids are not coloured as if they were numbers.
    console, plain = Console(file=stream), NullHighlighter()
    handler = RichHandler(
        console=console, show_path=False, log_time_format="[%X]", highlighter=plain
    )
    handler.setFormatter(_ContextFormatter("%(message)s"))
    return handler


def _silence_libraries(level: str) -> None:
    """Hide the debug and info logs of libraries unless the level is DEBUG."""
    if level.upper() != "DEBUG":
        for name in _NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        # The cause of a lost connection is also raised, and logged by its caller.
        logging.getLogger("aiormq.connection").setLevel(logging.CRITICAL)
