import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from .fork_server import ForkServer
from .mesh import Backends, Mesh

_ALL_BACKENDS = bool(os.environ.get("MESHPOINT_ALL_BACKENDS"))


@pytest.hookimpl(tryfirst=True)  # before the tests are shared among the workers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run each case on one backend, half of the cases of a module on either.

    With `MESHPOINT_ALL_BACKENDS`, every case runs on both.
    """
    if _ALL_BACKENDS:
        return
    cases_by_module: dict[Path, dict[str, list[pytest.Item]]]
    cases_by_module = defaultdict(lambda: defaultdict(list))
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            case = item.nodeid.replace("embedded", "").replace("production", "")
            cases_by_module[item.path][case].append(item)
    left_out: set[pytest.Item] = set()
    for cases in cases_by_module.values():
        pairs = [pair for pair in cases.values() if len(pair) == 2]
        if len(pairs) > 1:
            # Neighbouring cases, such as before and after a step, do not share a backend, and
            # neither do all cases "before".
            left_out.update(pair[index.bit_count() % 2] for index, pair in enumerate(pairs))
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
