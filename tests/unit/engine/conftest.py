from collections.abc import AsyncIterator

import pytest

from fake_peer import FakePeer
from meshpoint import Mesh as Connection
from meshpoint.client.transport import Transport

from .faults import FaultyBroker
from .mesh import Mesh, SqlMesh, connected


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    mesh = Mesh()
    yield mesh
    await mesh.close()


@pytest.fixture
async def client(mesh: Mesh) -> FakePeer:
    """A fake peer that sends requests."""
    return await mesh.fake_peer("client")


@pytest.fixture
async def peer(mesh: Mesh) -> FakePeer:
    """A fake peer that the agents under test call."""
    return await mesh.fake_peer("peer")


@pytest.fixture(params=["process", "sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def task_database(request: pytest.FixtureRequest) -> str | None:
    """The database of the tasks, or `None` if they live in the process."""
    if request.param == "process":
        return None
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
async def any_mesh(task_database: str | None) -> AsyncIterator[Mesh]:
    """A mesh for each place in which tasks live."""
    mesh = Mesh() if task_database is None else SqlMesh(task_database)
    yield mesh
    await mesh.close()


@pytest.fixture
async def connection(mesh: Mesh) -> AsyncIterator[Connection]:
    """A connection of a client, in real time."""
    async with connected(mesh) as connection:
        yield connection


@pytest.fixture
async def first(mesh: Mesh) -> AsyncIterator[Connection]:
    """A connection of a client."""
    async with Transport(FaultyBroker(mesh.exchange), now=mesh.clock.now) as transport:
        yield Connection(transport)


@pytest.fixture
async def second(mesh: Mesh) -> AsyncIterator[Connection]:
    """Another connection of the same client."""
    async with Transport(FaultyBroker(mesh.exchange), now=mesh.clock.now) as transport:
        yield Connection(transport)
