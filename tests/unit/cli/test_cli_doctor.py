"""`meshpoint doctor` on files: its lines, its JSON and its exit codes."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_result import CommandResult, run_main
from meshpoint.adapters.sql import SqlStore, migrations
from meshpoint.cli.exits import ExitCode
from meshpoint.doctor.database_checks import check_database_keys
from meshpoint.doctor.facts import Facts, Release
from meshpoint.doctor.findings import Severity
from meshpoint.model.ids import new_id
from meshpoint.settings import AgentSettings, MeshSettings, Settings
from meshpoint.testing.conformance.build import a_pause

CODE = """
from meshpoint import agent

@agent("travel", version="1")
async def travel(ctx, city: str) -> str:
    return city
"""
LINE = re.compile(r"(error|unavailable|warning|note) +\S+: .+")


class Project:
    """A folder with an agent and its configuration."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.module = f"project_{new_id()[-12:]}"
        (folder / f"{self.module}.py").write_text(CODE)

    def doctor(self, *arguments: str, **options: Any) -> CommandResult:
        config = {
            "mesh": {"namespace": "demo", "broker_url": "sqlite:///broker.db"},
            "agent": {
                "name": "travel",
                "entrypoint": f"{self.module}:travel",
                "stateless_checkpointing": True,
                "session_service": "sql",
                "session_db_url": "sqlite:///tasks.db",
                **options,
            },
        }
        (self.folder / "travel.yaml").write_text(yaml.safe_dump(config))
        return self.run("doctor", "travel.yaml", *arguments)

    def run(self, *command: str) -> CommandResult:
        return run_main(list(command), self._capsys)

    def write_task(self, state_format: str) -> None:
        async def write() -> None:
            store = SqlStore(f"sqlite:///{self.folder}/tasks.db", namespace="demo")
            await store.open()
            await store.pause([a_pause(state_format=state_format)])
            await store.close()

        asyncio.run(write())


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Project:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return Project(tmp_path, capsys)


def test_nothing_exists_yet_and_nothing_is_created(project: Project) -> None:
    result = project.doctor()
    assert (result.code, result.err) == (ExitCode.OK, "")
    *lines, summary = result.out.splitlines()
    assert summary == "2 notes"
    assert [line.split()[0] for line in lines] == ["note", "note"]
    assert "the first replica creates them" in lines[0]
    names = {path.name for path in project.folder.iterdir()} - {"__pycache__"}
    assert names == {f"{project.module}.py", "travel.yaml"}


def test_each_finding_is_a_line_with_its_cause_and_its_fix(project: Project) -> None:
    project.write_task("travel/function/0")
    result = project.doctor()
    *lines, summary = result.out.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    assert "\x1b" not in result.out
    assert lines[0].startswith(
        "warning     travel: 1 task in the format travel/function/0 (paused by 7): "
        "no entrypoint reads it; new tasks have travel/function/1; keep replicas"
    )
    assert (result.code, summary) == (ExitCode.WARNINGS, "2 warnings, 1 note")


def test_json_has_the_verdict_and_every_value(project: Project) -> None:
    project.write_task("travel/function/0")
    result = project.doctor("--json")
    assert result.json["exit_code"] == result.code == ExitCode.WARNINGS
    assert result.json["verdict"] == "warning"
    (unread,) = [each for each in result.json["findings"] if each["check"] == "tasks.unread"]
    assert set(unread) == {"check", "severity", "subject", "problem", "fix", "data"}
    assert unread["data"] == {
        "format": "travel/function/0",
        "tasks": 1,
        "states": {"waiting": 1},
        "versions": ["7"],
        "readers": [],
        "replicas": 0,
    }
    assert {each["severity"] for each in result.json["findings"]} <= set(Severity)


def test_a_fix_is_a_command_that_runs_as_printed(project: Project) -> None:
    url = f"sqlite:///{project.folder}/tasks.db"
    migrations.upgrade(url)
    migrations.downgrade(url, "0005")
    result = project.doctor("--json")
    (behind,) = [each for each in result.json["findings"] if each["check"] == "schema.behind"]
    command = behind["fix"].removeprefix("run: meshpoint ").partition(";")[0]
    assert command == "db upgrade --config travel.yaml"
    assert project.run(*shlex.split(command)).code == ExitCode.OK
    assert project.doctor().code == ExitCode.OK


