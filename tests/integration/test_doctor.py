"""`meshpoint doctor` on real servers: what it finds, and that it changes nothing."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import asyncpg
import pytest
import pytest_asyncio
import yaml

from meshpoint._version import __version__
from meshpoint.adapters.sql import SqlStore, catalog_statements, migrations
from meshpoint.adapters.sql.tables import REVISION, VERSION_TABLE
from meshpoint.doctor.examine import examine
from meshpoint.doctor.facts import load_release
from meshpoint.doctor.findings import Finding, Severity, worst
from meshpoint.model.ids import AgentName, ReplicaId, new_id
from meshpoint.model.replicas import Registration
from meshpoint.model.tasks import TaskFilter
from meshpoint.settings import Settings, StoreSettings, load
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import HERE, HOUR, a_call, a_pause, a_release, resumed
from meshpoint.wiring import make_broker
from servers import RabbitServer, RedisServer, redis_client

TRAVEL = AgentName("travel")
CODE = """
from meshpoint import Peer, agent

peer = Peer("flights", str, str)

@agent("travel", version="{version}")
async def travel(ctx, city: str) -> str:
    return await peer(city)
"""
FORMATS = {version: f"travel/function/{version}" for version in ("1", "2")}


@pytest.fixture
def configure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> Callable[..., Settings]:
    """Write the code of an agent, and the configuration that serves it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(broker_url: str, db_url: str, *, version: str = "1", **options: Any) -> Settings:
        module = f"doctor_{new_id()[-12:]}"
        (tmp_path / f"{module}.py").write_text(CODE.format(version=version))
        config = {
            "mesh": {"namespace": namespace, "broker_url": broker_url},
            "agent": {
                "name": "travel",
                "entrypoint": f"{module}:travel",
                "app_version": f"{version}.0",
                "stateless_checkpointing": True,
                "session_service": "sql",
                "session_db_url": db_url,
                **options,
            },
        }
        file = tmp_path / f"{module}.yaml"
        file.write_text(yaml.safe_dump(config))
        return load([file])

    return write


async def diagnose(settings: Settings, **options: Any) -> list[Finding]:
    return await examine(settings, **{"timeout": timedelta(seconds=30), **options})


