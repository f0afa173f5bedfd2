"""Fixtures for all tests: servers, and a private database or namespace on them."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from urllib.parse import urlsplit

import hypothesis
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from idle_loop import IdleLoop
from meshpoint.adapters.sql import migrations
from meshpoint.model.ids import new_id
from servers import (
    KINDS,
    DatabasePool,
    NamedServer,
    PostgresServer,
    RabbitServer,
    RedisServer,
    ServersMissing,
    SessionServers,
    own_database,
)

_FLEET = pytest.StashKey[SessionServers]()
_END_TIMEOUT_SECONDS = 60
"""Seconds in which a test's tasks must end after it."""

# No time limit per example: the machine may be busy.
hypothesis.settings.register_profile("meshpoint", deadline=None)
hypothesis.settings.load_profile("meshpoint")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FLEET] = SessionServers()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_FLEET].close()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], IdleLoop]]:
    """Run the tests on a loop on which they can wait until nothing is left to do."""
    return {"idle": IdleLoop}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use servers, so that `-m "not servers"` is right; run the longest first."""
    for item in items:
        if _required_servers(item):
            item.add_marker(pytest.mark.servers)
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Launch the servers that the selected tests need, while other tests run."""
    if session.config.option.collectonly:
        return
    fleet = session.config.stash[_FLEET]
    for fixture in dict.fromkeys(
        name for item in session.items for name in _required_servers(item)
    ):
        if not fleet.named_server(fixture):
            with suppress(ServersMissing):  # the fixture will report it
                fleet.launch(fixture)


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_postgres_url(
    postgres_server: NamedServer | PostgresServer, _migrated: str
) -> AsyncIterator[str]:
    """One database with the tables for all tests of a module."""
    async with own_database(postgres_server.url, _migrated) as url:
        yield url


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _migrated(postgres_server: NamedServer | PostgresServer) -> AsyncIterator[str]:
    """Name of a database that is migrated once and cloned for each test."""
    async with own_database(postgres_server.url) as url:
        await asyncio.to_thread(migrations.upgrade, url)
        yield urlsplit(url).path.strip("/")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _databases(
    postgres_server: NamedServer | PostgresServer, _migrated: str
) -> AsyncIterator[DatabasePool]:
    databases = DatabasePool(postgres_server.url, _migrated)
    yield databases
    await databases.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A private database with tables: parametrized over SQLite and PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tasks.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


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
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def namespace() -> str:
    """A private namespace."""
    return f"test-{new_id()}"
