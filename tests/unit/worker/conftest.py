from collections.abc import AsyncIterator

import pytest

from .mesh import Mesh


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    mesh = Mesh()
    yield mesh
    await mesh.close()
