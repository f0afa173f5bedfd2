"""Which parts of a context a checkpoint keeps."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue, ValidationError

from json_strategies import json_dicts, json_values, texts
from meshpoint.errors import IncompatibleState, NotJson
from meshpoint.model.context import A2AContext, TaskExecutionContext
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address
from meshpoint.model.status_metadata import UpdateKind
from meshpoint.model.usage import Tokens, TokenUsage

zones = st.integers(-12 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
instants = st.datetimes(datetime(1900, 1, 1), datetime(2999, 1, 1), timezones=zones)  # noqa: DTZ001
durations = st.timedeltas(timedelta(), timedelta(days=10_000))
a2a_contexts = st.builds(
    A2AContext,
    context_id=st.none() | texts,
    session_id=st.none() | texts,
    user_id=st.none() | texts,
    reply_to=st.none() | texts.map(Address),
    requester=st.none() | texts,
    parent_task_id=st.none() | texts,
    call_depth=st.integers(0, 100),
    deadline=st.none() | instants,
    idle_timeout=st.none() | durations,
    user_config=json_dicts,
    metadata=json_dicts,
)
tokens = st.builds(Tokens, input=st.integers(0), output=st.integers(0), cached=st.integers(0))
usages = st.builds(
    TokenUsage,
    total=tokens,
    by_model=st.dictionaries(texts, tokens),
    by_source=st.dictionaries(texts, tokens),
)
contexts = st.builds(
    TaskExecutionContext,
    texts.map(TaskId),
    a2a_contexts,
    response_buffer=texts,
    produced_artifacts=st.lists(json_values, max_size=3),
    artifact_signals_to_return=st.lists(json_values, max_size=3),
    flags=json_dicts,
    security_context=json_dicts,
    token_usage=usages,
    trace_context=json_dicts,
)
STORED_FIELDS = [
    "task_id",
    "a2a_context",
    "response_buffer",
    "produced_artifacts",
    "artifact_signals_to_return",
    "flags",
    "security_context",
    "token_usage",
    "trace_context",
]


PUBLIC_NAMES = {
    *STORED_FIELDS,
    "add_artifact",
    "add_text",
    "cancelled",
    "first",
    "from_checkpoint_dict",
    "gather",
    "gather_outcomes",
    "is_cancelled",
    "memory",
    "now",
    "outcome",
    "progress",
    "random",
    "receive",
    "replaying",
    "resources",
    "save_progress",
    "saved_progress",
    "set_value",
    "sleep",
    "sleep_until",
    "step",
    "subject",
    "subtask",
    "to_checkpoint_dict",
    "update_status",
    "uuid4",
    "wait_cancelled",
    "wait_for",
}


def create_context(**values: Any) -> TaskExecutionContext:
    return TaskExecutionContext(TaskId("t"), **values)


def test_a_context_offers_only_what_agents_use() -> None:
    assert {name for name in dir(create_context()) if not name.startswith("_")} == PUBLIC_NAMES


@given(contexts)
def test_stored_fields_survive_a_database_round_trip(context: TaskExecutionContext) -> None:
    stored = context.to_checkpoint_dict()
    restored = TaskExecutionContext.from_checkpoint_dict(
        json.loads(json.dumps(stored, allow_nan=False))
    )
    assert list(stored) == STORED_FIELDS
    for name in STORED_FIELDS:
        assert getattr(restored, name) == getattr(context, name)
    assert restored.to_checkpoint_dict() == stored


def test_the_cancellation_is_rebuilt_rather_than_stored() -> None:
    context = create_context()
    context.cancelled.set()
    assert not TaskExecutionContext.from_checkpoint_dict(
        context.to_checkpoint_dict()
    ).cancelled.is_set()


def test_later_deep_mutation_does_not_change_the_checkpoint() -> None:
    context = create_context(
        a2a_context=A2AContext(metadata={"a": {"b": []}}, user_config={"a": {}}),
        flags={"a": {"b": [{}]}},
        produced_artifacts=[{"parts": []}],
        trace_context={"a": {}},
        security_context={"a": {}},
        artifact_signals_to_return=[[]],
    )
    stored = context.to_checkpoint_dict()
    before = json.dumps(stored)
    live: Any = context
    live.a2a_context.metadata["a"]["b"].append(1)
    live.a2a_context.user_config["a"]["b"] = 1
    live.a2a_context.call_depth = 7
    live.flags["a"]["b"][0]["c"] = 1
    live.produced_artifacts[0]["parts"].append(1)
    live.artifact_signals_to_return[0].append(1)
    live.trace_context["a"]["b"] = 1
    live.security_context["a"]["b"] = 1
    live.response_buffer += "more"
    live.token_usage.record(Tokens(input=1), model="m")
    assert json.dumps(stored) == before
    assert json.dumps(context.to_checkpoint_dict()) != before


def test_mutating_the_checkpoint_does_not_change_the_context() -> None:
    stored: Any = create_context(flags={"a": {}}).to_checkpoint_dict()
    context = TaskExecutionContext.from_checkpoint_dict(stored)
    stored["flags"]["a"]["late"] = True
    assert context.flags == {"a": {}}


@pytest.mark.parametrize("name", ["flags", "security_context", "trace_context"])
def test_a_value_that_is_not_json_is_refused_when_set_with_its_key(name: str) -> None:
    context = create_context()
    with pytest.raises(NotJson, match=rf"^{name}\.when: date is not JSON"):
        getattr(context, name)["when"] = date(2026, 1, 1)
    with pytest.raises(NotJson, match=rf"^{name}\.deep\.when: date is not JSON"):
        setattr(context, name, {"deep": {"when": date(2026, 1, 1)}})


@pytest.mark.parametrize("name", ["produced_artifacts", "artifact_signals_to_return"])
def test_a_list_refuses_non_json_and_names_the_path(name: str) -> None:
    context = create_context()
    with pytest.raises(NotJson, match=rf"^{name}\[0\]\.when: date is not JSON"):
        getattr(context, name).append({"when": date(2026, 1, 1)})
    with pytest.raises(NotJson, match=rf"^{name}\[0\]: date is not JSON"):
        setattr(context, name, [date(2026, 1, 1)])


@pytest.mark.parametrize("name", ["metadata", "user_config"])
def test_the_a2a_context_refuses_non_json_values(name: str) -> None:
    a2a = A2AContext()
    with pytest.raises(NotJson, match=rf"^a2a_context\.{name}\.when: date is not JSON"):
        getattr(a2a, name)["when"] = date(2026, 1, 1)
    with pytest.raises(ValidationError, match=name):
        A2AContext.model_validate({name: {"when": date(2026, 1, 1)}})


def test_a_response_buffer_is_text() -> None:
    context = create_context()
    with pytest.raises(NotJson, match="response_buffer: bytes is not a string"):
        context.response_buffer = b"bytes"  # type: ignore[assignment]  # wrong on purpose
    with pytest.raises(NotJson, match="response_buffer"):
        context.response_buffer = "\ud800"


def test_a_deadline_is_stored_in_utc_and_must_be_aware() -> None:
    noon = datetime(2026, 7, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    deadline = A2AContext(deadline=noon).deadline
    assert deadline == noon
    assert deadline is not None
    assert deadline.tzinfo is UTC
    with pytest.raises(ValidationError, match="deadline"):
        A2AContext(deadline=datetime(2026, 7, 1))  # noqa: DTZ001


@pytest.mark.parametrize(
    "kept",
    [
        {"task_id": "t", "of_a_later_version": 1},
        {"task_id": "t", "a2a_context": {"of_a_later_version": 1}},
        {"task_id": "t", "token_usage": {"of_a_later_version": 1}},
        {"task_id": "t", "response_buffer": None},
        {},
    ],
)
def test_a_checkpoint_with_unknown_fields_is_incompatible(kept: Any) -> None:
    with pytest.raises(IncompatibleState, match="cannot be read here"):
        TaskExecutionContext.from_checkpoint_dict(kept)


def test_fields_missing_from_an_earlier_version_are_empty() -> None:
    context = TaskExecutionContext.from_checkpoint_dict({"task_id": "t"})
    assert context.to_checkpoint_dict() == create_context().to_checkpoint_dict()


async def test_status_reports_a_validated_copy() -> None:
    reported: list[tuple[UpdateKind, JsonValue]] = []

    async def report(kind: UpdateKind, data: JsonValue) -> None:
        reported.append((kind, data))

    context = create_context(report=report)
    await context.update_status({"step": 1})
    with pytest.raises(NotJson, match=r"^status\.when"):
        await context.update_status({"when": object()})  # type: ignore[dict-item]  # wrong on purpose
    assert reported == [(UpdateKind.STATUS, {"step": 1})]


async def test_status_without_a_listener_does_nothing() -> None:
    await create_context().update_status("fine")


def test_secrets_are_not_in_the_repr() -> None:
    assert "hunter2" not in repr(create_context(security_context={"password": "hunter2"}))
