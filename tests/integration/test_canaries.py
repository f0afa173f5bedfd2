"""With encryption no canary is found by a byte search of any place; without it, all are found."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path

import asyncpg
import pytest
from canary_mesh import KEY, CanaryMesh, columns_with, faulty, files_with, new_canary, teller

from command_result import run_main
from dashboard.client import Browser
from meshpoint.adapters.sql import migrations
from meshpoint.dashboard import Dashboard, LocalAccess
from meshpoint.errors import ConfigurationError
from meshpoint.exec.checkpoint_file import read_document
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import request_queue
from meshpoint.testing import replay_history
from meshpoint.testing.conformance.broker import Inbox
from meshpoint.wiring import environment_sealer, make_broker
from servers import PostgresServer, RabbitServer, RedisServer, own_database

_VARIABLE = "MESHPOINT_AGENT__ENCRYPTION_KEYS"

TASKS = {
    "agent_checkpoints.error_details",
    "agent_checkpoints.failure_reason",
    "agent_checkpoints.l1_snapshot",
    "agent_checkpoints_archive.interim_results",
    "agent_checkpoints_archive.l1_snapshot",
    "agent_operations.parameters",
    "agent_operator_actions.details",
    "agent_paused_tasks.a2a_context",
    "agent_paused_tasks.effective_session_id",
    "agent_paused_tasks.flags",
    "agent_paused_tasks.produced_artifacts",
    "agent_paused_tasks.reply",
    "agent_paused_tasks.request",
    "agent_paused_tasks.state",
    "agent_paused_tasks.user_id",
    "agent_peer_sub_tasks.outcome",
    "agent_peer_sub_tasks.request",
    "agent_subtask_records.result",
    "agent_task_log.entry",
    "agent_task_questions.answer",
    "agent_task_questions.request",
    "agent_task_signals.value",
    "agent_task_values.value",
    "meshpoint_conversation_turns.context_id",
    "meshpoint_conversation_turns.messages",
    "meshpoint_conversation_turns.user_id",
}
"""Columns in which a mesh without keys has its canary, among others."""


@pytest.fixture(params=[False, True], ids=["clear", "encrypted"])
def keys(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return (KEY,) if request.param else ()


@pytest.fixture(autouse=True)
def _all_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="meshpoint")


@pytest.fixture
async def postgres_database(own_postgres: PostgresServer) -> AsyncIterator[str]:
    async with own_database(own_postgres.url) as url:
        await asyncio.to_thread(migrations.upgrade, url)
        yield url


async def act(mesh: CanaryMesh) -> None:
    """Do in a dashboard what quotes values: answer a question, and resume a group of failures."""
    app = Dashboard(mesh.write_config(), access=LocalAccess("ada"))
    browser = Browser(app)
    try:
        answer = {"mode": "json", "json": f'"{mesh.canary}"'}
        link = await _link(browser, "questions", 'href="([^"]+question[?][^"]+)"')
        assert (await browser.submit(link, answer)).status_code == 303
        link = await _link(browser, "failures", 'href="([^"]+)">Resume 1')
        assert mesh.canary in (await browser.get(link)).text
        assert (await browser.submit(link)).status_code == 303
        assert mesh.canary in (await browser.get("/m/demo/audit")).text
    finally:
        await app.aclose()


async def _link(browser: Browser, page: str, pattern: str) -> str:
    shown = (await browser.get(f"/m/demo/{page}")).text
    found = re.search(pattern, shown)
    assert found, shown
    return unescape(found[1])


def queued(mesh: CanaryMesh, agent: str) -> list[bytes]:
    """The bodies in the request queue of an agent."""

    async def take() -> list[bytes]:
        broker, inbox = make_broker(mesh.mesh_settings()), Inbox()
        await broker.open()
        try:
            address = request_queue(AgentName(agent))
            depth = await broker.depth(address)
            await broker.consume(address, 10, inbox)
            return [each.message.body for each in await inbox.take(depth or 0)]
        finally:
            await broker.close()

    return asyncio.run(take())


def check(found: set[str], expected: set[str], keys: tuple[str, ...]) -> None:
    """Nothing is found with keys, and all that is expected without."""
    if keys:
        assert found == set()
    else:
        assert expected - found == set()


async def test_sqlite(
    tmp_path: Path, keys: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/mesh.db"
    mesh = CanaryMesh(tmp_path, url, url, keys, new_canary())
    await mesh.live()
    await act(mesh)
    check(await columns_with(url, mesh.forms), TASKS | {"meshpoint_queue_content.body"}, keys)
    check(set(files_with(tmp_path, mesh.forms)), {"mesh.db"}, keys)
    assert mesh.canary not in caplog.text


async def test_postgres(
    own_postgres: PostgresServer,
    postgres_database: str,
    tmp_path: Path,
    keys: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tables of tasks and queues, and the bytes of data files, of the WAL and of the log."""
    mesh = CanaryMesh(tmp_path, postgres_database, postgres_database, keys, new_canary())
    await mesh.live()
    await act(mesh)
    found = await columns_with(postgres_database, mesh.forms)
    check(found, TASKS | {"meshpoint_queue_message.body"}, keys)
    connection = await asyncpg.connect(postgres_database)
    await connection.execute("CHECKPOINT")
    await connection.close()
    files = files_with(own_postgres.folder.path, mesh.forms)
    kinds = {part for file in files for part in Path(file).parts[1:2]}
    check(kinds, {"base", "pg_wal"}, keys)
    assert mesh.canary not in caplog.text


