"""A mesh inside one process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from meshpoint import (
    AgentMisbehaved,
    ConfigurationError,
    Failed,
    FailureKind,
    MeshpointError,
    Peer,
    TaskExecutionContext,
    UnknownAgent,
    agent,
)
from meshpoint.local import local_mesh
from meshpoint.model.events import Phase, Step
from recorded_events import RecordedEvents

double_peer = Peer("doubler", int, int)


@agent("doubler")
async def doubler(ctx: TaskExecutionContext, number: int) -> int:
    return 2 * number


@agent("summer")
async def summer(ctx: TaskExecutionContext, numbers: list[int]) -> int:
    return sum(await ctx.gather(*[double_peer(number) for number in numbers]))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def test_agents_call_each_other_and_pause(temporary: Path) -> None:
    recorded = RecordedEvents()
    async with local_mesh(summer, doubler, observer=recorded) as mesh:
        assert await mesh.call(summer, [1, 2, 3]) == 12
        assert list(temporary.glob("*/tasks.db")), "the pause was not written"
    (checkpoint,) = recorded.matching(Step.CHECKPOINT, Phase.AFTER)
    assert checkpoint.agent == "summer"
    assert not list(temporary.iterdir()), "files remain"


async def test_tasks_can_be_stored_in_a_given_database(temporary: Path) -> None:
    path = temporary / "mine.db"
    async with local_mesh(summer, doubler, db_url=f"sqlite:///{path}") as mesh:
        assert await mesh.call("summer", [5]) == 10
    assert path.exists()


async def test_options_reach_the_agents() -> None:
    async with local_mesh(doubler, max_message_bytes=1024) as mesh:
        outcome = await (await mesh.send("doubler", "x" * 2000)).outcome()
    assert isinstance(outcome, Failed)


async def test_two_meshes_are_isolated() -> None:
    async with (
        local_mesh(summer, undeliverable_after_seconds=0.1) as one,
        local_mesh(doubler) as other,
    ):
        assert await other.call(doubler, 1) == 2
        with pytest.raises(UnknownAgent):
            await one.send(doubler, 1)
        missing = await (await one.send(summer, [1])).outcome()
    assert isinstance(missing, Failed)
    assert missing.kind is FailureKind.UNDELIVERABLE


async def test_an_exception_in_the_block_propagates_unchanged(temporary: Path) -> None:
    error_group = ExceptionGroup("mine", [AgentMisbehaved("mine")])
    with pytest.raises(ExceptionGroup) as passed:
        async with local_mesh(doubler):
            raise error_group
    assert passed.value is error_group
    assert not list(temporary.iterdir()), "files remain after the drain"


async def test_a_worker_that_cannot_serve_ends_the_block(temporary: Path) -> None:
    with pytest.raises(MeshpointError):
        async with local_mesh(
            doubler, db_url=f"sqlite:///{temporary}/missing/mine.db", startup_timeout_seconds=0.5
        ) as mesh:
            await mesh.call(doubler, 1)


async def test_logins_that_the_broker_cannot_verify_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="operator_logins: only RabbitMQ verifies logins"):
        async with local_mesh(doubler, operator_logins=("ops",)):
            raise AssertionError("the mesh must not start")


async def test_agents_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two agents are called 'doubler'"):
        async with local_mesh(doubler, summer, doubler):
            pass
    with pytest.raises(ConfigurationError, match="no agent"):
        async with local_mesh():
            pass