def named(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


@asynccontextmanager
async def open_store(url: str, namespace: str) -> AsyncIterator[SqlStore]:
    store = SqlStore(url, namespace=namespace)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def write_tasks(url: str, namespace: str, state_format: str, count: int) -> None:
    """Tasks of `travel` that wait for `flights`, paused by version 1.0."""
    async with open_store(url, namespace) as store:
        await store.pause(
            [replace(a_pause(state_format=state_format), app_version="1.0") for _ in range(count)]
        )


async def test_a_new_mesh_has_notes_only_and_stays_new(
    configure: Callable[..., Settings], amqp_url: str, postgres_url: str
) -> None:
    settings = configure(amqp_url, postgres_url)
    findings = await diagnose(settings)
    assert [finding.check for finding in findings] == ["replicas"]
    assert (worst(findings), findings[0].data["replicas"]) == (Severity.NOTE, 0)
    broker = make_broker(settings.mesh)
    await broker.open()
    try:
        for queue in settings_queues():
            assert await broker.depth(queue) is None
        assert not await broker.has_database_marker(TRAVEL)
    finally:
        await broker.close()


def settings_queues() -> list[Any]:
    return [f"travel.{name}" for name in ("req", "nested", "resp", "dlq", "private.doctor")]


async def test_tasks_without_a_reader_are_counted_by_version(
    configure: Callable[..., Settings], database_url: str, tmp_path: Path, namespace: str
) -> None:
    broker_url = f"sqlite:///{tmp_path}/broker.db"
    await write_tasks(database_url, namespace, FORMATS["1"], 3)
    await write_tasks(database_url, namespace, f"{FORMATS['1']}+log", 2)
    await write_tasks(database_url, "another-mesh", FORMATS["1"], 9)
    same = await diagnose(configure(broker_url, database_url))
    assert named(same, "tasks.unread") == named(same, "tasks.other_code") == []
    newer = configure(broker_url, database_url, version="2")
    findings = await diagnose(newer)
    unread = named(findings, "tasks.unread")
    assert [(each.data["format"], each.data["tasks"]) for each in unread] == [
        (FORMATS["1"], 3),
        (f"{FORMATS['1']}+log", 2),
    ]
    assert unread[0].data["states"] == {"waiting": 3}
    assert unread[0].data["versions"] == ["1.0"]
    assert worst(findings) is Severity.WARNING
    both = newer.agents[0].model_copy(
        update={
            "entrypoint": (
                *newer.agents[0].entrypoints,
                *configure(broker_url, database_url).agents[0].entrypoints,
            )
        }
    )
    served = await diagnose(newer.model_copy(update={"agents": (both,)}))
    assert named(served, "tasks.unread") == []
    assert [each.data["tasks"] for each in named(served, "tasks.older")] == [3, 2]


async def test_edited_code_may_park_and_parked_tasks_are_tried_by_others_only(
    configure: Callable[..., Settings], database_url: str, tmp_path: Path, namespace: str
) -> None:
    broker_url = f"sqlite:///{tmp_path}/broker.db"
    await write_tasks(database_url, namespace, FORMATS["1"], 3)
    async with open_store(database_url, namespace) as store:
        parked = replace(a_pause(state_format=FORMATS["1"]), app_version="1.0")
        await store.pause([parked])
        reader = replace(HERE, formats=frozenset({FORMATS["1"]}))
        task = await resumed(store, parked, replica=reader)
        settings = {
            version: configure(broker_url, database_url, app_version=version)
            for version in ("1.0", "1.1", "1.2")
        }
        tried = load_release(settings["1.1"].agents[0]).code_version
        await store.release([replace(a_release(task.run, parked="call 1"), version=tried)])
    by_version = {version: await diagnose(each) for version, each in settings.items()}
    assert named(by_version["1.0"], "tasks.other_code") == []
    (edited,) = named(by_version["1.2"], "tasks.other_code")
    assert (edited.data["tasks"], edited.data["versions"]) == (3, ["1.0"])
    assert worst(by_version["1.2"]) is Severity.WARNING  # flights never had a replica
    (retried,) = named(by_version["1.2"], "tasks.retried")
    assert (retried.data["reason"], retried.data["tried_versions"]) == ("call 1", [tried])
    assert named(by_version["1.2"], "tasks.parked") == []
    (stuck,) = named(by_version["1.1"], "tasks.parked")
    assert stuck.severity is Severity.WARNING
    assert "meshpoint tasks resume --state parked --agent travel" in stuck.fix


async def test_suspended_tasks_are_counted(
    configure: Callable[..., Settings], database_url: str, tmp_path: Path, namespace: str
) -> None:
    settings = configure(f"sqlite:///{tmp_path}/broker.db", database_url)
    await write_tasks(database_url, namespace, FORMATS["1"], 3)
    assert named(await diagnose(settings), "tasks.suspended") == []
    async with open_store(database_url, namespace) as store:
        found = await store.tasks(limit=2)
        await store.suspend([task.task_id for task in found])
        (summary, *_) = await store.tasks(where=TaskFilter(suspended=True))
    assert summary.suspended_at is not None
    (finding,) = named(await diagnose(settings), "tasks.suspended")
    assert finding.severity is Severity.NOTE
    assert finding.data["tasks"] == 2
    since = summary.suspended_at.isoformat(timespec="seconds")
    assert finding.problem.startswith(f"2 tasks suspended, the oldest since {since}; no replica")
    assert "meshpoint tasks resume --state suspended --agent travel" in finding.fix


async def test_tasks_of_removed_agents_and_for_missing_peers(
    configure: Callable[..., Settings], amqp_url: str, postgres_url: str, namespace: str
) -> None:
    await write_tasks(postgres_url, namespace, FORMATS["1"], 2)
    settings = configure(amqp_url, postgres_url)
    async with open_store(postgres_url, namespace) as store:
        pause = a_pause(a_call("h", peer=AgentName("hotels")), state_format=FORMATS["1"])
        await store.pause([pause])
        run = replace(a_pause().run, agent=AgentName("removed"))
        await store.pause([a_pause(run=run)])
    broker = make_broker(settings.mesh)
    await broker.open()
    await broker.declare(AgentName("hotels"))
    try:
        findings = await diagnose(settings)
        (removed,) = named(findings, "tasks.removed_agent")
        assert (removed.subject, removed.data["tasks"]) == ("removed", 1)
        missing = {each.subject: each.data for each in named(findings, "tasks.missing_peer")}
        assert missing == {
            "flights": {"tasks": 3, "is_declared": False},
            "hotels": {"tasks": 1, "is_declared": True},
        }
        await broker.consume(response("hotels"), 1, lambda delivery: None)
        await broker.declare(AgentName("removed"))
        await broker.consume(response("removed"), 1, lambda delivery: None)
        findings = await diagnose(settings)
        assert named(findings, "tasks.removed_agent") == []
        assert [each.subject for each in named(findings, "tasks.missing_peer")] == ["flights"]
    finally:
        await broker.close()


def response(agent: str) -> Any:
    return f"{agent}.resp"


async def test_tables_behind_and_ahead_of_the_release(
    configure: Callable[..., Settings], empty_postgres_url: str, tmp_path: Path, namespace: str
) -> None:
    settings = configure(f"sqlite:///{tmp_path}/broker.db", empty_postgres_url)
    (missing,) = named(await diagnose(settings), "schema.missing")
    assert (missing.severity, missing.data["revision"]) == (Severity.ERROR, None)
    await asyncio.to_thread(migrations.upgrade, empty_postgres_url)
    await write_tasks(empty_postgres_url, namespace, FORMATS["2"], 1)
    for revision in ("0005", "0001"):
        await asyncio.to_thread(migrations.downgrade, empty_postgres_url, revision)
        findings = await diagnose(settings)
        (behind,) = named(findings, "schema.behind")
        assert (behind.severity, behind.data["revision"]) == (Severity.ERROR, revision)
        assert [each.data["tasks"] for each in named(findings, "tasks.unread")] == [1]
    await asyncio.to_thread(migrations.upgrade, empty_postgres_url)
    connection = await asyncpg.connect(empty_postgres_url)
    await connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    await connection.close()
    findings = await diagnose(settings)
    (newer,) = named(findings, "schema.newer")
    assert newer.severity is Severity.NOTE
    assert f"meshpoint db downgrade {REVISION}" in newer.fix


async def test_a_full_disk_is_an_error_although_reading_works(
    configure: Callable[..., Settings],
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = configure(f"sqlite:///{tmp_path}/broker.db", postgres_url)
    assert not named(await diagnose(settings), "database.full")
    raising = "DO $$BEGIN RAISE EXCEPTION 'No space left' USING ERRCODE = '{code}'; END$$"
    for code, is_full in (("53100", True), ("53400", False)):  # 53400: a limit of the login
        statement = raising.replace("{code}", code)
        monkeypatch.setattr(catalog_statements, "WRITE_TEMPORARY_FILE", statement)
        found = named(await diagnose(settings), "database.full")
        assert [each.severity for each in found] == [Severity.ERROR] * is_full


async def test_the_check_of_the_disk_writes_a_file_and_changes_nothing(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    async with connection.transaction(readonly=True):
        for setting in catalog_statements.TEMPORARY_FILE_SETTINGS:
            await connection.execute(setting)
        plan = await connection.fetch(
            f"EXPLAIN (ANALYZE, BUFFERS) {catalog_statements.WRITE_TEMPORARY_FILE}"
        )
    await connection.close()
    assert "temp read" in "\n".join(row[0] for row in plan)
    assert "written=" in "\n".join(row[0] for row in plan)


async def test_a_role_that_may_not_write(
    configure: Callable[..., Settings], postgres_url: str, tmp_path: Path
) -> None:
    role, connection = f"r{new_id()[-12:]}", await asyncpg.connect(postgres_url)
    await connection.execute(
        f"CREATE ROLE {role} LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}"
    )
    try:
        poor_url = postgres_url.replace("://postgres", f"://{role}")
        findings = await diagnose(configure(f"sqlite:///{tmp_path}/broker.db", poor_url))
        (problem,) = named(findings, "database.login")
        assert problem.severity is Severity.ERROR
        assert problem.problem.startswith("the role may not INSERT in the table agent_")
    finally:
        await connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
        await connection.close()


@pytest_asyncio.fixture
async def make_login(own_rabbit: RabbitServer) -> AsyncIterator[Callable[..., Any]]:
    """Creates a login with these permissions, and returns its URL."""
    names: list[str] = []

    async def make(configure: str, write: str, read: str) -> str:
        names.append(f"d{new_id()[-12:]}")
        await own_rabbit.add_user(names[-1], "secret", configure, write, read)
        return own_rabbit.url.replace("guest:guest", f"{names[-1]}:secret")

    yield make
    for name in names:
        await own_rabbit.delete_user(name)


async def test_a_login_without_rights(
    configure: Callable[..., Settings],
    make_login: Callable[..., Any],
    own_rabbit: RabbitServer,
    postgres_url: str,
    namespace: str,
) -> None:
    url = await make_login("^$", f"^{namespace}", f"^{namespace}")
    findings = await diagnose(configure(url, postgres_url))
    lacking = named(findings, "broker.right")
    assert {finding.data["right"] for finding in lacking} == {"configure"}
    needed = {str(f.data["object"]) for f in lacking if f.severity is Severity.ERROR}
    assert needed == {f"{namespace}.{name}" for name in ("mesh", *settings_queues())}
    (marker,) = [f for f in lacking if f.severity is Severity.WARNING]
    assert marker.data["object"] == f"{namespace}.travel.database"
    # Existing objects are used as they are: only the private queue is still missing.
    own = make_broker(configure(own_rabbit.url, postgres_url).mesh)
    await own.open()
    await own.declare(TRAVEL)
    await own.mark_database(TRAVEL)
    await own.close()
    lacking = named(await diagnose(configure(url, postgres_url)), "broker.right")
    private = f"{namespace}.travel.private.doctor"
    assert [finding.data["object"] for finding in lacking] == [private]
    readable = rf"^{namespace}\.(mesh|travel\.(req|nested))"
    url = await make_login(".*", rf"^{namespace}\.travel", readable)
    lacking = named(await diagnose(configure(url, postgres_url)), "broker.right")
    assert {(f.data["right"], f.data["object"]) for f in lacking} == {
        ("write", f"{namespace}.mesh"),
        ("read", f"{namespace}.travel.resp"),
        ("read", private),
    }
    url = await make_login(".*", ".*", rf"^{namespace}\.travel")
    (lacking_right,) = named(await diagnose(configure(url, postgres_url)), "broker.right")
    assert lacking_right.data == {"right": "read", "object": f"{namespace}.mesh"}
    wrong = own_rabbit.url.replace("guest:guest", "nobody:wrong")
    (refusal,) = named(await diagnose(configure(wrong, postgres_url)), "broker.refused")
    assert (refusal.severity, "wrong" in str(refusal)) == (Severity.ERROR, False)


async def test_a_queue_with_other_arguments_comes_with_a_policy(
    configure: Callable[..., Settings], own_rabbit: RabbitServer, postgres_url: str, namespace: str
) -> None:
    settings = configure(own_rabbit.url, postgres_url)
    older = settings.mesh.model_copy(update={"max_queue_length": 7})
    broker = make_broker(older)
    await broker.open()
    await broker.declare(TRAVEL)
    await broker.close()
    found = named(await diagnose(settings), "broker.arguments")
    assert {finding.severity for finding in found} == {Severity.NOTE}
    queue = f"{namespace}.travel.req"
    (request,) = [finding for finding in found if finding.data["queue"] == queue]
    assert "x-max-length: received '100000' but current is '7'" in str(request.data["difference"])
    program, *arguments = shlex.split(str(request.data["policy"]))
    assert program == "rabbitmqctl"
    await own_rabbit.control(*arguments)  # the node accepts it
    await own_rabbit.control("clear_policy", queue)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("rabbit", marks=pytest.mark.servers)])
async def test_a_marker_stays_until_no_task_and_no_replica_is_left(
    kind: str,
    request: pytest.FixtureRequest,
    configure: Callable[..., Settings],
    tmp_path: Path,
    namespace: str,
) -> None:
    url = (
        f"sqlite:///{tmp_path}/broker.db"
        if kind == "sqlite"
        else request.getfixturevalue("amqp_url")
    )
    db_url = f"sqlite:///{tmp_path}/tasks.db"
    memory = configure(url, db_url, session_service="memory", stateless_checkpointing=False)
    findings = await diagnose(memory)
    assert named(findings, "marker.refuses") == []
    assert named(findings, "replicas")[0].data["tasks"] is None  # it has no database
    await write_tasks(db_url, namespace, FORMATS["1"], 1)
    broker = make_broker(memory.mesh)
    await broker.open()
    await broker.declare(TRAVEL, ReplicaId(new_id()))
    await broker.consume(response("travel"), 1, lambda delivery: None)
    (new,) = named(await diagnose(configure(url, db_url)), "marker.new")
    assert (new.severity, new.data["replicas"]) == (Severity.WARNING, 1)
    await broker.mark_database(TRAVEL)
    database = StoreSettings.at(db_url, key="--db")

    async def remove(*others: StoreSettings) -> list[Finding]:
        return await diagnose(memory, others=others, remove_marker=TRAVEL)

    async def reason(*others: StoreSettings) -> str:
        return named(await remove(*others), "marker.kept")[0].problem

    assert await reason(database) == "its marker was not removed: 1 replica serving the agent"
    await broker.close()
    findings = await diagnose(memory, others=[database])
    (refused,) = named(findings, "marker.refuses")
    assert (refused.severity, refused.data["tasks"]) == (Severity.ERROR, 1)
    assert named(findings, "replicas")[0].data["tasks"] == 1
    assert "no database with tables is known" in await reason()
    empty = StoreSettings.at(f"sqlite:///{tmp_path}/mistyped.db", key="--db")
    assert "no database with tables is known" in await reason(empty)
    assert "1 task left in the database" in await reason(database)
    async with open_store(db_url, namespace) as store:
        await store._database.transact(lambda tx: tx.execute("DELETE FROM agent_paused_tasks"))
    findings = await remove(database)
    assert [finding.check for finding in findings] == [
        "marker.removed",
        "checkpointing.off",
        "replicas",
    ]
    assert "it is not set" in await reason(database)


async def test_a_killed_replica_is_not_counted_in_a_file(
    configure: Callable[..., Settings], tmp_path: Path
) -> None:
    """Its row is still there."""
    settings = configure(f"sqlite:///{tmp_path}/broker.db", f"sqlite:///{tmp_path}/tasks.db")
    broker = make_broker(settings.mesh)
    await broker.open()
    await broker.declare(TRAVEL, ReplicaId(new_id()))
    (living,) = named(await diagnose(settings), "replicas")
    assert living.data["replicas"] == 1
    copy = tmp_path / "copy.db"
    for suffix in ("", "-wal"):
        (tmp_path / f"copy.db{suffix}").write_bytes((tmp_path / f"broker.db{suffix}").read_bytes())
    await broker.close()
    mesh = settings.mesh.model_copy(update={"broker_url": f"sqlite:///{copy}"})
    (dead,) = named(await diagnose(settings.model_copy(update={"mesh": mesh})), "replicas")
    assert dead.data["replicas"] == 0


@dataclass
class SilentServer:
    """Accepts connections and never answers."""

    port: int = 0
    is_connected: asyncio.Event = field(default_factory=asyncio.Event)
    _connections: list[asyncio.StreamWriter] = field(default_factory=list)
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close all connections and accept no more."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append(writer)
        self.is_connected.set()


async def test_servers_that_do_not_answer_hide_no_other(
    configure: Callable[..., Settings], redis_url: str
) -> None:
    async with SilentServer() as server:
        settings = configure(
            f"amqp://guest:guest@127.0.0.1:{server.port}/",
            f"postgresql://user:secret@127.0.0.1:{server.port}/mesh",
            memory_url=f"redis://127.0.0.1:{server.port}/0",
            memory_snapshot_url=redis_url,
        )
        # Long enough for a busy machine: the other Redis must answer in time.
        findings = await diagnose(settings, timeout=timedelta(seconds=2))
        failed = [each for each in findings if each.severity is Severity.UNAVAILABLE]
        assert [each.check for each in failed] == [
            "database.unavailable",
            "broker.unavailable",
            "redis.unavailable",
        ]
        assert "secret" not in str(failed)
        assert worst(findings) is Severity.UNAVAILABLE
        assert named(findings, "replicas") == []


async def test_all_servers_are_read_at_the_same_time(configure: Callable[..., Settings]) -> None:
    """None stops before all have a connection, and the last one is reported first."""
    async with SilentServer() as database, SilentServer() as broker, SilentServer() as redis:
        settings = configure(
            f"amqp://guest:guest@127.0.0.1:{broker.port}/",
            f"postgresql://user:secret@127.0.0.1:{database.port}/mesh",
            memory_url=f"redis://127.0.0.1:{redis.port}/0",
        )
        diagnosis = asyncio.ensure_future(diagnose(settings, timeout=timedelta(hours=1)))
        for server in (database, broker, redis):
            await server.is_connected.wait()
        for server in (redis, broker, database):
            server.stop()
        failed = [each for each in await diagnosis if each.severity is Severity.UNAVAILABLE]
        assert [each.check for each in failed] == [
            "database.unavailable",
            "broker.unavailable",
            "redis.unavailable",
        ]


async def of_redis(settings: Settings) -> list[Finding]:
    return [each for each in await diagnose(settings) if each.check.startswith("redis")]


async def test_redis_that_evicts_or_forgets_or_refuses(
    configure: Callable[..., Settings], own_redis: RedisServer, tmp_path: Path, namespace: str
) -> None:
    places = f"sqlite:///{tmp_path}/broker.db", f"sqlite:///{tmp_path}/tasks.db"
    memory = configure(*places, memory_url=own_redis.url)
    cache = configure(*places, checkpoint_cache_url=own_redis.url)
    async with redis_client(own_redis.url) as redis:
        assert await of_redis(memory) == []
        await redis.config_set("maxmemory-policy", "allkeys-lru")
        await redis.config_set("appendonly", "no")
        await redis.execute_command(
            "ACL", "SETUSER", "poor", "on", ">secret", "+@all", "-eval", "~*"
        )
        try:
            found = await of_redis(memory)
            assert [(each.check, each.severity) for each in found] == [
                ("redis.evicts", Severity.WARNING),
                ("redis.not_persistent", Severity.WARNING),
            ]
            assert "allkeys-lru" in found[0].problem
            assert await of_redis(cache) == []
            poor = own_redis.url.replace("redis://", "redis://poor:secret@")
            (refused,) = await of_redis(configure(*places, memory_url=poor))
            assert (refused.check, refused.severity, "secret" in str(refused)) == (
                "redis.refused",
                Severity.ERROR,
                False,
            )
            assert await redis.keys(f"{namespace}*") == []
        finally:
            with suppress(Exception):
                await redis.execute_command("ACL", "DELUSER", "poor")
            await redis.config_set("maxmemory-policy", "noeviction")
            await redis.config_set("appendonly", "yes")


async def test_clocks_apart(
    configure: Callable[..., Settings], postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    settings = configure(f"sqlite:///{tmp_path}/broker.db", postgres_url, memory_url=redis_url)
    assert named(await diagnose(settings), "clock.apart") == []
    findings = named(await diagnose(settings, clock=FakeClock()), "clock.apart")
    assert [each.severity for each in findings] == [Severity.WARNING] * 2
    assert all("ahead of this host's" in each.problem for each in findings)


async def test_registered_replicas_are_described(
    configure: Callable[..., Settings], database_url: str, tmp_path: Path, namespace: str
) -> None:
    await write_tasks(database_url, namespace, FORMATS["1"], 1)
    settings = configure(f"sqlite:///{tmp_path}/broker.db", database_url, version="2")
    old = Registration(
        ReplicaId("old"),
        TRAVEL,
        "0.0.1",
        "1.0",
        frozenset({FORMATS["1"]}),
        10,
        "host-1",
        valid_for=HOUR,
    )
    async with open_store(database_url, namespace) as store:
        await store.register(old)
        await store.register(replace(old, id=ReplicaId("lost"), valid_for=timedelta(), pid=17))
    findings = await diagnose(settings)
    (unread,) = named(findings, "tasks.unread")
    assert unread.problem.endswith("; running replicas read it (1.0)")
    assert unread.data["readers"] == ["old"]
    (lost,) = named(findings, "replicas.lost")
    assert lost.problem.startswith("the replica lost on host-1 (pid 17) was last seen at ")
    (release,) = named(findings, "replicas.release")
    assert release.problem == f"1 replica of Meshpoint 0.0.1; this is {__version__}"
    (serving,) = named(findings, "replicas")
    assert "0 replicas now, 1 registered (1.0), " in serving.problem
    registered = serving.data["registered"]
    assert isinstance(registered, list)
    assert [each["id"] for each in registered if isinstance(each, dict)] == ["old"]
