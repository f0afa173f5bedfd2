from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fake_peer import FakePeer

from .mesh import Mesh, SqlMesh


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
def task_database(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """The database of the tasks, or `None` if they live in the process."""
    match request.param:
        case "process":
            return None
        case "sqlite":
            return f"sqlite:///{tmp_path}/tasks.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
async def any_mesh(task_database: str | None) -> AsyncIterator[Mesh]:
    """A mesh for each place in which tasks live."""
    mesh = Mesh() if task_database is None else SqlMesh(task_database)
    yield mesh
    await mesh.close()
