"""Log records outside agent code, and with values of their own."""

from __future__ import annotations

import logging
from contextvars import copy_context

from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.log_context import LogContext, LogContextFilter, current_log_context


class Recorder:
    """A `CallRecorder` in the middle of a replay."""

    replaying, position = True, 0


def make_record(name: str = "my_agents", **extra: object) -> logging.LogRecord:
    return logging.getLogger(name).makeRecord(
        name, logging.INFO, __file__, 1, "hello", (), None, extra=extra
    )


def filtered(
    record: logging.LogRecord, *, replaying: bool = False, drop_replayed: bool = True
) -> bool:
    """Whether the filter passes `record` in the code of task t-1."""
    runtime = ContextRuntime()
    runtime.recorder = Recorder() if replaying else None  # type: ignore[assignment]
    context = copy_context()
    context.run(
        current_log_context.set, LogContext(TaskId("t-1"), AgentName("travel"), 2, runtime)
    )
    return context.run(LogContextFilter(drop_replayed=drop_replayed).filter, record)


def test_records_outside_agent_code_have_placeholders() -> None:
    record = make_record()
    assert LogContextFilter().filter(record)
    assert logging.Formatter("%(task_id)s %(agent)s %(generation)s").format(record) == "- - -"


def test_records_of_agent_code_have_its_task() -> None:
    record = make_record()
    assert filtered(record)
    formatter = logging.Formatter("%(task_id)s %(agent)s %(generation)s")
    assert formatter.format(record) == "t-1 travel 2"


def test_values_of_a_record_stay() -> None:
    record = make_record(task_id="mine")
    assert filtered(record)
    assert (vars(record)["task_id"], vars(record)["agent"]) == ("mine", "travel")


def test_records_of_replayed_code_are_dropped() -> None:
    assert not filtered(make_record(), replaying=True)
    assert not filtered(make_record("meshpoint_like"), replaying=True)
    assert filtered(make_record(), replaying=True, drop_replayed=False)


def test_records_of_meshpoint_are_kept() -> None:
    assert filtered(make_record("meshpoint.events"), replaying=True)
