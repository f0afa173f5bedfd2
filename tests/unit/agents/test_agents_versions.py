"""Several versions of one agent in one process."""

from __future__ import annotations

import pytest
from agent_samples import double_peer

from meshpoint import Done, Paused, StatefulAgent, TaskExecutionContext, agent
from meshpoint.agents.entrypoint import load_versions
from meshpoint.agents.versions import AgentVersions, source_version
from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import TaskId
from meshpoint.ports.agent import get_plan, list_versions, readable_formats, select_version


@agent("counter", version="1")
async def counter_v1(ctx: TaskExecutionContext, number: int) -> int:
    return number


@agent("counter", version="2")
async def counter_v2(ctx: TaskExecutionContext, number: int) -> int:
    await double_peer(number)
    return number


@agent("other", version="1")
async def other(ctx: TaskExecutionContext, number: int) -> int:
    return number


class Counter(StatefulAgent[int, int, int]):
    name = "counter"
    version = "3"
    reads = ("2",)

    async def on_request(self, ctx: TaskExecutionContext, request: int) -> Paused | Done[int]:
        return self.done(request)


async def test_the_first_version_takes_new_tasks() -> None:
    both = AgentVersions([counter_v1, counter_v2])
    assert (both.name, both.state_format) == ("counter", counter_v1.state_format)
    formats = {counter_v1.state_format, counter_v2.state_format}
    assert readable_formats(both) == {
        f"{each}{suffix}" for each in formats for suffix in ("", "+log", "+waits", "+waits+log")
    }
    assert get_plan(both) == counter_v1.plan
    assert await both.start(TaskExecutionContext(TaskId("task")), 3) == Done(3)


def test_the_format_of_a_state_selects_its_version() -> None:
    both = AgentVersions([counter_v2, counter_v1])
    assert select_version(both, counter_v1.state_format) is counter_v1
    assert select_version(both, "") is counter_v2
    assert select_version(counter_v1, counter_v2.state_format) is counter_v1
    assert list_versions(both) == (counter_v2, counter_v1)
    assert list_versions(counter_v1) == (counter_v1,)


def test_versions_of_different_agents_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="its versions are called 'counter' and 'other'"):
        AgentVersions([counter_v1, other])


def test_two_versions_that_read_one_format_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two versions of 'counter' read"):
        AgentVersions([counter_v1, counter_v1])


def test_versions_are_loaded_from_their_entrypoints() -> None:
    both = load_versions([f"{__name__}:counter_v2", f"{__name__}:counter_v1"])
    assert list_versions(both) == (counter_v2, counter_v1)
    assert load_versions([f"{__name__}:other"]) is other


def test_the_version_of_the_code_follows_from_its_source() -> None:
    assert source_version([counter_v1]) == source_version([counter_v1])
    assert source_version([counter_v1]) != source_version([counter_v2])
    assert source_version([counter_v1]).startswith("src:")
    assert source_version([Counter()]) != source_version([counter_v1])
    assert source_version([AgentVersions([counter_v1])]) != source_version([counter_v1])


def test_code_without_a_source_file_has_a_version() -> None:
    namespace = {"agent": agent, "TaskExecutionContext": TaskExecutionContext}
    code = """
@agent("typed", version="1")
async def typed(ctx: TaskExecutionContext, number: int) -> int:
    return number {}
"""
    versions = set()
    for sign in "+-":
        exec(code.format(f"{sign} 1"), namespace)
        versions.add(source_version([namespace["typed"]]))  # type: ignore[list-item]
    assert len(versions) == 2
