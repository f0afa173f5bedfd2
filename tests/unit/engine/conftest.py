from collections.abc import AsyncIterator

import pytest

from .mesh import Mesh
from .puppet import Puppet


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    mesh = Mesh()
    yield mesh
    await mesh.close()


@pytest.fixture
async def boss(mesh: Mesh) -> Puppet:
    """A puppet that sends requests."""
    return await mesh.puppet("boss")


@pytest.fixture
async def peer(mesh: Mesh) -> Puppet:
    """A puppet that the agents under test call."""
    return await mesh.puppet("peer")