async def test_rabbitmq(
    own_rabbit: RabbitServer,
    tmp_path: Path,
    keys: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the node writes: segments of queues, and its log."""
    mesh = CanaryMesh(
        tmp_path, f"sqlite:///{tmp_path}/mesh.db", own_rabbit.url, keys, new_canary()
    )
    await mesh.live()
    await own_rabbit.stop()  # cleanly, so that it writes what is in memory
    files = files_with(own_rabbit.folder.path, mesh.forms)
    check({Path(file).parts[0] for file in files}, {"data"}, keys)
    assert mesh.canary not in caplog.text


async def test_redis(own_redis: RedisServer, tmp_path: Path, keys: tuple[str, ...]) -> None:
    """What the server appends to its file: copies of checkpoints and snapshots of memories."""
    url = f"sqlite:///{tmp_path}/mesh.db"
    options = {"checkpoint_cache_url": own_redis.url}
    mesh = CanaryMesh(tmp_path, url, url, keys, new_canary(), options)
    await mesh.live()
    await own_redis.stop()
    files = files_with(own_redis.folder.path, mesh.forms)
    check({Path(file).parts[0] for file in files}, {"appendonlydir"}, keys)


def test_exports(
    tmp_path: Path,
    keys: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each exported file is encrypted, and what reads it has the same content."""
    url, folder = f"sqlite:///{tmp_path}/mesh.db", tmp_path / "exports"
    folder.mkdir()
    mesh = CanaryMesh(tmp_path, url, url, keys, new_canary())
    ids, config = asyncio.run(mesh.live()), str(mesh.write_config())
    (letters,) = [run_main(["dead", "list", "--letters", "--json", "-c", config], capsys).json]
    letter = letters[0]["id"]
    shown = run_main(["dead", "show", letter, "--raw", "-", "-c", config], capsys).out
    commands = {
        "failed.json": ["checkpoints", "export", ids["failed"], "--include-outputs", "-o"],
        "waiting.json": ["tasks", "export", ids["waiting"], "-o"],
        "all": ["tasks", "export", "--agent", "teller", "--state", "waiting", "-o"],
        "letter": ["dead", "show", letter, "--raw"],
    }
    for name, command in commands.items():
        done = run_main([*command, str(folder / name), "-c", config], capsys)
        assert done.code == 0, done.err
        assert ("encrypted" in done.err) is bool(keys)
    expected = {*commands, f"all/{ids['waiting']}.json"} - {"all"}
    check(set(files_with(folder, mesh.forms)), expected, keys)

    monkeypatch.setenv(_VARIABLE, ",".join(keys))
    replayed = asyncio.run(replay_history(teller, folder / "waiting.json"))
    assert replayed.passed == replayed.recorded == 2
    document = read_document(
        str(folder / "failed.json"), AgentName("faulty"), environment_sealer()
    )
    assert document.subtasks[0].output == mesh.canary
    monkeypatch.delenv(_VARIABLE)
    edit = ["--edit", str(folder / "letter"), "--yes", "-c", config]
    assert run_main(["dead", "replay", letter, *edit], capsys).code == 0
    assert queued(mesh, "teller") == [shown.encode()]

    commands["letter"] = ["dead", "show", letters[1]["id"], "--raw"]
    for name, command in commands.items():
        plain = [str(folder / name), "--unencrypted", "-c", config]
        done = run_main([*command, *plain], capsys)
        assert done.code == 0, done.err
        assert ("not encrypted: keep it as safe as the keys" in done.err) is bool(keys)
    assert set(files_with(folder, mesh.forms)) == expected


def test_an_export_opens_only_with_its_key_and_for_its_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/mesh.db"
    mesh = CanaryMesh(tmp_path, url, url, (KEY,), new_canary())
    ids, config = asyncio.run(mesh.live()), str(mesh.write_config())
    file, history = tmp_path / "failed.json", tmp_path / "waiting.json"
    for command in (
        ["checkpoints", "export", ids["failed"], "-o", str(file), "-c", config],
        ["tasks", "export", ids["waiting"], "-o", str(history), "-c", config],
    ):
        assert run_main(command, capsys).code == 0
    with pytest.raises(ConfigurationError, match=r"sealed with key [0-9a-f]{8}, which"):
        read_document(str(file), AgentName("faulty"))
    with pytest.raises(ConfigurationError, match=r"sealed with key [0-9a-f]{8}, which"):
        asyncio.run(replay_history(teller, history))
    monkeypatch.setenv(_VARIABLE, KEY)
    with pytest.raises(ConfigurationError, match="was changed or is not a checkpoint of 'other'"):
        read_document(str(file), AgentName("other"), environment_sealer())
    with pytest.raises(ConfigurationError, match="was changed or belongs to another agent"):
        asyncio.run(replay_history(faulty, history))
    file.write_text(file.read_text()[:-9] + "\n")
    with pytest.raises(ConfigurationError, match="was changed"):
        read_document(str(file), AgentName("faulty"), environment_sealer())


FLOW = """
from meshpoint import agent


@agent("flow", subtasks=["fetch", "rate"])
async def flow(ctx, word: str) -> str:
    page = await ctx.subtask("fetch", fetch, word)
    return await ctx.subtask("rate", rate, page)


def fetch(word: str) -> str:
    return f"a page about {word}"


def rate(page: str) -> str:
    raise RuntimeError(f"no rate for {page}")
"""


def test_exec(
    tmp_path: Path,
    keys: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sessions, its store and its exports, which resume the agent."""
    canary, home = new_canary(), tmp_path / "home"
    mesh = CanaryMesh(tmp_path, "", "", keys, canary)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(_VARIABLE, ",".join(keys))
    name = f"flow_{canary[-8:]}"
    Path(f"{name}.py").write_text(FLOW)
    flow = ["exec", f"{name}:flow", "--input", f'"{canary}"', "--home"]
    export = ["--export", "failed.json", "--include-outputs"]
    failed = run_main([*flow, str(home), *export], capsys)
    assert (failed.code, canary in failed.out + failed.err) == (4, True), failed
    found = {file.partition("/")[0] for file in files_with(tmp_path, mesh.forms)}
    check(found, {"failed.json", "home"}, keys)
    resumed = run_main(
        [*flow, str(tmp_path / "other"), "--resume-from", "failed.json", "--json"], capsys
    )
    assert [(each["name"], each["status"]) for each in resumed.json["steps"]] == [
        ("fetch", "reused"),
        ("rate", "failed"),
    ]
    check(set(files_with(tmp_path / "other", mesh.forms)), {"exec.db"}, keys)
