"""Logs: which events are logged, at which level, and with which fields."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

import pytest
from pydantic import JsonValue

from meshpoint.adapters import logging_observer
from meshpoint.adapters.logging_observer import LoggingObserver, level_of, logging_to
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.log_context import LogContext, current_log_context


def create_event(step: Step, phase: Phase = Phase.INFO, *tasks: str, **detail: JsonValue) -> Event:
    return Event(
        step,
        phase,
        AgentName("travel"),
        ReplicaId("replica-1234abcd"),
        tuple(map(TaskId, tasks)),
        detail,
    )


class Terminal(io.StringIO):
    """A stream that reports itself as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@contextmanager
def create_log_observer(
    stream: io.StringIO, level: str = "info", *, as_json: bool = False
) -> Iterator[LoggingObserver]:
    with logging_to(stream, level, as_json=as_json):
        yield LoggingObserver()


@pytest.mark.parametrize(
    ("logged_event", "level"),
    [
        *(
            (create_event(step), logging.WARNING)
            for step in (Step.FENCED, Step.DEGRADED, Step.DEAD_LETTER, Step.TASK_FAILED)
        ),
        *(
            (create_event(step), logging.WARNING)
            for step in (Step.LEASE_LOST, Step.STORE_UNAVAILABLE, Step.BROKER_UNAVAILABLE)
        ),
        *((create_event(step), logging.WARNING) for step in (Step.PARKED, Step.REPLY_UNROUTABLE)),
        (create_event(Step.TASK_FAILED, kind="timeout", refused=False), logging.WARNING),
        (create_event(Step.TASK_FAILED, kind="timeout", refused=True), logging.INFO),
        (create_event(Step.TASK_FAILED, kind="cancelled"), logging.INFO),
        (create_event(Step.PARKED, kind="cancelled"), logging.WARNING),
        *(
            (create_event(step), logging.INFO)
            for step in (Step.STARTED, Step.DRAINED, Step.STORE_AVAILABLE)
        ),
        *(
            (create_event(step, Phase.AFTER, "t"), logging.INFO)
            for step in (Step.CHECKPOINT, Step.RESTORE, Step.END)
        ),
        (create_event(Step.ACQUIRE, Phase.AFTER, "t"), logging.DEBUG),
        (create_event(Step.RESCUE, Phase.AFTER, "t"), logging.INFO),
        (create_event(Step.CODE_CANCELLED, Phase.INFO, "t"), logging.INFO),
        (create_event(Step.CHECKPOINT, Phase.BEFORE, "t"), logging.DEBUG),
        (create_event(Step.DUPLICATE, Phase.INFO, "t"), logging.DEBUG),
        (
            create_event(
                Step.CLAIM,
                Phase.FAILED,
                "t",
                error="ValueError: a defect",
                error_type="ValueError",
            ),
            logging.WARNING,
        ),
        (
            create_event(
                Step.CLAIM,
                Phase.FAILED,
                "t",
                error="StoreUnavailable: unavailable",
                error_type="StoreUnavailable",
            ),
            logging.DEBUG,
        ),  # logged once, separately
        (
            create_event(
                Step.REPLY,
                Phase.FAILED,
                "t",
                error="BrokerUnavailable: unavailable",
                error_type="BrokerUnavailable",
            ),
            logging.DEBUG,
        ),
        (create_event(Step.REPLY_DROPPED, Phase.INFO, "t"), logging.WARNING),
        (create_event(Step.MESSAGE_REJECTED, Phase.INFO, "t"), logging.WARNING),
        (create_event(Step.BROKER_AVAILABLE, Phase.INFO), logging.INFO),
        (
            create_event(
                Step.SEGMENT,
                Phase.FAILED,
                "t",
                error="CancelledError: ",
                error_type="CancelledError",
            ),
            logging.DEBUG,
        ),
    ],
    ids=str,
)
def test_events_have_levels(logged_event: Event, level: int) -> None:
    assert level_of(logged_event) == level


@pytest.mark.parametrize("step", [step for step in Step if step.is_search])
def test_periodic_sweeps_are_not_logged_even_at_debug_level(
    stream: io.StringIO, step: Step
) -> None:
    with create_log_observer(stream, "debug") as observer:
        observer.emit(create_event(step, Phase.BEFORE))
        # the sweep reports it
        observer.emit(
            create_event(
                step,
                Phase.FAILED,
                error="StoreUnavailable: unavailable",
                error_type="StoreUnavailable",
            )
        )
    assert stream.getvalue() == ""


def test_a_pipe_gets_one_json_object_per_line(stream: io.StringIO) -> None:
    with create_log_observer(stream) as observer:
        observer.emit(create_event(Step.CHECKPOINT, Phase.AFTER, "t-1", "t-2", calls=3))
        logging.getLogger("my_agents").info("%d seats", 2)
    checkpoint, other = map(json.loads, stream.getvalue().splitlines())
    assert checkpoint.pop("time").endswith("+00:00")
    assert checkpoint == {
        "level": "info",
        "logger": "meshpoint.events",
        "step": "checkpoint",
        "phase": "after",
        "agent": "travel",
        "replica": "replica-1234abcd",
        "task_ids": ["t-1", "t-2"],
        "detail": {"calls": 3},
    }
    assert (other["logger"], other["message"]) == ("my_agents", "2 seats")


def test_a_terminal_gets_a_human_readable_line() -> None:
    stream = Terminal()
    with create_log_observer(stream) as observer:
        observer.emit(
            create_event(
                Step.DEGRADED, Phase.INFO, "t-1", "t-2", "t-3", "t-4", reason="unavailable"
            )
        )
    line = " ".join(re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()).split())
    assert "WARNING" in line
    assert "travel 1234abcd degraded t-1, t-2, t-3 and 1 more reason=unavailable" in line


