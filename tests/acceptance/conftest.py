import os
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from .fork_server import ForkServer
from .mesh import Backends, Mesh

_BACKENDS_NAME = re.compile("embedded|production|postgresql")
_ALL_BACKENDS = bool(os.environ.get("MESHPOINT_ALL_BACKENDS"))


@pytest.hookimpl(tryfirst=True)  # before the tests are shared among the workers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run each case on a single backend, and an equal share of the cases on each.

    With `MESHPOINT_ALL_BACKENDS`, every case runs on every backend.
    """
    if _ALL_BACKENDS:
        return
    items_by_case: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            items_by_case[_BACKENDS_NAME.sub("", item.nodeid)].append(item)
    left_out: set[pytest.Item] = set()
    for index, same in enumerate(each for each in items_by_case.values() if len(each) > 1):
        # Neither all cases "before" a step share a backend, nor all cases "after" it.
        chosen = same[(index + index // len(same)) % len(same)]
        left_out.update(item for item in same if item is not chosen)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


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


@pytest.fixture
def postgresql(tmp_path: Path, namespace: str, postgres_url: str) -> Backends:
    """One database on PostgreSQL for queues and tasks."""
    return Backends(postgres_url, postgres_url, namespace, tmp_path)


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("production", marks=pytest.mark.servers),
        pytest.param("postgresql", marks=pytest.mark.servers),
    ]
)
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
