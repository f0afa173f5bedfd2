"""Logs: which events are logged, at which level, and with which fields."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pydantic import JsonValue

from meshpoint.adapters import logging_observer
from meshpoint.adapters.logging_observer import LoggingObserver, level_of, logging_to
from meshpoint.model.events import LOOKS, Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId


def event(step: Step, phase: Phase = Phase.NOTED, *tasks: str, **detail: JsonValue) -> Event:
    return Event(step, phase, AgentName("travel"), ReplicaId("replica-1234abcd"), tuple(map(TaskId, tasks)), detail)


class Terminal(io.StringIO):
    """A stream that reports itself as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@contextmanager
def logs(stream: io.StringIO, level: str = "info", *, as_json: bool = False) -> Iterator[LoggingObserver]:
    with logging_to(stream, level, as_json=as_json):
        yield LoggingObserver()


@pytest.mark.parametrize(
    ("told", "level"),
    [
        *((event(step), logging.WARNING) for step in (Step.FENCED, Step.DEGRADED, Step.DEAD_LETTER, Step.DEAD_TASK)),
        *((event(step), logging.WARNING) for step in (Step.LEASE_LOST, Step.STORE_AWAY, Step.BROKER_AWAY)),
        *((event(step), logging.WARNING) for step in (Step.PARKED, Step.REPLY_UNROUTABLE, Step.CODE_CANCELLED)),
        *((event(step), logging.INFO) for step in (Step.STARTED, Step.DRAINED, Step.STORE_BACK)),
        *((event(step, Phase.AFTER, "t"), logging.INFO) for step in (Step.CHECKPOINT, Step.RESTORE, Step.END)),
        (event(Step.TAKE, Phase.AFTER, "t"), logging.DEBUG),
        (event(Step.TAKE_OVER, Phase.AFTER, "t"), logging.INFO),
        (event(Step.CHECKPOINT, Phase.BEFORE, "t"), logging.DEBUG),
        (event(Step.DUPLICATE, Phase.NOTED, "t"), logging.DEBUG),
        (event(Step.CLAIM, Phase.FAILED, "t", error="ValueError: a defect"), logging.WARNING),
        (
            event(Step.CLAIM, Phase.FAILED, "t", error="StoreUnavailable: away"),
            logging.DEBUG,
        ),  # logged once, separately
        (event(Step.REPLY, Phase.FAILED, "t", error="BrokerUnavailable: away"), logging.DEBUG),
        (event(Step.REPLY_DROPPED, Phase.NOTED, "t"), logging.WARNING),
        (event(Step.MESSAGE_REJECTED, Phase.NOTED, "t"), logging.WARNING),
        (event(Step.BROKER_BACK, Phase.NOTED), logging.INFO),
        (event(Step.SEGMENT, Phase.FAILED, "t", error="CancelledError: "), logging.DEBUG),
    ],
    ids=str,
)
def test_events_have_levels(told: Event, level: int) -> None:
    assert level_of(told) == level


@pytest.mark.parametrize("step", sorted(LOOKS))
def test_the_beat_of_the_looks_is_not_even_for_those_who_debug(stream: io.StringIO, step: Step) -> None:
    with logs(stream, "debug") as observer:
        observer.emit(event(step, Phase.BEFORE))
        # the sweep reports it
        observer.emit(event(step, Phase.FAILED, error="StoreUnavailable: away"))
    assert stream.getvalue() == ""


def test_a_pipe_gets_one_json_object_per_line(stream: io.StringIO) -> None:
    with logs(stream) as observer:
        observer.emit(event(Step.CHECKPOINT, Phase.AFTER, "t-1", "t-2", calls=3))
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


def test_a_terminal_gets_a_line_for_people() -> None:
    stream = Terminal()
    with logs(stream) as observer:
        observer.emit(event(Step.DEGRADED, Phase.NOTED, "t-1", "t-2", "t-3", "t-4", reason="away"))
    line = " ".join(re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()).split())
    assert "WARNING" in line
    assert "travel 1234abcd degraded t-1, t-2, t-3 and 1 more reason=away" in line


def test_a_terminal_gets_json_when_asked() -> None:
    stream = Terminal()
    with logs(stream, as_json=True) as observer:
        observer.emit(event(Step.STARTED))
    assert json.loads(stream.getvalue())["step"] == "started"


def test_a_terminal_gets_json_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging_observer, "find_spec", lambda module: None)
    stream = Terminal()
    with logs(stream) as observer:
        observer.emit(event(Step.STARTED))
    assert json.loads(stream.getvalue())["step"] == "started"


def test_the_level_is_kept(stream: io.StringIO) -> None:
    with logs(stream, "warning") as observer:
        observer.emit(event(Step.STARTED))
        observer.emit(event(Step.FENCED))
    assert [json.loads(line)["step"] for line in stream.getvalue().splitlines()] == ["fenced"]


def test_payloads_are_not_told(stream: io.StringIO) -> None:
    with logs(stream) as observer:
        observer.emit(event(Step.FENCED, Phase.NOTED, "t-1", input={"card": "4111"}, items=[1], text="x" * 5000))
    assert json.loads(stream.getvalue())["detail"] == {"text": "x" * 200}


def test_an_error_with_its_traceback_is_one_line(stream: io.StringIO) -> None:
    with logs(stream):
        try:
            raise ValueError("odd")
        except ValueError:
            logging.getLogger("my_agents").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: odd" in json.loads(line)["message"]


def test_logging_ends_with_its_block(stream: io.StringIO) -> None:
    before = (logging.getLogger().level, list(logging.getLogger().handlers))
    with logs(stream, "debug"):
        pass
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before


def test_a_lost_connection_is_told_by_events_alone(stream: io.StringIO) -> None:
    connection = logging.getLogger("aiormq.connection")
    before = connection.level
    try:
        with logs(stream, "info"):
            connection.error("error when creating transport")
            logging.getLogger("aiormq").warning("odd")
    finally:
        connection.setLevel(before)
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["odd"]


def test_no_message_forges_a_line(stream: io.StringIO) -> None:
    """Holds even where the application formats its own logs."""
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(stream))
    forged = "x\n12:00 INFO all is well\r\x1b[31m\u2028\x85\udcff"
    LoggingObserver(logger).emit(event(Step.DEAD_LETTER, Phase.NOTED, forged, reason=forged))
    assert stream.getvalue().removesuffix("\n").isprintable()
    assert stream.getvalue().count(r"x\n12:00 INFO all is well\r\x1b[31m\u2028\x85\udcff") == 2


def test_a_terminal_gets_no_control_characters_of_others() -> None:
    terminal = Terminal()
    with logs(terminal) as observer:
        observer.emit(event(Step.DEAD_LETTER, reason="x\x1b]0;owned\x07\x1b[2J"))
    assert r"\x1b]0;owned\x07" in terminal.getvalue()
    assert not {"\x07", "\x1b[2J", "\x1b]"} & set(re.findall(r"\x07|\x1b\[2J|\x1b\]", terminal.getvalue()))
