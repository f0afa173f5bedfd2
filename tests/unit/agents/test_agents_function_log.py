"""Function agents: pauses append to the task's log instead of writing the journal again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agent_samples import create_context

from meshpoint import (
    Call,
    Done,
    Failed,
    FailureKind,
    FunctionAgent,
    IncompatibleState,
    Ok,
    Outcome,
    Paused,
    Peer,
    TaskExecutionContext,
    agent,
)
from meshpoint.ports.agent import readable_formats
from meshpoint.testing.conformance.agent import (
    DurableAgentSuite,
    answered,
    log_after,
    restored,
    resumed,
    run_agent,
)

TEXT = "x" * 3000
write_peer = Peer("writer", int, str)


@agent("editor")
async def editor(ctx: TaskExecutionContext, chapters: int) -> int:
    """One pause for each chapter; a failed one counts as empty."""
    length = 0
    for chapter in range(chapters):
        try:
            length += len(await ctx.call(write_peer(chapter)))
        except Exception:
            ctx.flags[f"chapter {chapter}"] = "missing"
    return length


def long_answer(call: Call) -> Outcome:
    return Ok(TEXT)


async def pauses_of(
    function_agent: FunctionAgent[Any, Any], request: Any, answer: Any = long_answer
) -> list[tuple[Paused, tuple[bytes, ...]]]:
    """Every pause with the log that it leaves behind."""
    ctx, log = create_context(), tuple[bytes, ...]()
    result = await function_agent.start(ctx, request)
    found: list[tuple[Paused, tuple[bytes, ...]]] = []
    while isinstance(result, Paused):
        outcomes = answered(result, answer)
        ctx, log = restored(ctx, result, outcomes), log_after(log, result)
        found.append((result, log))
        result = await resumed(function_agent, ctx, result, log, outcomes)
    return found


class TestLoggingFunctionAgentContract(DurableAgentSuite):
    def agent(self) -> FunctionAgent[int, int]:
        return editor

    def request(self) -> Any:
        return 4

    def answer(self, call: Call) -> Outcome:
        return long_answer(call)


async def test_a_long_journal_is_written_once() -> None:
    pauses = await pauses_of(editor, 10)
    assert await run_agent(editor, 10, long_answer) == 10 * len(TEXT)
    assert pauses[0][0].append is None
    assert {pause.state for pause, _ in pauses} == {pauses[0][0].state}
    sizes = [len(pause.append or b"") for pause, _ in pauses[1:]]
    assert max(sizes) < len(TEXT) + 500
    assert min(sizes) > len(TEXT)


async def test_a_short_journal_is_written_as_a_whole() -> None:
    pauses = await pauses_of(editor, 3, lambda call: Ok("short"))
    assert [pause.append for pause, _ in pauses] == [None, None, None]
    assert [len(json.loads(pause.state)["entries"]) for pause, _ in pauses] == [1, 2, 3]


async def test_a_journal_that_has_grown_is_continued_by_a_log() -> None:
    pauses = await pauses_of(editor, 30, lambda call: Ok("short"))
    appends = [pause.append is not None for pause, _ in pauses]
    assert appends == sorted(appends)
    assert {False, True} == set(appends)
    assert max(len(pause.state) for pause, _ in pauses) <= 2048


async def test_failures_are_appended_too() -> None:
    def answer(call: Call) -> Outcome:
        return Failed(FailureKind.ERROR, TEXT) if call.input == 1 else Ok(TEXT)

    assert await run_agent(editor, 4, answer) == 3 * len(TEXT)


async def test_a_task_paused_before_there_were_logs_continues() -> None:
    """The previous release wrote every entry into the state."""
    pause, log = (await pauses_of(editor, 5))[3]
    journal = json.loads(pause.state)
    for entry in map(json.loads, log):
        journal["entries"][-1]["outcomes"] = entry["outcomes"]
        journal["entries"].append(entry["entry"])
    state = json.dumps(journal).encode()
    outcomes = answered(pause, long_answer)
    next_pause = await editor.resume(create_context(), state, outcomes)
    assert isinstance(next_pause, Paused)
    assert (next_pause.state, next_pause.append is None) == (state, False)
    outcomes = answered(next_pause, long_answer)
    log = log_after((), next_pause)
    assert await resumed(editor, create_context(), next_pause, log, outcomes) == Done(
        5 * len(TEXT)
    )


@pytest.mark.parametrize("entry", [b"", b"{}", b"[]", b'{"outcomes": [], "entry": null}', b"\xff"])
async def test_an_unreadable_entry_is_incompatible(entry: bytes) -> None:
    pause, log = (await pauses_of(editor, 3))[2]
    with pytest.raises(IncompatibleState):
        await editor.resume_with_log(
            create_context(), pause.state, (*log[:-1], entry), answered(pause, long_answer)
        )


def test_a_function_agent_reads_its_format_with_and_without_a_log() -> None:
    assert readable_formats(editor) == {"editor/function/1", "editor/function/1+log"}
