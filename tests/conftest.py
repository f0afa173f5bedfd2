"""Fixtures for all tests: servers, and a private database or namespace on them."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import shutil
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from earlier_sources import extract_release
from earlier_store import EarlierRelease
from idle_loop import IdleLoop
from meshpoint.adapters.sql import SqlStore, migrations
from meshpoint.model.ids import new_id
from meshpoint.testing.clock import FakeClock
from servers import (
    KINDS,
    DatabasePool,
    NamedServer,
    PostgresServer,
    RabbitServer,
    RedisServer,
    ServersMissing,
    SessionServers,
    create_database,
    drop_database,
    own_database,
    redis_client,
    url_on,
)
from servers.memory_folder import memory_folder
from servers.process import ServerFolder

_FLEET = pytest.StashKey[SessionServers]()
Result = TypeVar("Result")
_END_TIMEOUT_SECONDS = 60
"""Seconds in which a test's tasks must end after it."""

# No time limit per example: the machine may be busy.
hypothesis.settings.register_profile("meshpoint", deadline=None)
hypothesis.settings.load_profile("meshpoint")


def pytest_configure(config: pytest.Config) -> None:
    ServerFolder.parent = memory_folder()
    if ServerFolder.parent is not None:  # SQLite commits then wait for no disk
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(ServerFolder.parent))
    config.stash[_FLEET] = SessionServers()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_FLEET].close()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], IdleLoop]]:
    """Run the tests on a loop on which they can wait until nothing is left to do."""
    return {"idle": IdleLoop}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use servers, so that `-m "not servers"` is right; run the longest first.

    Each worker starts with an equal share of consecutive tests, and later takes over tests from
    the end of another's. So the first worker alone runs the tests that stop servers, and the
    others start none for that.
    """
    for item in items:
        if _required_servers(item):
            item.add_marker(pytest.mark.servers)
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker("timeout") is not None:
        return 0
    return 1 if any(map(_is_own, _required_servers(item))) else 2


def pytest_collection_finish(session: pytest.Session) -> None:
    """Launch the servers that the selected tests need, while other tests run."""
    if session.config.option.collectonly:
        return
    gc.freeze()  # thousands of tests stay: collections need not visit them
    fleet = session.config.stash[_FLEET]
    for fixture in dict.fromkeys(
        name for item in session.items for name in _required_servers(item)
    ):
        if not _is_own(fixture) and not fleet.named_server(fixture):
            with suppress(ServersMissing):  # the fixture will report it
                fleet.launch(fixture)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Freeze what a module leaves: a full collection then takes no time.

    mypy, which some tests call, unfreezes everything.
    """
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the stack of every asyncio task to the report of a test that hangs.

    The traceback itself ends in the event loop.
    """
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(pytest.fail.Exception):
        report.sections += [("asyncio task", stack) for stack in _task_stacks()]
    return report


def _task_stacks() -> Iterator[str]:
    # there may be no event loop
    with suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
        for task in asyncio.all_tasks(asyncio.get_event_loop_policy().get_event_loop()):
            stack = StringIO()
            task.print_stack(file=stack)
            yield stack.getvalue()


def _required_servers(item: pytest.Item) -> list[str]:
    return [name for name in getattr(item, "fixturenames", ()) if name in KINDS]


def _is_own(fixture: str) -> bool:
    """Whether tests may stop the server. Most workers run no such test."""
    return fixture.startswith("own_")


def _server(
    config: pytest.Config, fixture: str
) -> NamedServer | PostgresServer | RabbitServer | RedisServer:
    fleet = config.stash[_FLEET]
    named = fleet.named_server(fixture)
    if named:
        return named
    try:
        server = fleet.launch(fixture)
    except ServersMissing as missing:
        pytest.fail(str(missing), pytrace=False)
    server.wait_ready()
    assert isinstance(server, PostgresServer | RabbitServer | RedisServer)
    return server


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> None:
    """Fail a test that leaves an asyncio task behind; otherwise a later test gets its warnings."""
    function = getattr(request, "function", None)
    if inspect.iscoroutinefunction(function) and "loop_scope" not in _asyncio_mark(request):
        request.getfixturevalue("_no_task_left")


def _asyncio_mark(request: pytest.FixtureRequest) -> dict[str, object]:
    mark = request.node.get_closest_marker("asyncio")
    return mark.kwargs if mark else {}


@pytest_asyncio.fixture
async def _no_task_left() -> AsyncIterator[None]:
    yield
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, leftover_tasks = await asyncio.wait(tasks, timeout=_END_TIMEOUT_SECONDS)
        assert not leftover_tasks


@pytest.fixture(scope="session")
def postgres_server(pytestconfig: pytest.Config) -> NamedServer | PostgresServer:
    """The shared PostgreSQL: `.url`."""
    server = _server(pytestconfig, "postgres_server")
    assert isinstance(server, NamedServer | PostgresServer)
    return server


@pytest.fixture(scope="session")
def rabbit_server(pytestconfig: pytest.Config) -> NamedServer | RabbitServer:
    """The shared RabbitMQ: `.url`."""
    server = _server(pytestconfig, "rabbit_server")
    assert isinstance(server, NamedServer | RabbitServer)
    return server


@pytest.fixture(scope="session")
def redis_server(pytestconfig: pytest.Config) -> NamedServer | RedisServer:
    """The shared Redis: `.url`."""
    server = _server(pytestconfig, "redis_server")
    assert isinstance(server, NamedServer | RedisServer)
    return server


@pytest.fixture(scope="session")
def own_postgres_server(pytestconfig: pytest.Config) -> PostgresServer:
    """Use `own_postgres` instead."""
    server = _server(pytestconfig, "own_postgres_server")
    assert isinstance(server, PostgresServer)
    return server


@pytest.fixture(scope="session")
def own_rabbit_server(pytestconfig: pytest.Config) -> RabbitServer:
    """Use `own_rabbit` instead."""
    server = _server(pytestconfig, "own_rabbit_server")
    assert isinstance(server, RabbitServer)
    return server


@pytest.fixture(scope="session")
def own_redis_server(pytestconfig: pytest.Config) -> RedisServer:
    """Use `own_redis` instead."""
    server = _server(pytestconfig, "own_redis_server")
    assert isinstance(server, RedisServer)
    return server


@pytest.fixture
def own_postgres(own_postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    """A PostgreSQL that the test may stop, kill and start; it runs again for the next test."""
    yield own_postgres_server
    own_postgres_server.wait_ready()


@pytest.fixture
def own_rabbit(own_rabbit_server: RabbitServer) -> Iterator[RabbitServer]:
    """A RabbitMQ that the test may stop, kill and start; it runs again for the next test."""
    yield own_rabbit_server
    own_rabbit_server.wait_ready()


@pytest.fixture
def own_redis(own_redis_server: RedisServer) -> Iterator[RedisServer]:
    """A Redis that the test may flush, stop, kill and start; it runs again for the next test."""
    yield own_redis_server
    own_redis_server.wait_ready()


@pytest.fixture
async def empty_postgres_url(postgres_server: NamedServer | PostgresServer) -> AsyncIterator[str]:
    """A private database without tables."""
    async with own_database(postgres_server.url) as url:
        yield url


@pytest.fixture
async def postgres_url(_databases: DatabasePool) -> AsyncIterator[str]:
    """A private database with the tables."""
    async with _databases.borrow() as url:
        yield url


@pytest.fixture(scope="module")
def module_postgres_url(
    postgres_server: NamedServer | PostgresServer, _migrated: str
) -> Iterator[str]:
    """One database with the tables for all tests of a module."""
    name = _run(create_database(postgres_server.url, _migrated))
    yield url_on(postgres_server.url, name)
    _run(drop_database(postgres_server.url, name))


@pytest.fixture(scope="module")
def module_queues_url(postgres_server: NamedServer | PostgresServer) -> Iterator[str]:
    """Another database for all tests of a module, without tables."""
    name = _run(create_database(postgres_server.url))
    yield url_on(postgres_server.url, name)
    _run(drop_database(postgres_server.url, name))


def _run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a fixture that several tests share.

    pytest-asyncio would set up an async fixture again for each test, because the parameter of its
    loop factories has the scope of a test.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@pytest.fixture(scope="session")
def _migrated(postgres_server: NamedServer | PostgresServer) -> Iterator[str]:
    """Name of a database that is migrated once and cloned for each test."""
    name = _run(create_database(postgres_server.url))
    _run(asyncio.to_thread(migrations.upgrade, url_on(postgres_server.url, name)))
    yield name
    _run(drop_database(postgres_server.url, name))


@pytest.fixture(scope="session")
def _databases(
    postgres_server: NamedServer | PostgresServer, _migrated: str
) -> Iterator[DatabasePool]:
    databases = DatabasePool(postgres_server.url, _migrated)
    yield databases
    _run(databases.close())


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file whose tables are created once and copied for each test."""
    path = tmp_path_factory.mktemp("template") / "tasks.db"

    async def create() -> None:
        store = SqlStore(f"sqlite:///{path}", namespace="template")
        await store.open()
        await store.close()

    _run(create())
    return path


