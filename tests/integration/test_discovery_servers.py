"""Discovery over real brokers, and next to a release that knows no cards."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, create_model

from earlier_sources import extract_release
from meshpoint import AgentCard, Context, Failed, Mesh, agent, offer_peers, peer_of_card, wiring
from meshpoint.connecting import connect_to
from meshpoint.model.events import Event, Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import dead_letter_queue
from meshpoint.settings import AgentSettings, MeshSettings, Settings

EARLIER = "a183612cec41437998b7079d6a9b8d8483280878"
"""The last release without cards."""
MODULE = "discovered_agents"


@agent("planner")
async def planner(ctx: Context, turns: int) -> list[dict[str, str]]:
    """Call all peers in each turn, and return their versions and outcomes."""
    seen = []
    for turn in range(turns):
        cards = await offer_peers(ctx, ["*"])
        calls = [peer_of_card(card).with_options(timeout=2)(turn) for card in cards]
        outcomes = await ctx.gather_outcomes(*calls) if calls else ()
        seen.append(
            {
                card.name: f"{card.version} {'failed' if isinstance(outcome, Failed) else 'ok'}"
                for card, outcome in zip(cards, outcomes, strict=True)
            }
        )
    return seen


def server(name: str, version: int) -> Any:
    """An agent whose schema has as many fields as its version says."""

    @agent(name, version=str(version))
    async def serve(ctx: Context, number: int) -> int:
        return number + 1

    fields: dict[str, Any] = {f"f{each}": (int, 0) for each in range(version)}
    model: type[BaseModel] = create_model(f"Input{version}", **fields)
    described: Any = serve
    described.card = AgentCard(
        name=name, version=str(version), input_schema=model.model_json_schema()
    )
    return serve


@pytest.fixture(params=["sqlite", pytest.param("rabbit", marks=pytest.mark.servers)])
def mesh_settings(
    request: pytest.FixtureRequest, tmp_path: Path, namespace: str
) -> Iterator[MeshSettings]:
    url = f"sqlite:///{tmp_path}/mesh.db"
    if request.param == "rabbit":
        url = request.getfixturevalue("rabbit_server").url
    yield MeshSettings(broker_url=url, namespace=namespace)
    sys.modules.pop(MODULE, None)


class _Started:
    """An observer that waits for a replica."""

    def __init__(self) -> None:
        self.started = asyncio.Event()

    def emit(self, event: Event) -> None:
        if event.step is Step.STARTED:
            self.started.set()


@asynccontextmanager
async def serving(mesh: MeshSettings, served: Any, **options: Any) -> AsyncIterator[None]:
    """Serve an agent while the block runs."""
    key = f"{served.name}_{served.version}".replace("-", "_")
    module: Any = sys.modules.setdefault(MODULE, SimpleNamespace())  # type: ignore[arg-type]
    setattr(module, key, served)
    settings = AgentSettings(
        name=served.name, entrypoint=f"{MODULE}:{key}", drain_timeout_seconds=1, **options
    )
    observer, stop = _Started(), asyncio.Event()
    serve = wiring.serve(Settings(mesh=mesh, agents=(settings,)), observer=observer, stop=stop)
    task = asyncio.create_task(serve)
    try:
        await observer.started.wait()
        yield
    finally:
        stop.set()
        await task


async def plan_until(mesh: Mesh, expected: dict[str, str]) -> None:
    """Send tasks until one is offered exactly these peers."""
    while (await mesh.call("planner", 1))[0] != expected:
        pass


async def test_twenty_agents_join_leave_and_change_while_tasks_run(
    mesh_settings: MeshSettings,
) -> None:
    names = [f"peer-{number:02}" for number in range(20)]
    running: dict[str, AsyncExitStack] = {}

    async def start(name: str, version: int) -> None:
        running[name] = AsyncExitStack()
        await running[name].enter_async_context(serving(mesh_settings, server(name, version)))

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            serving(mesh_settings, planner, peer_refresh_seconds=0.5, max_concurrency=50)
        )
        mesh = await stack.enter_async_context(connect_to(mesh_settings))
        tasks = []
        try:
            for name in names:
                tasks.append(await mesh.send("planner", 2))
                await start(name, 1)
            await plan_until(mesh, dict.fromkeys(names, "1 ok"))
            for number, name in enumerate(names[:10]):
                tasks.append(await mesh.send("planner", 3))
                await running.pop(name).aclose()
                if number % 2:
                    await start(name, 2 + number)
            expected = {f"peer-{number:02}": f"{2 + number} ok" for number in range(1, 10, 2)}
            expected |= dict.fromkeys(names[10:], "1 ok")
            await plan_until(mesh, expected)
            found = await mesh.find_agents(*expected, wait=60)
            versions = {each.card.name: f"{each.card.version} ok" for each in found}
            assert versions == expected
            turns = [turn for task in tasks for turn in await task.result()]
        finally:
            await asyncio.gather(*[each.aclose() for each in running.values()])
    assert len(turns) == 20 * 2 + 10 * 3
    assert {name for turn in turns for name in turn} == set(names)


_EARLIER_AGENT = """
from meshpoint import Context, agent

@agent("flights")
async def flights(ctx: Context, number: int) -> int:
    return number + 1
"""
_EARLIER_CONFIG = """
mesh:
  broker_url: {url}
  namespace: {namespace}
agent:
  name: flights
  entrypoint: earlier_flights:flights
"""


@pytest.fixture
def earlier_replica(mesh_settings: MeshSettings, tmp_path: Path) -> Iterator[None]:
    """A replica of `flights` under the last release without cards."""
    folder = extract_release(EARLIER, tmp_path / "earlier", "src")
    if folder is None:
        pytest.skip("the history of the repository is not here")
    (tmp_path / "earlier_flights.py").write_text(_EARLIER_AGENT)
    config = tmp_path / "earlier.yaml"
    config.write_text(
        _EARLIER_CONFIG.format(url=mesh_settings.broker_url, namespace=mesh_settings.namespace)
    )
    code = "import sys; from meshpoint.cli import main; main(sys.argv[1:])"
    path = os.pathsep.join([str(folder / "src"), str(tmp_path)])
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", str(config)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
    )
    yield
    process.terminate()
    assert process.wait() == 0, "the earlier replica failed"


async def test_a_replica_of_the_earlier_release_is_not_disturbed(
    mesh_settings: MeshSettings, earlier_replica: None
) -> None:
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(connect_to(mesh_settings))
        broker = wiring.make_broker(mesh_settings)
        await broker.open()
        stack.push_async_callback(broker.close)
        await broker.declare(AgentName("flights"))  # it may not have started yet
        assert await mesh.call("flights", 1) == 2
        await stack.enter_async_context(serving(mesh_settings, planner, peer_refresh_seconds=0.1))
        assert await mesh.call("planner", 2) == [{}, {}]
        found = await mesh.find_agents("planner", wait=60)
        assert [each.card.name for each in found] == ["planner"]
        assert await mesh.find_agents("flights", wait=0.5) == []
        assert await mesh.call("flights", 2) == 3
        assert await broker.depth(dead_letter_queue(AgentName("flights"))) == 0
