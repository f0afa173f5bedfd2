"""`meshpoint replicas list` shows who has registered in the database."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from command_result import Command, CommandResult, run_main
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import ReplicaId
from meshpoint.testing.conformance.store_fleet import a_registration


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `meshpoint`."""

    def run(*arguments: str) -> CommandResult:
        return run_main([*arguments], capsys)

    return run


@pytest.fixture
def configured(tmp_path: Path, sqlite_url: str) -> str:
    """A configuration whose database has two registered replicas."""

    async def register() -> None:
        store = SqlStore(sqlite_url, namespace="test")
        await store.open()
        for name in ("A", "B"):
            await store.register(a_registration(ReplicaId(name)))
        await store.close()

    asyncio.run(register())
    file = tmp_path / "fleet.yaml"
    file.write_text(f"mesh: {{namespace: test, database_url: '{sqlite_url}'}}\n")
    return str(file)


def test_replicas_are_listed(cli: Command, configured: str) -> None:
    for options in ([configured], ["--config", configured]):
        result = cli("replicas", "list", *options)
        assert result.code == 0
        for shown in ("A", "B", "travel", "live", "2.0", "host", "travel/1"):
            assert shown in result.out


def test_replicas_are_listed_for_scripts(cli: Command, configured: str) -> None:
    result = cli("replicas", "list", configured, "--agent", "travel", "--json")
    first, second = json.loads(result.out)
    assert [first["id"], second["id"]] == ["A", "B"]
    assert first.keys() == {
        *("id", "agent", "state", "started_at", "seen_at", "app_version"),
        *("release", "slots", "host", "pid", "formats"),
    }
    assert (first["state"], first["formats"], first["slots"]) == ("live", ["travel/1"], 10)


def test_no_replica_is_a_note(cli: Command, configured: str) -> None:
    result = cli("replicas", "list", configured, "--agent", "flights")
    assert (result.code, result.out, result.err) == (0, "", "no replica is registered\n")


def test_a_configuration_is_named_once(cli: Command, configured: str) -> None:
    result = cli("replicas", "list", configured, "--config", configured)
    assert result.code == 2
    assert "--config: CONFIG is given twice; leave one of them out" in result.err
