"""What the settings select: backends, isolation."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessExchange
from meshpoint.adapters.sql import SqlStore
from meshpoint.agents.function import agent
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.timeline import TimelineOptions
from meshpoint.settings import AgentSettings, MeshSettings
from meshpoint.wiring import build_worker, make_isolation
from recorded_events import RecordedEvents


@agent("echo", version="1")
async def echo(ctx: TaskExecutionContext, text: str) -> str:
    return text


def settings(tmp_path: Path, service: str, *, checkpointing: bool = False) -> AgentSettings:
    return AgentSettings.model_validate(
        {
            "name": "echo",
            "entrypoint": "m:a",
            "session_service": service,
            "session_db_url": f"sqlite:///{tmp_path}/tasks.db",
            "stateless_checkpointing": checkpointing,
        }
    )


@pytest.mark.parametrize(
    ("service", "checkpointing", "has_database", "is_durable"),
    [
        ("memory", False, False, False),
        ("sql", False, True, False),
        ("sql", True, True, True),
    ],
)
async def test_the_session_service_selects_the_database(
    tmp_path: Path, service: str, checkpointing: bool, has_database: bool, is_durable: bool
) -> None:
    agent_settings = settings(tmp_path, service, checkpointing=checkpointing)
    worker = build_worker(
        echo,
        agent_settings,
        "demo",
        InProcessBroker(InProcessExchange()),
        RecordedEvents(),
        agent_settings.options(),
    )
    assert (worker.runtime.database is not None) is has_database
    assert worker.runtime.new_task_backend.is_shared is is_durable


@pytest.mark.parametrize("records", [True, False])
async def test_a_replica_records_timelines_under_its_own_id(tmp_path: Path, records: bool) -> None:
    agent_settings = settings(tmp_path, "sql", checkpointing=True).model_copy(
        update={"history": records, "history_retention_seconds": 60}
    )
    broker, options = InProcessBroker(InProcessExchange()), agent_settings.options()
    worker = build_worker(echo, agent_settings, "demo", broker, RecordedEvents(), options)
    assert worker.runtime.database is not None
    store = worker.runtime.database.store
    assert isinstance(store, SqlStore)
    expected = TimelineOptions(worker.runtime.replica.id, timedelta(minutes=1))
    assert store._database.options.timeline == (expected if records else None)


@pytest.mark.parametrize(
    ("service", "broker_url", "isolates"),
    [
        ("sql", "sqlite:///broker.db", True),
        ("sql", "memory://", False),
        ("memory", "sqlite:///broker.db", False),
    ],
)
async def test_suspects_in_a_database_run_in_processes_of_their_own(
    tmp_path: Path, service: str, broker_url: str, isolates: bool
) -> None:
    mesh = MeshSettings(broker_url=broker_url)
    isolation = make_isolation(settings(tmp_path, service), mesh, RecordedEvents())
    assert (isolation is not None) is isolates
