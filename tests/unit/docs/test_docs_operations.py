"""The operators' pages match the code: log levels, exit codes, settings and statements."""

from __future__ import annotations

import ast
import re
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from meshpoint.adapters.logging_observer import level_of
from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.engine import TRANSACTION_TIMEOUT
from meshpoint.cli.exits import ExitCode
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.options import Options
from meshpoint.settings import AgentSettings, MeshSettings

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "\n".join(
    (DOCS / "how-to" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("deploy", "run-on-servers", "secure", "operate")
)
EVENTS = (DOCS / "reference" / "events.md").read_text(encoding="utf-8")
COMMANDS = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
LEVELS = {"debug": 10, "info": 20, "warning": 30}


def table_rows(heading: str, page: str = PAGE) -> list[list[str]]:
    """The cells of the tables below a heading."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


LOGGED = {
    step: cells[1] for cells in table_rows("All events", EVENTS) for step in code_spans(cells[0])
}


def highest_level(step: Step) -> int:
    """The highest level logged for a step that succeeds."""
    phases = (
        (Phase.INFO,) if LOGGED[step.value].startswith("info") else (Phase.BEFORE, Phase.AFTER)
    )
    return max(
        level_of(Event(step, phase, AgentName("a"), ReplicaId("r"), (TaskId("t"),)))
        for phase in phases
    )


DESCRIBED = {
    step: cells[1]
    for cells in table_rows("What the logs say")
    if cells[1] in LEVELS
    for step in code_spans(cells[0])
}


@pytest.mark.parametrize("step", Step)
def test_every_event_has_its_documented_log_level(step: Step) -> None:
    assert LEVELS[DESCRIBED.get(step.value, "debug")] == highest_level(step)


def test_a_failed_step_is_logged_as_a_warning() -> None:
    assert DESCRIBED["failed"] == "warning"
    failed = Event(
        Step.END,
        Phase.FAILED,
        AgentName("a"),
        ReplicaId("r"),
        detail={"error": "ValueError: unavailable", "error_type": "ValueError"},
    )
    assert level_of(failed) == LEVELS["warning"]


def test_documented_exit_codes_match_the_command_line() -> None:
    codes = {int(code) for code, *_ in table_rows("Exit codes", COMMANDS) if code.isdigit()}
    assert codes == set(ExitCode)


def test_settings_mentioned_in_the_docs_exist() -> None:
    keys = {*MeshSettings.model_fields, *AgentSettings.model_fields}
    for cell, _ in table_rows("Settings that matter")[1:]:
        assert set(code_spans(cell)) <= keys
    named = {name.partition(":")[0] for name in code_spans(PAGE)}
    suffix = r"[a-z_]+_(seconds|policy|limit|failure|checkpointing|concurrency|attempts)"
    assert {name for name in named if re.fullmatch(suffix, name)} <= keys


def test_kubernetes_waits_longer_than_a_drain_takes() -> None:
    (pod,) = (page for block in code_blocks("yaml") if "spec" in (page := yaml.safe_load(block)))
    options = Options()
    grace = timedelta(seconds=pod["spec"]["terminationGracePeriodSeconds"])
    assert grace > options.drain_timeout + options.release_timeout
    assert (
        f"drain {options.drain_timeout.seconds} + release {options.release_timeout.seconds}"
        in PAGE
    )


def test_the_documented_role_timeout_matches_the_connections() -> None:
    assert (
        f"idle_in_transaction_session_timeout = '{TRANSACTION_TIMEOUT.total_seconds():g}s'" in PAGE
    )


async def test_the_statements_for_sqlite_and_both_databases_run(tmp_path: Path) -> None:
    file = tmp_path / "mesh.db"
    store = SqlStore(f"sqlite:///{file}", namespace="demo")
    await store.open()
    await store.close()
    statements = [block for block in code_blocks("sql") if "agent_paused_tasks" in block]
    assert len(statements) == 1
    database = sqlite3.connect(file)
    try:
        for statement in statements:
            database.execute(statement)
    finally:
        database.close()


def test_the_documented_scripts_are_valid_python() -> None:
    scripts = code_blocks("python")
    assert len(scripts) == 1
    for script in scripts:
        assert ast.parse(script).body
