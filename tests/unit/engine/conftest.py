from collections.abc import AsyncIterator

import pytest

from fake_peer import FakePeer

from .mesh import Mesh


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
