"""The state of a run: its items are the history of the task.

The SDK's own form repeats each item up to five times, and keeps every response and every approval.
Here, the messages are the original input and the items. The rest refers to them, and has only what
a run needs to continue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agents import Agent, RunContextWrapper, RunState
from agents.result import RunResult
from pydantic import JsonValue

from meshpoint.frameworks.history import History
from meshpoint.frameworks.openai_agents.recording import without_stops

_ITEM, _RAW = "$item", "$raw"
"""Keys of references to an item, and to what the model has sent or received for it."""
_EARLIER = "earlier_items"
"""Key of the number of items of earlier tasks."""
_APPROVAL = "tool_approval_item"
_LEFT_OUT: dict[str, Any] = {
    "pending_input": [],
    "no_active_agent_run": True,
    "input_guardrail_results": [],
    "output_guardrail_results": [],
    "tool_input_guardrail_results": [],
    "tool_output_guardrail_results": [],
    "conversation_id": None,
    "previous_response_id": None,
    "auto_previous_response_id": False,
    "generated_prompt_cache_key": None,
    "reasoning_item_id_policy": None,
    "nested_history_owned_session_item_refs": [],
    "current_turn_persisted_item_count": 0,
    "trace": None,
}
"""Values that are not stored. Most runs have no others."""


def read_earlier(history: History) -> list[JsonValue]:
    """The items of earlier tasks, which precede the input of this one in the messages."""
    if not history.extra:
        return [*history.messages]
    return history.messages[: int(str(history.extra.get(_EARLIER, 0)))]


def dump_state(
    state: RunState[Any], earlier: Sequence[JsonValue] = ()
) -> tuple[list[JsonValue], dict[str, JsonValue]]:
    """The messages of a run, and what else it needs to continue.

    The messages are `earlier`, the items of earlier tasks, unless the run has changed them; its
    own input; and its own items.
    """
    dumped: dict[str, Any] = state.to_json(context_serializer=lambda context: {})
    dumped["context"]["context"] = {}  # the SDK stores each `dict` without the serializer
    items = dumped.pop("session_items")
    start, count = dumped.pop("original_input"), len(earlier)
    if not count or start[:count] != with_distinct_calls(earlier):
        count = 0
    messages = [*earlier[:count], {"input": start[count:]}, *items]
    open_calls = _open_calls(dumped)
    if dumped["generated_items"] == _open_items(items, open_calls):
        del dumped["generated_items"], dumped["generated_session_item_indexes"]
    del dumped["last_model_response"]
    dumped["model_responses"] = [{**each, "usage": {}} for each in dumped["model_responses"][-1:]]
    context = dumped["context"]
    context["usage"]["request_usage_entries"] = []
    context["tool_invocations"] = {
        call: record
        for call, record in context["tool_invocations"].items()
        if not record.get("completed")
    }
    context.pop("function_tool_approvals", None)
    tracker = dumped["tool_use_tracker"]
    dumped["tool_use_tracker"] = {name: [*dict.fromkeys(used)] for name, used in tracker.items()}
    for key, value in _LEFT_OUT.items():
        if key in dumped and dumped[key] == value:
            del dumped[key]
    if count:
        dumped[_EARLIER] = count
    return messages, _refer(dumped, _references(items))


async def load_state(
    agent: Agent[Any],
    messages: Sequence[JsonValue],
    extra: dict[str, JsonValue],
    context: Any,
) -> RunState[Any]:
    """Read what `dump_state` has written.

    Raises:
        Exception: This version of the SDK cannot read it.
    """
    count = int(str(extra.get(_EARLIER, 0)))
    first: Any = messages[count]
    items: list[Any] = [*messages[count + 1 :]]
    dumped: Any = {**_LEFT_OUT, **_resolve(extra, items)}
    dumped.pop(_EARLIER, None)
    if "generated_items" not in dumped:
        open_calls = _open_calls(dumped)
        dumped["generated_items"] = _open_items(items, open_calls)
        dumped["generated_session_item_indexes"] = [
            index for index, item in enumerate(items) if _is_open(item, open_calls)
        ]
    responses = dumped["model_responses"]
    if count:
        first = {"input": [*with_distinct_calls(messages[:count]), *first["input"]]}
    dumped |= {
        "original_input": first["input"],
        "session_items": items,
        "last_model_response": responses[-1] if responses else None,
    }
    state: RunState[Any] = await RunState.from_json(agent, dumped, context_override=context)
    return state


def dump_items(result: RunResult, earlier: Sequence[JsonValue]) -> list[JsonValue]:
    """All items of a run that has ended, as the input of the next one.

    They begin with `earlier`, the items of earlier tasks, unless the run has changed them.
    """
    state: RunState[Any] = RunState(
        RunContextWrapper(context=None),
        without_stops(result.to_input_list()),
        result.last_agent,
    )
    items: list[JsonValue] = state.to_json()["original_input"]  # as `dump_state` would have them
    count = len(earlier)
    return [*earlier, *items[count:]] if items[:count] == with_distinct_calls(earlier) else items


def with_distinct_calls(items: Sequence[JsonValue]) -> list[Any]:
    """Give calls that repeat the id of an earlier one a new id, also in their results.

    Two tasks at the same time may choose the same id. The SDK would keep the last call only.
    """
    ids, used, distinct = dict[str, str](), set[str](), list[Any]()
    for index, item in enumerate(items):
        each: Any = item
        if isinstance(call := each.get("call_id"), str):
            if not str(each.get("type")).endswith("_output"):
                ids[call] = f"{call}-{index}" if call in used else call
                used.add(ids[call])
            each = {**each, "call_id": ids.get(call, call)}
        distinct.append(each)
    return distinct


def _open_calls(dumped: dict[str, Any]) -> set[str | None]:
    step = dumped.get("current_step") or {}
    interruptions = step.get("data", {}).get("interruptions", [])
    return {each["raw_item"].get("call_id") for each in interruptions}


def _is_open(item: dict[str, Any], open_calls: set[str | None]) -> bool:
    """Whether an item is no approval, or an approval that the run still waits for."""
    return item["type"] != _APPROVAL or item["raw_item"].get("call_id") in open_calls


def _open_items(items: list[Any], open_calls: set[str | None]) -> list[Any]:
    return [item for item in items if _is_open(item, open_calls)]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _references(items: list[Any]) -> dict[str, dict[str, int]]:
    found = dict[str, dict[str, int]]()
    for index, item in enumerate(items):
        found.setdefault(_key(item), {_ITEM: index})
        found.setdefault(_key(item["raw_item"]), {_RAW: index})
    return found


def _refer(value: Any, references: dict[str, dict[str, int]]) -> Any:
    """Replace items in `value` by references to them."""
    if isinstance(value, list):
        return [_refer(each, references) for each in value]
    if not isinstance(value, dict):
        return value
    if (found := references.get(_key(value))) is not None:
        return found
    return {key: _refer(each, references) for key, each in value.items()}


def _resolve(value: Any, items: list[Any]) -> Any:
    """Replace references by the items."""
    if isinstance(value, list):
        return [_resolve(each, items) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$item": int(index)}:
            return items[index]
        case {"$raw": int(index)}:
            return items[index]["raw_item"]
    return {key: _resolve(each, items) for key, each in value.items()}
