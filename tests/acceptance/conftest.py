from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from .fork_server import ForkServer
from .mesh import Backends, Mesh


@pytest.fixture
def embedded(tmp_path: Path, namespace: str) -> Backends:
    """SQLite files for both broker and database."""
    return Backends(
        f"sqlite:///{tmp_path}/broker.db", f"sqlite:///{tmp_path}/tasks.db", namespace, tmp_path
    )


@pytest.fixture
def production(tmp_path: Path, namespace: str, amqp_url: str, postgres_url: str) -> Backends:
    """RabbitMQ and PostgreSQL.

    The heartbeat bounds how long a frozen replica keeps its messages.
    """
    return Backends(f"{amqp_url}?heartbeat=5", postgres_url, namespace, tmp_path)


@pytest.fixture(params=["embedded", pytest.param("production", marks=pytest.mark.servers)])
def backends(request: pytest.FixtureRequest) -> Backends:
    chosen: Backends = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """One fork server for the replicas of all tests."""
    with ForkServer() as started:
        yield started


@pytest.fixture
async def mesh(backends: Backends, fork_server: ForkServer) -> AsyncIterator[Mesh]:
    running = Mesh(backends, fork_server)
    yield running
    await running.close()
