from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from .kit import Mesh, Rung
from .nursery import Nursery


@pytest.fixture
def embedded(tmp_path: Path, namespace: str) -> Rung:
    """SQLite files for both broker and database."""
    return Rung(f"sqlite:///{tmp_path}/broker.db", f"sqlite:///{tmp_path}/tasks.db", namespace, tmp_path)


@pytest.fixture
def production(tmp_path: Path, namespace: str, amqp_url: str, postgres_url: str) -> Rung:
    """RabbitMQ and PostgreSQL. The heartbeat bounds how long a frozen replica keeps its messages."""
    return Rung(f"{amqp_url}?heartbeat=5", postgres_url, namespace, tmp_path)


@pytest.fixture(params=["embedded", pytest.param("production", marks=pytest.mark.servers)])
def rung(request: pytest.FixtureRequest) -> Rung:
    chosen: Rung = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One fork server for the replicas of all tests."""
    with Nursery() as started:
        yield started


@pytest.fixture
async def mesh(rung: Rung, nursery: Nursery) -> AsyncIterator[Mesh]:
    running = Mesh(rung, nursery)
    yield running
    await running.close()