@pytest.fixture
def sqlite_url(tmp_path: Path, _sqlite_template: Path) -> str:
    """A private SQLite file with the tables."""
    return f"sqlite:///{shutil.copy(_sqlite_template, tmp_path / 'tasks.db')}"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def database_url(request: pytest.FixtureRequest) -> str:
    """A private database with tables: parametrized over SQLite and PostgreSQL."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def clock() -> FakeClock:
    """The test's clock."""
    return FakeClock()


@pytest.fixture
async def store(database_url: str, clock: FakeClock) -> AsyncIterator[SqlStore]:
    """A store on the test's database, on its clock."""
    opened = SqlStore(database_url, namespace="test", clock=clock)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture(scope="module")
def earlier_release(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EarlierRelease]:
    """The release of the commit that the module names as `EARLIER`."""
    sources = extract_release(request.module.EARLIER, tmp_path_factory.mktemp("earlier"), "src")
    if sources is None:
        pytest.skip("the history of the repository is not here")
    with EarlierRelease(sources / "src") as release:
        yield release


@pytest.fixture
def earlier(
    earlier_release: EarlierRelease, database_url: str, clock: FakeClock
) -> Callable[..., Any]:
    """Run a command of `earlier_store` on the test's database, at the time of the test's clock."""
    return partial(earlier_release.run, url=database_url, clock=clock)


@pytest.fixture
def amqp_url(rabbit_server: NamedServer | RabbitServer) -> str:
    """URL of the shared RabbitMQ."""
    return rabbit_server.url


@pytest.fixture
def redis_url(redis_server: NamedServer | RedisServer) -> str:
    """URL of the shared Redis."""
    return redis_server.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """Direct connection to the shared Redis."""
    async with redis_client(redis_url) as client:
        yield client


@pytest.fixture
def namespace() -> str:
    """A private namespace."""
    return f"test-{new_id()}"
