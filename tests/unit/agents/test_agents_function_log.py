"""Function agents: pauses append to the task's log instead of writing the journal again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from agent_samples import create_context
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue, TypeAdapter

from json_strategies import json_values
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
    TokenUsage,
    agent,
)
from meshpoint.agents import journal
from meshpoint.agents.journal import (
    Journal,
    JournalEntry,
    StoredJournal,
    _LogEntry,
    _record,
    _RecordedCall,
)
from meshpoint.agents.peer import PeerCall
from meshpoint.model.calls import ALL
from meshpoint.model.log_entries import LogEntries
from meshpoint.model.usage import Tokens
from meshpoint.model.waitable import mark_used
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
            length += len(await write_peer(chapter))
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


def as_json(entry: bytes) -> dict[str, Any]:
    """An entry in the form that has all texts in its JSON."""
    line, _, texts = entry.partition(b"\n")
    data: dict[str, Any] = json.loads(line)
    for outcome in data["outcomes"]:
        if (size := outcome.pop("text_bytes", None)) is not None:
            outcome["value"], texts = texts[:size].decode(), texts[size:]
    assert texts == b""
    return data


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
    stored = json.loads(pause.state)
    for entry in map(as_json, log):
        stored["entries"][-1]["outcomes"] = entry["outcomes"]
        stored["entries"].append(entry["entry"])
    state = json.dumps(stored).encode()
    outcomes = answered(pause, long_answer)
    next_pause = await editor.resume(create_context(), state, outcomes)
    assert isinstance(next_pause, Paused)
    assert (next_pause.state, next_pause.append is None) == (state, False)
    outcomes = answered(next_pause, long_answer)
    log = log_after((), next_pause)
    assert await resumed(editor, create_context(), next_pause, log, outcomes) == Done(
        5 * len(TEXT)
    )


async def test_long_texts_follow_the_json_of_an_entry() -> None:
    text = TEXT + 'é "quoted"\n\\'
    pause, _ = (await pauses_of(editor, 3, lambda call: Ok(text)))[2]
    assert pause.append is not None
    line, texts = pause.append.split(b"\n", 1)
    assert texts == text.encode()
    assert TEXT not in line.decode()


async def test_an_entry_with_long_texts_in_its_json_is_read() -> None:
    pause, log = (await pauses_of(editor, 4))[3]
    entries = [json.dumps(as_json(entry)).encode() for entry in log]
    outcomes = answered(pause, long_answer)
    assert await resumed(editor, create_context(), pause, entries, outcomes) == Done(4 * len(TEXT))


@pytest.mark.parametrize("usage", [None, TokenUsage(total=Tokens(input=3))])
async def test_outcomes_of_all_kinds_return_from_the_log(usage: TokenUsage | None) -> None:
    answers: dict[Any, Outcome] = {
        0: Ok(TEXT + '"é\n', ({"name": "draft"},), usage or TokenUsage()),
        1: Failed(FailureKind.ERROR, TEXT),
        2: Ok({"text": TEXT}),
        3: Ok("\n" + TEXT),
        4: Ok(None),
    }
    any_peer: Peer[int, Any] = Peer("any", int, TypeAdapter(Any))

    @agent("collector")
    async def collector(ctx: TaskExecutionContext, rounds: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(rounds):
            calls = [any_peer(number) for number in answers]
            found.append(await ctx.gather_outcomes(*calls))
        first, *others = found
        assert all(each == first for each in others)
        return [
            each.message if isinstance(each, Failed) else [each.value, each.artifacts, each.usage]
            for each in first
        ]

    values = await run_agent(collector, 4, lambda call: answers[call.input])
    assert values == [
        each.message if isinstance(each, Failed) else [each.value, each.artifacts, each.usage]
        for each in answers.values()
    ]


def reads_of_entries(
    monkeypatch: pytest.MonkeyPatch, log: Sequence[bytes]
) -> tuple[list[int], list[int]]:
    """The places in `log` of the entries that are read as plain ones, and of the others."""
    plain, whole = list[int](), list[int]()
    read_plain, decode = journal._read_plain, _LogEntry.from_bytes

    def read_and_count(encoded: bytes, start: int) -> Any:
        plain.append(log.index(encoded[start:]))
        return read_plain(encoded, start)

    def decode_and_count(encoded: bytes) -> Any:
        whole.append(log.index(encoded))
        return decode(encoded)

    monkeypatch.setattr(journal, "_read_plain", read_and_count)
    monkeypatch.setattr(_LogEntry, "from_bytes", decode_and_count)
    return plain, whole


async def test_each_plain_entry_is_read_once_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    pause, log = (await pauses_of(editor, 6))[5]
    plain, whole = reads_of_entries(monkeypatch, log)
    outcomes = answered(pause, long_answer)
    assert await resumed(editor, create_context(), pause, log, outcomes) == Done(6 * len(TEXT))
    assert plain == [0, 1, 2, 3, 4]
    # The last one says what the task waits for, and the first pause is in the state.
    assert whole == [4, 0, 4]


async def test_each_other_entry_is_decoded_once_in_a_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(call: Call) -> Outcome:
        return Ok(TEXT, usage=TokenUsage(total=Tokens(input=1)))

    pause, log = (await pauses_of(editor, 6, answer))[5]
    _, whole = reads_of_entries(monkeypatch, log)
    outcomes = answered(pause, answer)
    assert await resumed(editor, create_context(), pause, log, outcomes) == Done(6 * len(TEXT))
    assert whole == [4, 0, 1, 2, 3, 4]


CALL = PeerCall("writer", 1, None, None, None, write_peer.read)
mark_used(CALL)
USED = TokenUsage(total=Tokens(input=1))
LIKE_AN_ENTRY = '}],"entry":{"calls":[],"needed":null,"within_seconds":null,"usage":{}}}'
TRICKY = [TEXT, "é\n" + TEXT, LIKE_AN_ENTRY, {"a": [{}], "entry": {"calls": []}}]


def stored_pauses(entry: JournalEntry, outcomes: Sequence[Outcome]) -> StoredJournal:
    """A journal in which this pause ended with each of `outcomes` in turn."""
    log = [_LogEntry([_record(each)], entry).to_bytes() for each in outcomes]
    return StoredJournal(Journal("editor/function/1", None, {}, [entry]), b"", LogEntries(log))


@given(
    results=st.lists(json_values | st.sampled_from(TRICKY), min_size=3, max_size=3),
    peer=st.sampled_from(["writer", "~sleep", '~?"a\\', "é"]),
    call_input=json_values,
)
def test_a_plain_pause_is_read_like_any_other(
    results: list[JsonValue], peer: str, call_input: JsonValue
) -> None:
    call = replace(CALL, peer=peer, input=call_input)
    mark_used(call)
    entry = JournalEntry.for_calls([call.as_call(f"{peer}.0")], ALL, TokenUsage())
    stored = stored_pauses(entry, [Ok(each) for each in results])
    for number in (1, 2):
        found = stored.find_plain(number, call)
        assert stored.entry(number).records([call], ALL, None)
        assert stored.entry(number).read_outcomes() == [Ok(results[number])]
        assert found == (None if '"' in peer else Ok(results[number]))


@pytest.mark.parametrize(
    "change",
    [
        {"usage": USED},
        {"subtask": "part"},
        {"now": datetime(2026, 1, 1, tzinfo=UTC)},
        {"needed": 1},
        {"within_seconds": 1.0},
        {"calls": []},
        {"calls": 2 * [_RecordedCall.from_call(CALL.as_call("writer.0"))]},
        {"calls": [_RecordedCall.from_call(replace(CALL, input=2).as_call("writer.0"))]},
        {"calls": [_RecordedCall.from_call(replace(CALL, peer="other").as_call("writer.0"))]},
        {"calls": [_RecordedCall.from_call(CALL.as_call("mine"))]},
    ],
)
def test_only_a_plain_pause_for_the_same_call_is_read_as_one(change: dict[str, Any]) -> None:
    plain = JournalEntry.for_calls([CALL.as_call("writer.0")], ALL, TokenUsage())
    assert stored_pauses(plain, [Ok(TEXT)] * 3).find_plain(1, CALL) == Ok(TEXT)
    for result in (TEXT, "short"):
        stored = stored_pauses(replace(plain, **change), [Ok(result)] * 3)
        assert stored.find_plain(1, CALL) is None


@pytest.mark.parametrize(
    "outcome",
    [
        Failed(FailureKind.ERROR, "no"),
        Failed(FailureKind.ERROR, TEXT),
        Ok(TEXT, ({"name": "draft"},)),
        Ok("short", ({"name": "draft"},)),
        Ok(TEXT, usage=USED),
        Ok("short", usage=USED),
    ],
)
def test_only_a_result_without_more_is_read_as_a_plain_one(outcome: Outcome) -> None:
    plain = JournalEntry.for_calls([CALL.as_call("writer.0")], ALL, TokenUsage())
    assert stored_pauses(plain, [outcome] * 3).find_plain(1, CALL) is None


def test_a_result_full_of_entries_is_read_in_linear_time() -> None:
    """In quadratic time, this would take minutes."""
    result: JsonValue = [{"a": [{}], "entry": {"calls": []}}] * 100_000
    pause = replace(
        JournalEntry.for_calls([CALL.as_call("writer.0")], ALL, TokenUsage()),
        now=datetime(2026, 1, 1, tzinfo=UTC),
    )
    encoded = _LogEntry([_record(Ok(result))], pause).to_bytes()
    assert journal._read_plain(encoded, 0) is None
    assert _LogEntry.from_bytes(encoded).entry == pause


def test_the_last_pause_is_not_read_as_a_plain_one() -> None:
    plain = JournalEntry.for_calls([CALL.as_call("writer.0")], ALL, TokenUsage())
    stored = stored_pauses(plain, [Ok(TEXT)] * 3)
    assert [number for number in range(4) if stored.find_plain(number, CALL)] == [1, 2]


def test_a_pause_is_compared_with_its_own_entry_after_pauses_of_other_kinds() -> None:
    plain = JournalEntry.for_calls([CALL.as_call("writer.0")], ALL, TokenUsage())
    other = JournalEntry.for_calls([replace(CALL, input=2).as_call("writer.0")], ALL, TokenUsage())
    log = [_LogEntry([_record(Ok(1))], each).to_bytes() for each in (plain, plain, other, plain)]
    stored = StoredJournal(Journal("editor/function/1", None, {}, [plain]), b"", LogEntries(log))
    assert stored.find_plain(1, CALL) == Ok(1)
    assert stored.find_plain(3, CALL) is None


@pytest.mark.parametrize("result", [TEXT, "short"])
def test_a_damaged_entry_is_not_read_as_a_plain_one(result: str) -> None:
    plain = JournalEntry.for_calls([CALL.as_call("writer.0")], ALL, TokenUsage())
    whole = _LogEntry([_record(Ok(result))], plain).to_bytes()
    damaged = [whole + b"x", b"x" + whole, whole[:-1]]
    if result == TEXT:
        damaged.append(whole.replace(b"\n", b" "))
    for entry in damaged:
        stored = StoredJournal(
            Journal("editor/function/1", None, {}, [plain]),
            b"",
            LogEntries([whole, entry, whole]),
        )
        assert stored.find_plain(1, CALL) is None
        with pytest.raises(IncompatibleState):
            stored.entry(1)


def test_the_first_bytes_of_stored_entries_are_skipped() -> None:
    plain = JournalEntry.for_calls([CALL.as_call("writer.0")], ALL, TokenUsage())
    log = [b"\x00" + _LogEntry([_record(Ok(TEXT))], plain).to_bytes()] * 3
    journal_ = Journal("editor/function/1", None, {}, [plain])
    assert StoredJournal(journal_, b"", LogEntries(log, 1)).find_plain(1, CALL) == Ok(TEXT)


async def test_a_plain_pause_has_used_no_tokens_even_if_changed_code_counts_some() -> None:
    pause, log = (await pauses_of(editor, 5))[4]
    was_empty: list[bool] = []

    @agent("editor")
    async def changed(ctx: TaskExecutionContext, chapters: int) -> int:
        for chapter in range(chapters):
            ctx.token_usage.record(Tokens(input=1), model="m")
            await write_peer(chapter)
            was_empty.append(ctx.token_usage.is_empty)
        return chapters

    outcomes = answered(pause, long_answer)
    assert await resumed(changed, create_context(), pause, log, outcomes) == Done(5)
    assert was_empty == [True] * 5


DAMAGED = [
    b"",
    b"{}",
    b"[]",
    b'{"outcomes": [], "entry": null}',
    b"\xff",
    b"{}\n" + TEXT.encode(),
]


@pytest.mark.parametrize("entry", DAMAGED)
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_an_unreadable_entry_is_incompatible(entry: bytes, place: int) -> None:
    """Although the code catches the error where it reaches the entry."""
    pause, log = (await pauses_of(editor, 4))[3]
    damaged = (*log[:place], entry, *log[place + 1 :])
    with pytest.raises(IncompatibleState, match="not a journal of editor/function/1: "):
        await editor.resume_with_log(
            create_context(), pause.state, damaged, answered(pause, long_answer)
        )


@pytest.mark.parametrize("cut", [1, len(TEXT)])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_text_of_another_length_is_incompatible(place: int, cut: int) -> None:
    pause, log = (await pauses_of(editor, 4))[3]
    for entry in (log[place][:-cut], log[place] + b"x" * cut, log[place][:-1] + b"\xff"):
        damaged = (*log[:place], entry, *log[place + 1 :])
        with pytest.raises(IncompatibleState, match="not a journal of"):
            await editor.resume_with_log(
                create_context(), pause.state, damaged, answered(pause, long_answer)
            )


async def test_an_entry_without_outcomes_is_incompatible() -> None:
    pause, log = (await pauses_of(editor, 4))[3]
    entry = json.dumps(as_json(log[1]) | {"outcomes": []}).encode()
    with pytest.raises(IncompatibleState, match="it is not at a pause"):
        await editor.resume_with_log(
            create_context(),
            pause.state,
            (log[0], entry, log[2]),
            answered(pause, long_answer),
        )


def test_a_function_agent_reads_its_format_with_and_without_a_log() -> None:
    assert readable_formats(editor) == {
        f"editor/function/1{suffix}" for suffix in ("", "+log", "+waits", "+waits+log")
    }
