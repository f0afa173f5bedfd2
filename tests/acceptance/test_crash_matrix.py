"""Every event is a crash point: replicas are killed before and after each step with an effect.

On both rungs, another replica finishes. The client and the peer, both played by the test, must see
one outcome per request and one id per call, and no open task or dead letter may remain. Cases run
concurrently because they mostly wait for leases; each is reported as a test of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest
import pytest_asyncio

from meshpoint.model.events import EFFECTS, Phase, Step
from meshpoint.model.ids import new_id

from .crash_scenarios import WAYS, Way
from .crash_stage import Stage
from .kit import Mesh, Rung
from .nursery import Nursery

AT_A_TIME = 4
Case: TypeAlias = tuple[str, Step, Phase, Way | None]

POINTS = [
    pytest.param(step, phase, way, id=f"{step}:{phase}" + (f" ({way.what})" if way else ""))
    for step in Step
    if step in EFFECTS
    for phase in (Phase.BEFORE, Phase.AFTER)
    for way in WAYS.get(step, [None])
]
RUNGS = ["embedded", pytest.param("production", marks=pytest.mark.servers)]


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> list[Case]:
    """The cases selected in this session."""
    told = [getattr(item, "callspec", None) for item in request.session.items if item.parent is request.node]
    names = ("rung_name", "step", "phase", "way")
    return [tuple(each.params[name] for name in names) for each in told if each is not None]


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest, selected: list[Case]) -> tuple[str, str] | None:
    """RabbitMQ and one database for all cases that need them, each case in its own namespace."""
    if all(rung_name != "production" for rung_name, *_ in selected):
        return None
    rabbit = request.getfixturevalue("rabbit_server").url
    return rabbit, request.getfixturevalue("module_postgres_url")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    selected: list[Case],
    urls: tuple[str, str] | None,
    nursery: Nursery,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Mapping[Case, asyncio.Task[None]]]:
    """A task per case, running or waiting for its turn."""
    turns = asyncio.Semaphore(AT_A_TIME)

    async def run(case: Case) -> None:
        async with turns:
            rung = _rung(case[0], urls, tmp_path_factory.mktemp("case"))
            await _killed_at(Mesh(rung, nursery), *case[1:])

    tasks = {case: asyncio.create_task(run(case)) for case in selected}
    yield tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


def _rung(name: str, urls: tuple[str, str] | None, folder: Path) -> Rung:
    if name == "production":
        assert urls is not None
        return Rung(*urls, f"test-{new_id()}", folder)
    return Rung(f"sqlite:///{folder}/broker.db", f"sqlite:///{folder}/tasks.db", f"test-{new_id()}", folder)


async def _killed_at(mesh: Mesh, step: Step, phase: Phase, way: Way | None) -> None:
    assert way is not None, f"no scenario reaches {step}: add one to WAYS in crash_scenarios.py"
    stage = Stage(mesh, f"{step}:{phase}", way.skip)
    try:
        await stage.open()
        await way.scenario(stage)
        await stage.finish()
    finally:
        await stage.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("step", "phase", "way"), POINTS)
@pytest.mark.parametrize("rung_name", RUNGS)
async def test_killed_at(
    running: Mapping[Case, asyncio.Task[None]], rung_name: str, step: Step, phase: Phase, way: Way | None
) -> None:
    await running[rung_name, step, phase, way]