def test_a_wrong_configuration_is_one_line(project: Project) -> None:
    for options in ({"entrypoint": "nowhere:travel"}, {"lease_second": 3}):
        result = project.doctor(**options)
        assert (result.code, result.out) == (ExitCode.CONFIGURATION, "")
        assert len(result.err.splitlines()) == 1
        assert result.err.startswith("error: agent.")


def test_a_file_that_is_no_database_is_an_error_and_hides_nothing(project: Project) -> None:
    (project.folder / "tasks.db").write_bytes(b"not a database" * 100)
    result = project.doctor()
    assert result.code == ExitCode.UNDEPLOYABLE
    lines = result.out.splitlines()
    assert lines[0].startswith("error       sqlite://")
    assert "is not a SQLite database" in lines[0]
    assert lines[-1] == "1 error, 1 note"


def test_an_unreadable_queue_file_is_a_missing_check(project: Project) -> None:
    (project.folder / "broker.db").write_bytes(b"not a database" * 100)
    result = project.doctor()
    assert result.code == ExitCode.UNAVAILABLE
    assert "the broker does not answer" in result.out.splitlines()[0]


def test_a_marker_is_removed_only_for_an_agent_that_is_configured(project: Project) -> None:
    result = project.doctor("--remove-marker", "trvel")
    assert (result.code, result.out) == (ExitCode.CONFIGURATION, "")
    assert "no agent 'trvel' is configured; name one of: travel" in result.err
    result = project.doctor("--remove-marker", "travel")
    assert result.code == ExitCode.UNDEPLOYABLE
    assert "its marker was not removed: it is not set" in result.out


def test_the_memory_broker_and_tasks_in_memory(project: Project) -> None:
    result = project.doctor(stateless_checkpointing=False)
    assert result.code == ExitCode.OK
    assert "new tasks live in the memory of one replica" in result.out


@pytest.mark.parametrize(
    ("off", "flag"),
    [({}, "true"), ({"stateless_checkpointing": False}, "false (set for the agent)")],
)
def test_the_short_key_is_shown_as_the_keys_that_it_stands_for(
    project: Project, off: dict[str, Any], flag: str
) -> None:
    config = {
        "mesh": {"broker_url": "sqlite:///broker.db", "database_url": "sqlite:///tasks.db"},
        "agent": {"name": "travel", "entrypoint": f"{project.module}:travel", **off},
    }
    (project.folder / "travel.yaml").write_text(yaml.safe_dump(config))
    result = project.run("doctor", "travel.yaml")
    assert result.code == ExitCode.OK
    assert (
        "note        travel: mesh.database_url means "
        f"stateless_checkpointing: {flag}, session_service: sql, "
        f"session_db_url: sqlite:///{project.folder}/tasks.db"
    ) in result.out.splitlines()
    (keys,) = [
        each
        for each in project.run("doctor", "travel.yaml", "--json").json["findings"]
        if each["check"] == "database.keys"
    ]
    assert keys["data"] == {
        "stateless_checkpointing": not off,
        "session_service": "sql",
        "session_db_url": f"sqlite:///{project.folder}/tasks.db",
    }


def test_the_short_key_of_an_agent_is_shown_without_its_password() -> None:
    mesh = MeshSettings(database_url="postgresql://mesh:secret@m/mesh")
    url = "postgresql://mesh:secret@own/mesh"
    agents = [
        AgentSettings(name="a", entrypoint="m:a", database_url=url),
        AgentSettings(name="b", entrypoint="m:b", session_service="sql", session_db_url=url),
        AgentSettings(name="c", entrypoint="m:c"),
    ]
    releases = [Release(agent, frozenset(), "", "1", "1") for agent in agents]
    findings = check_database_keys(Facts(Settings(mesh=mesh, agents=tuple(agents)), releases))
    assert [finding.problem for finding in findings] == [
        "agent.database_url means stateless_checkpointing: true, session_service: sql, "
        "session_db_url: postgresql://mesh@own/mesh",
        "mesh.database_url means stateless_checkpointing: false (set for the agent), "
        "session_service: sql, session_db_url: postgresql://mesh@own/mesh (set for the agent)",
        "mesh.database_url is not used: session_service is memory",
    ]
    assert "secret" not in repr(findings)
