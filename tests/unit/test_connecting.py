"""`meshpoint.connect`: which mesh it chooses, and the life of the connection."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import meshpoint
from meshpoint import ConfigurationError, MeshpointError, TaskExecutionContext, agent
from meshpoint.local import local_mesh
from meshpoint.model.ids import new_id

VARIABLE = "MESHPOINT_MESH__BROKER_URL"


@agent("echo")
async def echo(ctx: TaskExecutionContext, text: str) -> str:
    return f"{text} from {ctx.a2a_context.requester}"


@pytest_asyncio.fixture
async def namespace() -> AsyncIterator[str]:
    """A mesh in this process that serves `echo`."""
    name = f"m{new_id()}"
    async with local_mesh(echo, namespace=name):
        yield name


async def test_a_block_connects_to_a_url(namespace: str) -> None:
    async with meshpoint.connect("memory://", namespace=namespace, name="api") as mesh:
        assert await mesh.call(echo, "hello") == "hello from api"
    with pytest.raises(meshpoint.MeshClosed):
        await mesh.call(echo, "hello")


async def test_await_connects_until_aclose(namespace: str) -> None:
    mesh = await meshpoint.connect("memory://", namespace=namespace)
    assert await mesh.call(echo, "hello") == "hello from client"
    await mesh.aclose()
    await mesh.aclose()


async def test_a_variable_names_the_mesh(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "memory://")
    monkeypatch.setenv("MESHPOINT_MESH__NAMESPACE", namespace)
    async with meshpoint.connect() as mesh:
        assert await mesh.call(echo, "hello") == "hello from client"


async def test_a_file_names_the_mesh_and_arguments_override_it(
    namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("mesh: {namespace: other, broker_url: 'memory://'}", encoding="utf-8")
    async with meshpoint.connect(config=str(file), namespace=namespace) as mesh:
        assert await mesh.call(echo, "hello") == "hello from client"
    async with meshpoint.connect(config=file) as mesh:
        with pytest.raises(meshpoint.UnknownAgent):
            await mesh.call(echo, "hello")


def test_a_mesh_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigurationError) as refused:
        meshpoint.connect()
    assert str(refused.value) == (
        f'connect(): no mesh is named; pass a URL or config="mesh.yaml", or set {VARIABLE}'
    )


@pytest.mark.parametrize(
    ("url", "namespace", "name", "key"),
    [
        ("http://mesh", None, "client", "mesh.broker_url"),
        ("memory://", "no good", "client", "mesh.namespace"),
        ("memory://", None, "no good", "agent.name"),
    ],
)
def test_wrong_arguments_are_refused_before_connecting(
    url: str, namespace: str | None, name: str, key: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        meshpoint.connect(url, namespace=namespace, name=name)
    assert refused.value.key == key


async def test_a_connection_is_opened_once(namespace: str) -> None:
    connecting = meshpoint.connect("memory://", namespace=namespace)
    async with connecting:
        with pytest.raises(MeshpointError, match=r"call connect\(\) again"):
            await connecting


FORGETFUL = """
import asyncio, sys
import meshpoint

async def main():
    mesh = await meshpoint.connect(sys.argv[1])
    try:
        await mesh.send("nobody", 1)
    except meshpoint.UnknownAgent:
        print("sent")

asyncio.run(main())
"""


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_a_process_can_exit_without_closing_its_connection(scheme: str, tmp_path: Path) -> None:
    url = "memory://" if scheme == "memory" else f"sqlite:///{tmp_path}/mesh.db"
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL, url], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "sent\n"), done.stderr


def test_importing_meshpoint_imports_no_adapter() -> None:
    code = (
        "import sys, meshpoint; sys.exit(str(found) if (found := [name for name in sys.modules "
        "if name.startswith(('meshpoint.adapters', 'meshpoint.wiring', 'meshpoint.settings'))]) "
        "else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
