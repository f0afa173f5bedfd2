"""Every event is a crash point: replicas are killed before and after each step with an effect.

On every backend, another replica finishes. The client and peer, both played by the test, must see
one outcome per request and one id per call, and no open task or dead letter may remain. Cases run
concurrently because they mostly wait for leases; each is reported as a test of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TypeAlias

import pytest
import pytest_asyncio

from meshpoint.model.events import Phase, Step

from .concurrent_cases import ConcurrentCases, make_backends, selected_parameters, server_urls
from .crash_harness import CrashHarness
from .crash_scenarios import CASES_BY_STEP, CrashCase
from .fork_server import ForkServer
from .mesh import Mesh

Case: TypeAlias = tuple[str, Step, Phase, CrashCase | None]

POINTS = [
    pytest.param(step, phase, way, id=f"{step}:{phase}" + (f" ({way.label})" if way else ""))
    for step in Step
    if not step.is_informational
    for phase in (Phase.BEFORE, Phase.AFTER)
    for way in CASES_BY_STEP.get(step, [None])
]
BACKENDS = [
    "embedded",
    pytest.param("production", marks=pytest.mark.servers),
    pytest.param("postgresql", marks=pytest.mark.servers),
]

_APART = {"postgresql": "postgresql with separate databases"}
"""Backends with the queues in another database, so that no commit publishes messages."""


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> list[Case]:
    """The cases selected in this session."""
    names = ("backends_name", "step", "phase", "way")
    return [tuple(each[name] for name in names) for each in selected_parameters(request)]


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest, selected: list[Case]) -> dict[str, tuple[str, str]]:
    urls = server_urls(request, {backends_name for backends_name, *_ in selected})
    if "postgresql" in urls:
        queues: str = request.getfixturevalue("module_queues_url")
        urls[_APART["postgresql"]] = queues, urls["postgresql"][1]
    return urls


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cases(
    selected: list[Case],
    urls: Mapping[str, tuple[str, str]],
    fork_server: ForkServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ConcurrentCases[Case, None]]:
    async def run(case: Case) -> None:
        folder = tmp_path_factory.mktemp("case")
        backends_name, step, _, way = case
        if way is not None and way.needs_unsent_messages(step):
            backends_name = _APART.get(backends_name, backends_name)
        backends = make_backends(urls.get(backends_name), folder)
        await _run_case(Mesh(backends, fork_server), *case[1:])

    concurrent_cases = ConcurrentCases(selected, run)
    yield concurrent_cases
    await concurrent_cases.close()


async def _run_case(mesh: Mesh, step: Step, phase: Phase, way: CrashCase | None) -> None:
    assert way is not None, f"no scenario reaches {step}: add one to WAYS in crash_scenarios.py"
    stage = CrashHarness(mesh, f"{step}:{phase}", way.skip)
    try:
        await stage.open()
        await way.scenario(stage)
        await stage.finish()
    finally:
        await stage.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("step", "phase", "way"), POINTS)
@pytest.mark.parametrize("backends_name", BACKENDS)
async def test_a_task_survives_a_kill_at_any_step(
    cases: ConcurrentCases[Case, None],
    backends_name: str,
    step: Step,
    phase: Phase,
    way: CrashCase | None,
) -> None:
    await cases.result((backends_name, step, phase, way))