def test_a_terminal_gets_json_when_asked() -> None:
    stream = Terminal()
    with create_log_observer(stream, as_json=True) as observer:
        observer.emit(create_event(Step.STARTED))
    assert json.loads(stream.getvalue())["step"] == "started"


def test_a_terminal_gets_json_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging_observer, "find_spec", lambda module: None)
    stream = Terminal()
    with create_log_observer(stream) as observer:
        observer.emit(create_event(Step.STARTED))
    assert json.loads(stream.getvalue())["step"] == "started"


def test_the_log_level_is_respected(stream: io.StringIO) -> None:
    with create_log_observer(stream, "warning") as observer:
        observer.emit(create_event(Step.STARTED))
        observer.emit(create_event(Step.FENCED))
    assert [json.loads(line)["step"] for line in stream.getvalue().splitlines()] == ["fenced"]


def test_payloads_are_not_logged(stream: io.StringIO) -> None:
    with create_log_observer(stream) as observer:
        observer.emit(
            create_event(
                Step.FENCED, Phase.INFO, "t-1", input={"card": "4111"}, items=[1], text="x" * 5000
            )
        )
    assert json.loads(stream.getvalue())["detail"] == {"text": "x" * 200}


def test_a_failed_task_is_logged_with_its_reason_and_traceback(stream: io.StringIO) -> None:
    reason, traceback = "x" * 3000, "Traceback:\n" + "y" * 3000
    failed = create_event(
        Step.TASK_FAILED, Phase.INFO, "t-1", kind="error", reason=reason, traceback=traceback
    )
    with create_log_observer(stream) as observer:
        observer.emit(failed)
    line = json.loads(stream.getvalue())
    assert line["level"] == "warning"
    assert line["detail"] == {"kind": "error", "reason": reason, "traceback": traceback}


def test_a_traceback_cannot_forge_a_log_line(stream: io.StringIO) -> None:
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(stream))
    traceback = "Traceback:\nValueError: x\n12:00 INFO all is well\r\x1b[31m\u2028"
    LoggingObserver(logger).emit(
        create_event(Step.TASK_FAILED, Phase.INFO, "t-1", kind="error", traceback=traceback)
    )
    first, *others = stream.getvalue().splitlines()
    assert first == "travel 1234abcd task_failed t-1 kind=error"
    assert others == [
        "  Traceback:",
        "  ValueError: x",
        r"  12:00 INFO all is well\r\x1b[31m\u2028",
    ]


def log_in_agent_code(message: str) -> None:
    """Log `message` as the code of task t-1 does."""
    runtime = ContextRuntime()
    context = copy_context()
    context.run(
        current_log_context.set, LogContext(TaskId("t-1"), AgentName("travel"), 2, runtime)
    )
    context.run(logging.getLogger("my_agents").info, message)


def test_a_record_of_agent_code_has_its_task(stream: io.StringIO) -> None:
    with create_log_observer(stream):
        log_in_agent_code("2 seats")
    line = json.loads(stream.getvalue())
    assert (line["task_id"], line["agent"], line["generation"]) == ("t-1", "travel", 2)
    assert line["message"] == "2 seats"


def test_a_record_of_agent_code_begins_with_its_task_on_a_terminal() -> None:
    stream = Terminal()
    with create_log_observer(stream):
        log_in_agent_code("2 seats")
        logging.getLogger("my_agents").info("outside")
    text = " ".join(re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()).split())
    assert "INFO travel t-1: 2 seats" in text
    assert "INFO outside" in text


def test_an_error_with_its_traceback_is_one_line(stream: io.StringIO) -> None:
    with create_log_observer(stream):
        try:
            raise ValueError("odd")
        except ValueError:
            logging.getLogger("my_agents").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: odd" in json.loads(line)["message"]


def test_logging_is_restored_after_the_block(stream: io.StringIO) -> None:
    before = (logging.getLogger().level, list(logging.getLogger().handlers))
    with create_log_observer(stream, "debug"):
        pass
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before


def test_a_lost_connection_is_reported_only_by_events(stream: io.StringIO) -> None:
    connection = logging.getLogger("aiormq.connection")
    before = connection.level
    try:
        with create_log_observer(stream, "info"):
            connection.error("error when creating transport")
            logging.getLogger("aiormq").warning("odd")
    finally:
        connection.setLevel(before)
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["odd"]


def test_a_message_cannot_forge_a_log_line(stream: io.StringIO) -> None:
    """Holds even where the application formats its own logs."""
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(stream))
    forged = "x\n12:00 INFO all is well\r\x1b[31m\u2028\x85\udcff"
    LoggingObserver(logger).emit(create_event(Step.DEAD_LETTER, Phase.INFO, forged, reason=forged))
    assert stream.getvalue().removesuffix("\n").isprintable()
    assert stream.getvalue().count(r"x\n12:00 INFO all is well\r\x1b[31m\u2028\x85\udcff") == 2


def test_control_characters_are_escaped_on_a_terminal() -> None:
    terminal = Terminal()
    with create_log_observer(terminal) as observer:
        observer.emit(create_event(Step.DEAD_LETTER, reason="x\x1b]0;owned\x07\x1b[2J"))
    assert r"\x1b]0;owned\x07" in terminal.getvalue()
    assert not {"\x07", "\x1b[2J", "\x1b]"} & set(
        re.findall(r"\x07|\x1b\[2J|\x1b\]", terminal.getvalue())
    )
