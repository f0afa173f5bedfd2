"""Recipes for mutated messages: valid but for one change, so that most pass the first checks."""

from __future__ import annotations

import json
import random
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.questions import QuestionKey
from meshpoint.model.waits import QUESTION_PREFIX, SLEEP_PEER

from .amqp import Raw, Value, WireMessage, encode_table
from .mesh import AGENTS, DURABLE, IN_PROCESS, MAX_BODY_BYTES, OPERATOR, SWITCHED_OFF

MALLORY = "mallory"
EVIL = "evil"
REPLIES = f"{MALLORY}.replies"
FULL_QUEUE = f"{MALLORY}.full"
KINDS = ("request", "response", "status", "cancel", "wake")


ANSWERED_REQUEST = "answered request"
"""Honest requests that were answered.

Until a replica has read a request, another one may take its id.
"""
_MAX_UNANSWERED = 5000
FORGED_RESULT = 666
"""Result that forged answers carry."""


@dataclass(frozen=True)
class RowLock:
    """A lock held by a second database session meanwhile: on a task's row, or on a task id.

    An id is held by inserting its row in a transaction that is rolled back later.
    """

    task_id: str
    seconds: float
    delay: float = 0.0
    before_insert: bool = False


@dataclass(frozen=True)
class MessageScript:
    """Messages with one mark, and what happens around them.

    Each of `delayed` has its delay in seconds. `redeliveries`: delivery count that the broker
    must reach before a replica gets `messages`.
    """

    messages: list[WireMessage]
    delayed: tuple[tuple[float, WireMessage], ...] = ()
    redeliveries: int = 0
    row_lock: RowLock | None = None

    @property
    def all_messages(self) -> list[WireMessage]:
        """Every message, in order."""
        return [*self.messages, *(message for _, message in self.delayed)]


@dataclass
class FuzzState:
    """What the fuzzer knows about the mesh: observed traffic and its own messages."""

    rng: random.Random
    observed: dict[str, deque[WireMessage]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=200))
    )
    private_queues: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    own_requests: dict[str, deque[WireMessage]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=60))
    )
    own_task_ids: dict[str, deque[str]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=60))
    )
    open_calls: deque[WireMessage] = field(default_factory=lambda: deque(maxlen=200))
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    mark: str = "fz-0000000"
    running_task_id: str = ""  # id of a task that has a row and runs for a while
    # ids of tasks whose requester wants no reply
    quiet_task_ids: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    quiet_calls: deque[WireMessage] = field(default_factory=lambda: deque(maxlen=20))

    def record_call(self, call: WireMessage) -> None:
        """Record a request to the peer that the fuzzer plays."""
        is_quiet = call.headers.get("x-parent-task-id") in self.quiet_task_ids
        (self.quiet_calls if is_quiet else self.open_calls).append(call)

    unanswered: OrderedDict[str, WireMessage] = field(default_factory=OrderedDict)

    def record_observed(self, kind: str, message: WireMessage) -> None:
        """Record an observed honest message."""
        self.observed[kind].append(message)
        task_id = str(message.properties.get("correlation_id"))
        if kind == "request":
            self.unanswered[task_id] = message
            if len(self.unanswered) > _MAX_UNANSWERED:
                self.unanswered.popitem(last=False)
        elif kind == "response" and (request := self.unanswered.pop(task_id, None)):
            self.observed[ANSWERED_REQUEST].append(request)

    def random_observed(self, kind: str) -> WireMessage | None:
        """A random observed honest message of `kind`."""
        candidates = self.observed[kind]
        return self.rng.choice(candidates) if candidates else None

    def next_call(self) -> WireMessage | None:
        """The oldest open call from an honest agent to the peer that the fuzzer plays."""
        return self.open_calls.popleft() if self.open_calls else None


@dataclass
class RecipeScheduler:
    """Chooses recipes rank by rank; each recipe of a rank is used once before any is repeated."""

    state: FuzzState
    recipe_names: list[str]
    _queues: list[list[str]] = field(default_factory=lambda: [[], [], []])
    created_count: int = 0
    ranks: tuple[int, ...] = (0, 1, 2)
    """The ranks to choose from, in turn."""
    focus: tuple[str, ...] = ()
    """Recipes to use in turn for every second choice, if any."""

    def next(self) -> tuple[str, MessageScript] | None:
        """A recipe's name and its marked messages, or None when the recipe lacks material."""
        turn, is_focused = divmod(self.created_count, 2) if self.focus else (0, False)
        name = self.focus[turn % len(self.focus)] if is_focused else self._next_of_rank()
        self.created_count += 1
        self.state.mark = f"fz-{self.created_count:07}"
        result = RECIPES[name](self.state)
        if not result:
            return None
        script = (
            result
            if isinstance(result, MessageScript)
            else MessageScript([result] if isinstance(result, WireMessage) else result)
        )
        for message in script.all_messages:
            self._remember(message)
        return name, script

    def _next_of_rank(self) -> str:
        rank = self.ranks[self.created_count % len(self.ranks)]
        queue = self._queues[rank]
        if not queue:
            queue += [name for name in self.recipe_names if _rank(name) == rank] or list(
                self.recipe_names
            )
            self.state.rng.shuffle(queue)
        return queue.pop()

    def focus_on(self, branches: Sequence[str]) -> None:
        """Prefer the recipes for these branches, given by their names."""
        self.focus = tuple(
            name
            for name in self.recipe_names
            if any(f".{each}: " in branch for each in REACHES.get(name, ()) for branch in branches)
        )

    def _remember(self, message: WireMessage) -> None:
        agent, _, kind = message.key.partition(".")
        properties, has_fuzz_id = (
            message.properties,
            str(message.properties.get("correlation_id", "")).startswith("fz-"),
        )
        # otherwise the broker closes the connection
        is_accepted = message.raw_headers is None and "user_id" not in properties
        if (
            kind == "req"
            and has_fuzz_id
            and is_accepted
            and properties.get("app_id") == MALLORY
            and properties.get("type") == "request"
        ):
            self.state.own_requests[agent].append(message)


def _rank(name: str) -> int:
    return 2 if name in DEEP else 1 if name in SPECIAL else 0


Recipe = Callable[[FuzzState], WireMessage | list[WireMessage] | MessageScript | None]
RECIPES: dict[str, Recipe] = {}
FORGED: set[str] = set()
"""Recipes that use another sender's name. Only a broker that verifies logins can detect them."""
SPECIAL: set[str] = set()
"""Recipes written by hand rather than generated from a table of values: a third of all messages.
"""
DEEP: set[str] = set()
"""Recipes without which certain branches are not reached: another third."""
ON_SERVERS: set[str] = set()
"""Recipes that need a broker with delivery counts and logins, or a database with row locks."""
REACHES: dict[str, tuple[str, ...]] = {}
"""Functions with branches that few other recipes reach, by recipe."""
CLOSING: set[str] = set()
"""Recipes that can make the broker close the connection; sent rarely, on a separate connection."""


def recipe(
    name: str,
    *,
    forged: bool = False,
    closing: bool = False,
    deep: bool = False,
    servers: bool = False,
    reaches: tuple[str, ...] = (),
) -> Callable[[Recipe], Recipe]:
    """Register a recipe under `name`."""

    def register(recipe_function: Recipe) -> Recipe:
        RECIPES[name] = recipe_function
        SPECIAL.add(name)
        if deep:
            DEEP.add(name)
        if forged:
            FORGED.add(name)
        if closing:
            CLOSING.add(name)
        if servers:
            ON_SERVERS.add(name)
        if reaches:
            REACHES[name] = reaches
        return recipe_function

    return register


def make_input(world: FuzzState, agent: str) -> Any:
    """Valid input for `agent`."""
    number = world.rng.randrange(10**6)
    match agent:
        case "root" | "light":
            return {"number": number, "rounds": 1}
        case "leaf" | "spark":
            return {"number": number, "round": 0, "index": 0}
        case "sleeper" | "dozer" | "solo" | "diary" | "clerk" | "teller":
            return world.rng.choice((0, 5, 300, 1500))
        case _:
            return number


def make_request(
    world: FuzzState, agent: str | None = None, task_id: str | None = None, **changes: Any
) -> WireMessage:
    """A valid request."""
    agent = agent or world.rng.choice(
        ("leaf", "spark", "leaf", "spark", "sleeper", "dozer", "asker", "doubter", "clerk")
    )
    task_id = task_id or f"{world.mark}-{new_id()}"
    body = {
        "message": {
            "messageId": world.mark,
            "role": "ROLE_AGENT",
            "parts": [{"data": make_input(world, agent)}],
            "contextId": "fuzz",
            "taskId": task_id,
        },
        "metadata": {
            "userId": "u",
            "sessionId": "s",
            "userConfig": {"a": 1},
            "securityContext": {},
            "team": "red",
        },
    }
    world.own_task_ids[agent].append(task_id)
    request = WireMessage(f"{agent}.req", {}, {"x-call-depth": 0}, json.dumps(body).encode())
    return request.with_properties(
        **{**_properties(world, "request", task_id, task_id), "reply_to": REPLIES, **changes},
    )


def _properties(world: FuzzState, kind: str, message_id: str, task_id: str) -> dict[str, Any]:
    return {
        "content_type": "application/json",
        "delivery_mode": 2,
        "message_id": message_id
        if world.mark in message_id
        else f"{world.mark}.{message_id}"[:255],
        "correlation_id": task_id,
        "app_id": MALLORY,
        "type": kind,
        "timestamp": int(time.time()),
    }


def make_response(
    world: FuzzState,
    call: WireMessage,
    state: str = "COMPLETED",
    value: Any = None,
    **changes: Any,
) -> WireMessage:
    """A response from the called peer."""
    task_id = str(call.properties["correlation_id"])
    part = (
        {"data": {"answer": 1} if value is None else value}
        if state == "COMPLETED"
        else {"text": "no"}
    )
    message = {"messageId": world.mark, "role": "ROLE_AGENT", "parts": [part]}
    usage = {"total": {"input": 1, "output": 1, "cached": 0}}
    status = {
        "state": f"TASK_STATE_{state}",
        "message": message,
        "timestamp": "2026-01-01T00:00:00+00:00",
    }
    task = {
        "id": task_id,
        "contextId": "c",
        "status": status,
        "artifacts": [{"artifactId": "a"}],
        "metadata": {"usage": usage},
    }
    return _message_to_caller(world, call, "response", {"task": task}, **changes)


def make_status(
    world: FuzzState, call: WireMessage, metadata: dict[str, Any] | None = None, **changes: Any
) -> WireMessage:
    """A status update from the called peer."""
    task_id = str(call.properties["correlation_id"])
    message = {"messageId": world.mark, "role": "ROLE_AGENT", "parts": [{"data": {"percent": 40}}]}
    status = {"state": "TASK_STATE_WORKING", "message": message}
    update = {"taskId": task_id, "status": status, "metadata": metadata or {}}
    return _message_to_caller(world, call, "status", {"statusUpdate": update}, **changes)


def make_status_metadata(world: FuzzState) -> dict[str, Any]:
    """Metadata of a status update: a number and a path, some of which are invalid."""
    odd: tuple[Any, ...] = (
        0,
        7,
        -1,
        2**70,
        1.5,
        True,
        "",
        "r",
        world.mark,
        None,
        [],
        {},
        ["a", "b"],
        ["\n"],
    )
    names = ("kind", "generation", "fence", "run", "position", "path", "source")
    return {name: world.rng.choice(odd) for name in names}


def make_advice(world: FuzzState, call: WireMessage) -> WireMessage:
    """A failure that says whether and when to try again, in part with invalid values."""
    odd: tuple[Any, ...] = (True, False, 0, 0.2, -1, 1e9, 10**400, "soon", None, [], {"a": 1})
    message = make_response(world, call, "FAILED")
    body = json.loads(message.body)
    for name in ("retryable", "retryAfter"):
        body["task"]["metadata"][name] = world.rng.choice(odd)
    kinds = ("error", "timeout", "invalid", "cancelled", "dreaming", 7)
    body["task"]["metadata"]["failure"] = world.rng.choice(kinds)
    return message.with_properties(body=json.dumps(body).encode())


def _message_to_caller(
    world: FuzzState, call: WireMessage, kind: str, content: Any, **changes: Any
) -> WireMessage:
    task_id = str(call.properties["correlation_id"])
    message = WireMessage(str(call.properties["reply_to"]), {}, {}, json.dumps(content).encode())
    if parent := call.headers.get("x-parent-task-id"):
        message = message.with_headers({"x-parent-task-id": parent})
    return message.with_properties(
        **{**_properties(world, kind, world.mark, task_id), "app_id": EVIL, **changes}
    )


def make_cancel(
    world: FuzzState, agent: str | None = None, task_id: str | None = None, **changes: Any
) -> WireMessage:
    """A cancel of a task that the fuzzer requested."""
    agent = agent or world.rng.choice((*DURABLE, *IN_PROCESS))
    own_ids = world.own_task_ids[agent]
    task_id = task_id or (world.rng.choice(own_ids) if own_ids else f"{world.mark}-{new_id()}")
    body = json.dumps({"id": task_id, "reason": world.mark}).encode()
    cancel = WireMessage(f"{agent}.resp", {}, {}, body)
    return cancel.with_properties(
        **{**_properties(world, "cancel", world.mark, task_id), **changes}
    )


def make_attach(
    world: FuzzState, agent: str | None = None, task_id: str | None = None, **changes: Any
) -> WireMessage:
    """An attach to a task that the fuzzer requested, for another of its addresses."""
    agent = agent or world.rng.choice(AGENTS)
    own_ids = world.own_task_ids[agent]
    task_id = task_id or (world.rng.choice(own_ids) if own_ids else f"{world.mark}-{new_id()}")
    attach = WireMessage(f"{agent}.resp", {}, {}, json.dumps({"id": task_id}).encode())
    properties = _properties(world, "attach", world.mark, task_id)
    attach = attach.with_properties(**{**properties, "reply_to": REPLIES, **changes})
    return attach.with_headers({"x-snapshot": 1}) if world.rng.random() < 0.5 else attach


def valid_message(world: FuzzState, kind: str) -> WireMessage | None:
    """A valid message of `kind`."""
    match kind:
        case "request":
            return make_request(world)
        case "response":
            call = world.next_call()
            return (
                make_response(world, call, world.rng.choice(("COMPLETED", "FAILED", "CANCELED")))
                if call
                else None
            )
        case "status":
            return make_status(world, world.open_calls[0]) if world.open_calls else None
        case "cancel":
            return make_cancel(world)
        case _:
            wake = WireMessage(f"{world.rng.choice(AGENTS)}.broadcast", {}, {}, b"{}")
            return wake.with_properties(**_properties(world, "wake", world.mark, world.mark))


# Valid messages with one invalid property.

_INVALID_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "not utf-8": b"\xc3\x28\xff",
    "zero byte": b"a\0b",
    "control": b"a\x1b[2Jb\r\n",
    "longest": b"x" * 255,
    "248": b"y" * 248,
    "249": b"y" * 249,
    "two-byte": "ü".encode() * 127,
    "odd blanks": "a\u2028b\u00a0".encode(),
    "surrogate": b"\xed\xa0\x80",
    "dots": b"a.private.b/../c",
    "resumed": b"task~resumed-1~",
    "sql": b"'; DROP TABLE agent_paused_tasks; --",
}
_NAMED_PROPERTIES = (
    "message_id",
    "correlation_id",
    "app_id",
    "reply_to",
    "type",
    "content_type",
    "content_encoding",
    "cluster_id",
)


def _property_recipe(kind: str, name: str, text: bytes | None) -> Recipe:
    def make(world: FuzzState) -> WireMessage | None:
        message = valid_message(world, kind)
        changes: dict[str, Any] = {name: text}
        return message and message.with_properties(**changes)

    return make


for _kind in KINDS[:4]:
    for _name in _NAMED_PROPERTIES:
        RECIPES[f"{_kind}: no {_name}"] = _property_recipe(_kind, _name, None)
        for _what, _text in _INVALID_TEXTS.items():
            if _name in _NAMED_PROPERTIES[:5] or _what in {"not utf-8", "longest"}:
                RECIPES[f"{_kind}: {_name} {_what}"] = _property_recipe(_kind, _name, _text)

for _stamp in (0, -1, 2**31, 2**32, 253402300800, 10**13, 2**62, 2**63, 2**64 - 1):

    @recipe(f"timestamp {_stamp}")
    def _timestamp(world: FuzzState, stamp: int = _stamp) -> WireMessage | None:
        message = valid_message(world, world.rng.choice(KINDS))
        return message and message.with_properties(timestamp=stamp)


# Headers: each known header with each type and many values, unknown headers, arbitrary bytes as
# keys.


def _nested_json(depth: int) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for _ in range(depth):
        nested = {"items": nested}
    return nested


def _nested_field(depth: int, of: bytes) -> bytes:
    inner = b"V"
    for _ in range(depth):
        content = (b"\x01k" + inner) if of == b"F" else inner
        inner = of + len(content).to_bytes(4, "big") + content
    return inner


_HEADERS = (
    "x-parent-task-id",
    "x-resume",
    "x-deadline",
    "x-call-depth",
    "x-idle-timeout",
    "x-attempt",
    "x-start",
    "x-query",
    "traceparent",
)
_VALUES: dict[str, Value] = {
    "empty": "",
    "word": "soon",
    "not utf-8": b"\xff\xfe",
    "zero byte": "a\0b",
    "long": "x" * 248,
    "too long": "x" * 281,
    "280": "x" * 280,
    "huge": "z" * 100_000,
    "digits": "9" * 5000,
    "text nan": "NaN",
    "text inf": "-Infinity",
    "negative": -1000,
    "far negative": -1e308,
    "far": 1e300,
    "year 9999": 253402300799.5,
    "past": 1.0,
    "most": 2**63 - 1,
    "least": -(2**63),
    "bool": True,
    "void": None,
    "table": {"a": {"b": "c"}},
    "array": [1, "a", [None]],
    "byte": Raw(b"b", b"\x80"),
    "unsigned byte": Raw(b"B", b"\xff"),
    "short": Raw(b"s", b"\x80\x00"),
    "unsigned short": Raw(b"u", b"\xff\xff"),
    "int": Raw(b"I", b"\x80\0\0\0"),
    "unsigned int": Raw(b"i", b"\xff\xff\xff\xff"),
    "long long": Raw(b"L", b"\x7f" + b"\xff" * 7),
    "float": Raw(b"f", b"\x7f\x7f\xff\xff"),
    "decimal": Raw(b"D", b"\x02\0\0\x01\x00"),
    "far decimal": Raw(b"D", b"\xff\xff\xff\xff\xff"),
    "instant": Raw(b"T", b"\xff" * 8),
    "bytes": Raw(b"x", b"\0\0\0\x03\0\xff\0"),
    "deep 100": Raw(_nested_field(100, b"F")[:1], _nested_field(100, b"F")[1:]),
    "deep 900": Raw(_nested_field(900, b"F")[:1], _nested_field(900, b"F")[1:]),
    "deep 5000": Raw(_nested_field(5000, b"A")[:1], _nested_field(5000, b"A")[1:]),
}
_HEADERS_BY_KIND = {
    "request": _HEADERS,
    "response": ("x-parent-task-id", "x-dead-reason"),
    "status": ("x-parent-task-id",),
    "cancel": ("x-parent-task-id",),
}


def _header_recipe(kind: str, name: str | bytes, value: Value) -> Recipe:
    def make(world: FuzzState) -> WireMessage | None:
        message = valid_message(world, kind)
        return message and message.with_headers({name: value})

    return make


for _kind, _names in _HEADERS_BY_KIND.items():
    for _name in _names:
        for _what, _value in _VALUES.items():
            RECIPES[f"{_kind}: {_name} {_what}"] = _header_recipe(_kind, _name, _value)

for _what, _key in {
    "empty": b"",
    "not utf-8": b"\xff\xc3",
    "zero byte": b"a\0",
    "longest": b"k" * 255,
    "of the broker": b"x-delivery-count",
    "death": b"x-death",
    "first death": b"x-first-death-reason",
    "count": b"x-acquired-count",
}.items():
    for _value_name in ("word", "least", "table", "deep 900", "not utf-8"):
        for _kind in ("request", "response", "cancel"):
            RECIPES[f"{_kind}: header key {_what}, {_value_name}"] = _header_recipe(
                _kind, _key, _VALUES[_value_name]
            )

for _depth in (1, 10, 64, 128, 500, 900, 1000):
    for _of in (b"F", b"A"):
        for _kind in KINDS:
            RECIPES[f"{_kind}: nested {_of.decode()} {_depth}"] = _header_recipe(
                _kind, "x-nested", Raw(_of, _nested_field(_depth, _of)[1:])
            )

for _header_space in (131_064, 131_063, 131_000, 130_920, 130_500, 126_976, 65_536):
    for _kind in KINDS:

        @recipe(f"{_kind}: header frame {_header_space}")
        def _frame(
            world: FuzzState, space: int = _header_space, kind: str = _kind
        ) -> WireMessage | None:
            message = valid_message(world, kind)
            if message is None:
                return None
            message = message.with_headers({"x-pad": ""})
            pad = space - len(message.header_payload())
            return message.with_headers({"x-pad": "p" * pad})


@recipe("request: traceparent to be copied")
def _traceparent(world: FuzzState) -> WireMessage:
    return make_request(world, world.rng.choice(("asker", "doubter"))).with_headers(
        {"traceparent": "t" * 120_000}
    )


@recipe("request: many headers")
def _many_headers(world: FuzzState) -> WireMessage:
    return make_request(world).with_headers({f"k{number}": number for number in range(3000)})


@recipe("request: doubled headers")
def _duplicate_header(world: FuzzState) -> WireMessage:
    message = make_request(world)
    one = encode_table({"x-call-depth": 1, "x-deadline": 1})[4:]
    raw = one + encode_table({"x-call-depth": "2", "x-deadline": 9e99})[4:]
    return WireMessage(
        message.key, message.properties, {}, message.body, len(raw).to_bytes(4, "big") + raw
    )


for _what, _raw in {
    "no number": encode_table({"x-deadline": float("nan")}),
    "infinity": encode_table({"x-deadline": float("inf")}),
    "unknown tag": encode_table({"k": Raw(b"Q", b"1234")}),
    "length beyond": b"\0\0\0\x20\x01kS\0\0\xff\xff",
    "cut": encode_table({"k": "value"})[:-3],
    "key beyond": b"\0\0\0\x05\xffabcd",
    "array beyond": encode_table({"k": Raw(b"A", b"\0\0\xff\xff")}),
    "short value": encode_table({"k": Raw(b"l", b"\0\0")}),
}.items():

    @recipe(f"request: table with {_what}", closing=True)
    def _broken(world: FuzzState, raw: bytes = _raw) -> WireMessage:
        message = make_request(world)
        return WireMessage(message.key, message.properties, {}, message.body, raw)


def _json_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from _json_paths(inner, (*path, key))


def _with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is _REMOVED:
        del copy[path[0]]
    else:
        copy[path[0]] = _with_value(copy[path[0]], path[1:], new)
    return copy


_REMOVED = object()
_WRONG_VALUES: tuple[Any, ...] = (
    _REMOVED,
    None,
    True,
    0,
    -1,
    1.5,
    10**400,
    "",
    "word",
    "\0",
    "\ud800",
    "x" * 300,
    [],
    {},
    [[]],
    [{}],
)
_WRONG_VALUES += (
    {"text": 5},
    "TASK_STATE_WORKING",
    "TASK_STATE_COMPLETED",
    "ROLE_NOBODY",
    {"a": {"b": [1] * 50}},
)


def _wrong_value_recipe(kind: str) -> Recipe:
    def make(world: FuzzState) -> WireMessage | None:
        message = valid_message(world, kind)
        if message is None:
            return None
        body = json.loads(message.body)
        path = world.rng.choice([each for each in _json_paths(body) if each] or [()])
        return message.with_properties(
            body=json.dumps(_with_value(body, path, world.rng.choice(_WRONG_VALUES))).encode()
        )

    return make


def _body_recipe(kind: str, change: Callable[[FuzzState, bytes], bytes]) -> Recipe:
    def make(world: FuzzState) -> WireMessage | None:
        message = valid_message(world, kind)
        return message and message.with_properties(body=change(world, message.body))

    return make


def _nested_body(opened: bytes, closed: bytes, depth: int) -> Callable[[FuzzState, bytes], bytes]:
    return lambda _, body: body.replace(
        b'"data": ', b'"data": ' + opened * depth + b"1" + closed * depth + b', "x": ', 1
    )


def _with_flipped_bytes(world: FuzzState, body: bytes) -> bytes:
    flipped = bytearray(body)
    for _ in range(world.rng.randrange(1, 4)):
        if flipped:
            flipped[world.rng.randrange(len(flipped))] = world.rng.randrange(256)
    return bytes(flipped)


_BODIES: dict[str, Callable[[FuzzState, bytes], bytes]] = {
    "empty": lambda *_: b"",
    "null": lambda *_: b"null",
    "number": lambda *_: b"12",
    "list": lambda _, body: b"[" + body + b"]",
    "cut": lambda world, body: body[: world.rng.randrange(max(len(body), 1))],
    "flipped": _with_flipped_bytes,
    "utf-16": lambda _, body: body.decode(errors="replace").encode("utf-16"),
    "latin-1": lambda _, body: body.replace(b"ROLE_AGENT", b"ROLE_AG\xcbNT"),
    "bom": lambda _, body: b"\xef\xbb\xbf" + body,
    "trailing": lambda _, body: body + b"{}",
    "zero bytes": lambda _, body: body + b"\0" * 100,
    "nan": lambda _, body: body.replace(b": 1", b": NaN", 1),
    "infinity": lambda _, body: body.replace(b'"data": ', b'"data": -Infinity, "x": ', 1),
    "huge integer": lambda _, body: body.replace(
        b'"data": ', b'"data": ' + b"9" * 5000 + b', "x": ', 1
    ),
    "far float": lambda _, body: body.replace(b'"data": ', b'"data": 1e999999, "x": ', 1),
    "surrogate": lambda _, body: body.replace(b'"data": ', b'"data": "\\ud800", "x": ', 1),
    "escaped zero": lambda _, body: body.replace(b'"data": ', b'"data": "\\u0000", "x": ', 1),
    "surrogate key": lambda _, body: body.replace(
        b'"data": ', b'"data": {"\\udfff": 1}, "x": ', 1
    ),
    "doubled key": lambda _, body: body[:1] + body[1:-1] + b", " + body[1:],
    "deep 100": _nested_body(b"[", b"]", 100),
    "deep 190": _nested_body(b'{"a":', b"}", 190),
    "deep 250": _nested_body(b"[", b"]", 250),
    "deep 5000": _nested_body(b'{"a":', b"}", 5000),
    "deep open": _nested_body(b"[", b"", 20_000),
    "at the limit": lambda _, body: body + b" " * (MAX_BODY_BYTES - len(body)),
    "over the limit": lambda _, body: body + b" " * (MAX_BODY_BYTES + 1 - len(body)),
    "long text": lambda _, body: body.replace(
        b'"data": ', b'"data": "' + b"t" * 150_000 + b'", "x": ', 1
    ),
    "long list": lambda _, body: body.replace(
        b'"data": ', b'"data": [' + b"0," * 60_000 + b'0], "x": ', 1
    ),
    "large": lambda _, body: body + b" " * 2_000_000,
}


for _kind in KINDS[:4]:
    RECIPES[f"{_kind}: wrong at one place"] = _wrong_value_recipe(_kind)
    RECIPES[f"{_kind}: wrong at another place"] = _wrong_value_recipe(_kind)
    RECIPES[f"{_kind}: wrong at a third place"] = _wrong_value_recipe(_kind)
    for _what, _change in _BODIES.items():
        if _what != "large" or _kind == "request":
            RECIPES[f"{_kind}: body {_what}"] = _body_recipe(_kind, _change)


@recipe("request: metadata that is not kept")
def _metadata(world: FuzzState) -> WireMessage:
    message = make_request(world)
    body = json.loads(message.body)
    body["metadata"] = world.rng.choice(
        (
            {"userId": 5},
            {"sessionId": ["s"]},
            {"userConfig": 7},
            {"securityContext": "all"},
            {"userId": "x" * 300},
            {"userId": "a\nb"},
            {"securityContext": _nested_lists(600)},
            {"team": _nested_lists(600)},
            {"userConfig": _nested_lists(300)},
        )
    )
    return message.with_properties(body=json.dumps(body).encode())


def _nested_lists(depth: int) -> Any:
    pit: Any = 1
    for _ in range(depth):
        pit = {"a": pit}
    return pit


@recipe("request: another id in the body")
def _other_id(world: FuzzState) -> WireMessage:
    message = make_request(world)
    return message.with_properties(body=message.body.replace(b'"taskId": "', b'"taskId": "not-'))


@recipe("request: id of a resumed call")
def _resumed_id(world: FuzzState) -> WireMessage:
    task_id = f"{world.mark}-{new_id()}"
    return make_request(world, task_id=f"{task_id}.r1")


for _what, _seconds in {
    "past": -5.0,
    "now": 0.0,
    "short": 0.2,
    "fair": 30.0,
    "far": 3e9,
    "very far": 2.5e11,
}.items():

    @recipe(f"request: deadline {_what}")
    def _deadline(world: FuzzState, seconds: float = _seconds) -> WireMessage:
        return make_request(world).with_headers({"x-deadline": time.time() + seconds})


for _calls in (1, 10, 11, 1000, -1, -1000):

    @recipe(f"request: depth {_calls}")
    def _call_depth(world: FuzzState, depth: int = _calls) -> WireMessage:
        return make_request(world).with_headers({"x-call-depth": depth})


for _idle in (0.0, -1.0, 0.1, 5.0, 1e9):

    @recipe(f"request: idle timeout {_idle}")
    def _idle_timeout(world: FuzzState, idle: float = _idle) -> WireMessage:
        return make_request(world, world.rng.choice(("asker", "doubter", "sleeper"))).with_headers(
            {"x-idle-timeout": idle}
        )


# Each kind of message sent to each kind of queue.

for _kind in KINDS:
    for _suffix in ("req", "nested", "resp", "dlq", "broadcast", "private"):

        @recipe(f"{_kind} to .{_suffix}")
        def _misplaced(
            world: FuzzState, kind: str = _kind, suffix: str = _suffix
        ) -> WireMessage | None:
            message = valid_message(world, kind)
            if suffix == "private":
                if not world.private_queues:
                    return None
                return message and message.with_properties(
                    key=world.rng.choice(world.private_queues)
                )
            return message and message.with_properties(key=f"{world.rng.choice(AGENTS)}.{suffix}")


@recipe("request: no such agent")
def _nowhere(world: FuzzState) -> WireMessage:
    return make_request(world).with_properties(key="nobody.req")


# Replies that cannot be delivered, or that would reach others.

for _what, _address in {
    "missing": "missing-{mark}",
    "missing of mine": MALLORY + ".private.{mark}",
    "full": FULL_QUEUE,
    "requests of an agent": "leaf.req",
    "responses of an agent": "root.resp",
    "dead letters": "leaf.dlq",
    "broadcast": "root.broadcast",
    "the honest requester": "ledger.resp",
    "longest": "x" * 248,
}.items():
    for _agent in ("leaf", "spark"):

        @recipe(f"request to {_agent}: reply to {_what}")
        def _reply_to(
            world: FuzzState, address: str = _address, agent: str = _agent
        ) -> WireMessage:
            return make_request(world, agent, reply_to=address.format(mark=world.mark))


@recipe("request: unreadable, with a reply to another client")
def _unreadable_reply(world: FuzzState) -> WireMessage | None:
    victim = world.random_observed("request")
    if victim is None:
        return None
    message = make_request(world, "leaf", task_id=str(victim.properties["correlation_id"]))
    return message.with_properties(
        reply_to=victim.properties.get("reply_to"), body=b"{" + world.mark.encode()
    ).with_headers({"x-parent-task-id": victim.headers.get("x-parent-task-id", "p")})


# Discovery: questions for cards, and unsolicited cards.

for _what, _more in {
    "": {},
    " without an address": {"reply_to": None},
    " for another's address": {"reply_to": f"{EVIL}.replies"},
    " with a body": {"body": b"\xff" * 1000},
}.items():

    @recipe(f"describe{_what}")
    def _describe(world: FuzzState, more: Any = _more) -> WireMessage:
        agent = world.rng.choice(AGENTS)
        key = world.rng.choice((f"{agent}.describe", "*.describe", f"{agent}.resp"))
        properties = _properties(world, "describe", world.mark, world.mark)
        question = WireMessage(key, {}, {}, b"{}")
        return question.with_properties(**{**properties, "reply_to": REPLIES, **more})


for _what, _card in {
    "": {"name": MALLORY},
    " of another agent": {"name": "leaf"},
    " of 1 MB": {"name": MALLORY, "description": "x" * 1_000_000},
    " nested 900": {"name": MALLORY, "inputSchema": _nested_json(900)},
    " with a remote schema": {"name": MALLORY, "inputSchema": {"$ref": "https://evil.example"}},
    " that is no object": 1,
}.items():

    @recipe(f"card{_what}")
    def _make_card(world: FuzzState, card: Any = _card) -> WireMessage:
        agent = world.rng.choice(AGENTS)
        key = world.rng.choice((f"{agent}.broadcast", f"{agent}.resp"))
        content = {"card": card, "replica": world.mark, "startedAt": "2026-01-02T03:04:05Z"}
        message = WireMessage(key, {}, {}, json.dumps(content).encode())
        return message.with_properties(**_properties(world, "card", world.mark, world.mark))


# The fuzzer's own tasks: requested again, with another input, resumed, cancelled.


def _own_running_task(world: FuzzState) -> tuple[str, str] | None:
    agents = [agent for agent in AGENTS if world.own_task_ids[agent]]
    if not agents:
        return None
    agent = world.rng.choice(agents)
    return agent, world.rng.choice(world.own_task_ids[agent])


for _what, _more in {
    "again": {},
    "resumed": {"x-resume": "2"},
    "resumed in an earlier attempt": {"x-resume": "1"},
    "resumed much later": {"x-resume": "9" * 20},
    "for another parent": {"x-parent-task-id": "other"},
    "that must be new": {"x-start": "token"},
}.items():

    @recipe(f"own request {_what}")
    def _own(world: FuzzState, more: Any = _more) -> WireMessage | None:
        found = _own_running_task(world)
        return found and make_request(world, *found).with_headers({**more})


@recipe("own request, sent to another agent")
def _own_elsewhere(world: FuzzState) -> WireMessage | None:
    found = _own_running_task(world)
    return found and make_request(
        world, world.rng.choice([each for each in AGENTS if each != found[0]]), found[1]
    )


@recipe("request for a new task")
def _new_task(world: FuzzState) -> WireMessage:
    request = make_request(world, world.rng.choice(("leaf", "spark", "sleeper")))
    return request.with_headers({"x-start": world.rng.choice(("token", new_id()))})


@recipe("request resumed before it was sent")
def _resume_first(world: FuzzState) -> WireMessage:
    return make_request(world, world.rng.choice(("leaf", "spark", "sleeper"))).with_headers(
        {"x-resume": "1"}
    )


@recipe("request and its copy at once")
def _at_once(world: FuzzState) -> WireMessage | None:
    found = _own_running_task(world)
    return found and make_request(world, found[0], world.own_task_ids[found[0]][-1])


@recipe("own cancel")
def _own_cancel(world: FuzzState) -> WireMessage:
    return make_cancel(world)


@recipe("own cancel of a running task")
def _cancel_running(world: FuzzState) -> WireMessage:
    mine = world.own_task_ids["sleeper"]
    return make_cancel(world, "sleeper", mine[-1] if mine else None)


@recipe("own cancel for another parent")
def _cancel_other_parent(world: FuzzState) -> WireMessage:
    return make_cancel(world).with_headers({"x-parent-task-id": "another"})


@recipe("own cancel before the request")
def _cancel_first(world: FuzzState) -> WireMessage:
    return make_cancel(world, task_id=f"{world.mark}-{new_id()}")


@recipe("request after its cancel")
def _after_cancel(world: FuzzState) -> WireMessage | None:
    cancelled = world.observed["mine cancelled"]
    return (
        make_request(world, "leaf", str(cancelled.popleft().properties["correlation_id"]))
        if cancelled
        else None
    )


@recipe("cancel of a task not requested yet")
def _cancel_early(world: FuzzState) -> WireMessage:
    message = make_cancel(world, "leaf", task_id=f"{world.mark}-{new_id()}")
    world.observed["mine cancelled"].append(message)
    return message


@recipe("cancel by broadcast")
def _cancel_broadcast(world: FuzzState) -> WireMessage:
    agent = world.rng.choice(AGENTS)
    return make_cancel(world, agent).with_properties(key=f"{agent}.broadcast")


@recipe("cancel at the wrong agent")
def _cancel_elsewhere(world: FuzzState) -> WireMessage:
    return make_cancel(world).with_properties(key=f"{world.rng.choice(AGENTS)}.resp")


# Attaches: to own tasks, to the tasks of others, and unreadable ones.


@recipe("own attach")
def _own_attach(world: FuzzState) -> WireMessage:
    return make_attach(world)


@recipe("own attach to a running task")
def _attach_running(world: FuzzState) -> WireMessage:
    mine = world.own_task_ids["sleeper"]
    return make_attach(
        world, "sleeper", mine[-1] if mine else None, reply_to=f"{MALLORY}.private.{world.mark}"
    )


@recipe("attach to an unknown task")
def _attach_unknown(world: FuzzState) -> WireMessage:
    return make_attach(world, task_id=f"{world.mark}-{new_id()}")


@recipe("attach to the task of another")
def _attach_victim(world: FuzzState) -> WireMessage | None:
    victim = world.random_observed("request")
    if victim is None:
        return None
    agent = victim.key.partition(".")[0]
    return make_attach(world, agent, str(victim.properties["correlation_id"]))


@recipe("attach by broadcast")
def _attach_broadcast(world: FuzzState) -> WireMessage:
    agent = world.rng.choice(AGENTS)
    return make_attach(world, agent).with_properties(key=f"{agent}.broadcast")


@recipe("attach by broadcast that asks for denials")
def _attach_for_denials(world: FuzzState) -> WireMessage:
    agent = world.rng.choice(AGENTS)
    odd = (f"{agent}.private.{new_id()}", "ledger.resp", REPLIES, "", "x" * 300, "\0", 7, 1.5)
    attach = make_attach(world, agent).with_properties(key=f"{agent}.broadcast")
    return attach.with_headers({"x-deny-to": world.rng.choice(odd)})


@recipe("denial of a task")
def _deny(world: FuzzState) -> WireMessage:
    agent = world.rng.choice(AGENTS)
    body = {"replica": MALLORY, "consumers": {f"{agent}.req": 1_000_000}}
    denial = WireMessage(f"{agent}.broadcast", {}, {}, json.dumps(body).encode())
    return denial.with_properties(**_properties(world, "deny", world.mark, new_id()))


@recipe("attach for another address")
def _attach_for_another(world: FuzzState) -> WireMessage:
    return make_attach(world, reply_to="ledger.resp")


@recipe("attach without an address")
def _attach_without_address(world: FuzzState) -> WireMessage:
    return make_attach(world, reply_to=None)


@recipe("query for the status of an own task")
def _own_query(world: FuzzState) -> WireMessage:
    return make_attach(world).with_headers({"x-query": world.mark})


@recipe("query for the status of an unknown task")
def _query_unknown(world: FuzzState) -> WireMessage:
    query = make_attach(world, task_id=f"{world.mark}-{new_id()}")
    return query.with_headers({"x-query": world.mark})


@recipe("query for the status of a task in memory")
def _query_in_memory(world: FuzzState) -> WireMessage:
    query = make_attach(world, world.rng.choice([*IN_PROCESS]), task_id=f"{world.mark}-{new_id()}")
    return query.with_headers({"x-query": world.mark})


@recipe("query with an odd token")
def _query_odd(world: FuzzState) -> WireMessage:
    odd = ("", "x" * 300, "\u0000", 7, 1.5)
    return make_attach(world).with_headers({"x-query": world.rng.choice(odd)})


@recipe("query by broadcast")
def _query_broadcast(world: FuzzState) -> WireMessage:
    agent = world.rng.choice(AGENTS)
    query = make_attach(world, agent).with_properties(key=f"{agent}.broadcast")
    return query.with_headers({"x-query": world.mark})


@recipe("attach without an id")
def _attach_without_id(world: FuzzState) -> WireMessage:
    return make_attach(world).with_properties(body=json.dumps({"mark": world.mark}).encode())


@recipe("own request again, from another address")
def _own_from_elsewhere(world: FuzzState) -> WireMessage | None:
    found = _own_running_task(world)
    address = f"{MALLORY}.private.{world.mark}"
    return found and make_request(world, *found, reply_to=address)


@recipe("own running request again, from another address")
def _running_from_elsewhere(world: FuzzState) -> WireMessage | None:
    mine = world.own_task_ids["sleeper"]
    address = f"{MALLORY}.private.{world.mark}"
    return make_request(world, "sleeper", mine[-1], reply_to=address) if mine else None


# Answers to questions that no task asks, and unreadable ones.


def make_complete(world: FuzzState, question: object = None, **changes: Any) -> WireMessage:
    """An answer to a question that a task of the fuzzer might ask."""
    agent = world.rng.choice(AGENTS)
    own_ids = world.own_task_ids[agent]
    task_id = TaskId(world.rng.choice(own_ids) if own_ids else f"{world.mark}-{new_id()}")
    key = QuestionKey(AgentName(agent), task_id, TaskId(f"{QUESTION_PREFIX}approval.1"))
    body = {"question": question or key.to_id(), "value": {"approved": True}}
    answer = WireMessage(f"{agent}.resp", {}, {}, json.dumps(body).encode())
    properties = _properties(world, "complete", world.mark, task_id)
    return answer.with_properties(**{**properties, "reply_to": REPLIES, **changes})


def make_signal(world: FuzzState, changes: object = None, **properties: Any) -> WireMessage:
    """A signal to a task of the fuzzer. `changes` replace fields of its body, or all of it."""
    agent = world.rng.choice(AGENTS)
    own_ids = world.own_task_ids[agent]
    task_id = world.rng.choice(own_ids) if own_ids else f"{world.mark}-{new_id()}"
    own = {"id": task_id, "signal": "chat", "signalId": new_id(), "value": {"a": [1]}}
    body = {**own, **changes} if isinstance(changes, dict) else changes or own
    signal = WireMessage(f"{agent}.resp", {}, {}, json.dumps(body).encode())
    common = _properties(world, "signal", world.mark, str(task_id))
    return signal.with_properties(**{**common, "reply_to": REPLIES, **properties})


@recipe("own signal")
def _own_signal(world: FuzzState) -> WireMessage:
    return make_signal(world)


@recipe("signal by broadcast")
def _signal_broadcast(world: FuzzState) -> WireMessage:
    return make_signal(world).with_properties(key=f"{world.rng.choice(AGENTS)}.broadcast")


@recipe("signal to the task of another")
def _signal_victim(world: FuzzState) -> WireMessage | None:
    victim = world.random_observed("request")
    if victim is None:
        return None
    agent = victim.key.partition(".")[0]
    own = make_signal(world, {"id": str(victim.properties["correlation_id"])})
    return own.with_properties(key=f"{agent}.resp")


@recipe("signal to an unknown task")
def _signal_unknown(world: FuzzState) -> WireMessage:
    return make_signal(world, {"id": f"{world.mark}-{new_id()}"})


@recipe("signal for another address")
def _signal_for_another(world: FuzzState) -> WireMessage:
    return make_signal(world, reply_to="ledger.resp")


@recipe("signal of an odd sender")
def _signal_of_odd_sender(world: FuzzState) -> WireMessage:
    return make_signal(world, app_id=world.rng.choice(("a\nb", "x" * 249)))


@recipe("odd signal")
def _odd_signal(world: FuzzState) -> WireMessage:
    odd: tuple[object, ...] = (
        {"signal": "a b"},
        {"signal": 7},
        {"signalId": ""},
        {"signalId": "\u0000"},
        {"signalId": "x" * 300},
        {"id": "\n"},
        {"value": "x" * 300_000},
        {"value": "\ud800"},
        [1],
    )
    return make_signal(world, world.rng.choice(odd))


@recipe("signal that is nested too deep")
def _deep_signal(world: FuzzState) -> WireMessage:
    value: object = 1
    for _ in range(120):
        value = [value]
    return make_signal(world, {"value": value})


@recipe("read of a value")
def _read_value(world: FuzzState) -> WireMessage:
    keys: tuple[object, ...] = ("progress", "", "\u0000", "x" * 300, 7, None)
    key = world.rng.choice(keys)
    return make_signal(world, {"key": key}).with_properties(type="read")


@recipe("answer to a question that nobody asks")
def _answer_unasked(world: FuzzState) -> WireMessage:
    return make_complete(world)


@recipe("answer by broadcast")
def _answer_broadcast(world: FuzzState) -> WireMessage:
    return make_complete(world).with_properties(key=f"{world.rng.choice(AGENTS)}.broadcast")


@recipe("answer to a question of another agent")
def _answer_elsewhere(world: FuzzState) -> WireMessage:
    return make_complete(world).with_properties(key=f"{world.rng.choice(AGENTS)}.resp")


@recipe("answer without an address")
def _answer_without_address(world: FuzzState) -> WireMessage:
    return make_complete(world, reply_to=None)


@recipe("answer for another address")
def _answer_for_another(world: FuzzState) -> WireMessage:
    return make_complete(world, reply_to="ledger.resp")


@recipe("answer to an odd question", reaches=("Completions._parse",))
def _answer_odd(world: FuzzState) -> WireMessage:
    odd = ("x", "W1tbW1s", "A" * 100_000, 7, ["a"], "\ud800", f"{world.mark}=")
    return make_complete(world, world.rng.choice(odd))


@recipe("rejection of a question that nobody asks")
def _reject_unasked(world: FuzzState) -> WireMessage:
    answer = make_complete(world)
    question = json.loads(answer.body)["question"]
    reasons: tuple[object, ...] = ("no", "x" * 10_000, None, 7, "\ud800")
    body = {"rejects": question, "reason": world.rng.choice(reasons)}
    return answer.with_properties(body=json.dumps(body).encode())


@recipe("answer that is also a rejection")
def _answer_and_reject(world: FuzzState) -> WireMessage:
    answer = make_complete(world)
    body = {**json.loads(answer.body), "rejects": world.mark}
    return answer.with_properties(body=json.dumps(body).encode())


@recipe("unreadable answer")
def _answer_unreadable(world: FuzzState) -> WireMessage:
    return make_complete(world).with_properties(body=world.mark.encode())


# Messages from the lying peer about an open call.

for _what, _answer in {
    "right": make_response,
    "failed": lambda world, call: make_response(world, call, "FAILED"),
    "failed, with advice": make_advice,
    "cancelled": lambda world, call: make_response(world, call, "CANCELED"),
    "not final": lambda world, call: make_response(world, call, "WORKING"),
    "no state": lambda world, call: make_response(world, call, "DREAMING"),
    "of a sender without a name": lambda world, call: make_response(world, call, app_id=""),
    "of another sender": lambda world, call: make_response(world, call, app_id=MALLORY),
    "unreadable of another sender": lambda world, call: make_response(
        world, call, app_id=MALLORY, body=world.mark.encode()
    ),
    "of a name that only waits have": lambda world, call: make_response(
        world, call, app_id=SLEEP_PEER
    ),
    "unreadable": lambda world, call: make_response(world, call, body=world.mark.encode()),
    "a status": make_status,
    "a status with odd metadata": lambda world, call: make_status(
        world, call, make_status_metadata(world)
    ),
    "a status that ends": lambda world, call: make_status(world, call).with_properties(
        body=make_status(world, call).body.replace(b"WORKING", b"COMPLETED")
    ),
    "a status without a message": lambda world, call: make_status(world, call).with_properties(
        body=json.dumps(
            {"statusUpdate": {"taskId": world.mark, "status": {"state": "TASK_STATE_SUBMITTED"}}}
        ).encode()
    ),
    "without a parent": lambda world, call: make_response(world, call).without_header(
        "x-parent-task-id"
    ),
    "a status without a parent": lambda world, call: make_status(world, call).without_header(
        "x-parent-task-id"
    ),
    "for another parent": lambda world, call: make_response(world, call).with_headers(
        {"x-parent-task-id": world.mark}
    ),
    "for another call": lambda world, call: make_response(world, call, correlation_id=world.mark),
    "large": lambda world, call: make_response(world, call, value="v" * 180_000),
    "incompressible": lambda world, call: make_response(
        world, call, value=world.rng.randbytes(60_000).hex()
    ),
}.items():

    @recipe(f"peer: {_what}")
    def _peer(
        world: FuzzState, answer: Callable[[FuzzState, WireMessage], WireMessage] = _answer
    ) -> WireMessage | None:
        call = world.next_call()
        return answer(world, call) if call else None


@recipe("peer: right, twice")
def _twice(world: FuzzState) -> WireMessage | None:
    answered = world.observed["answered"]
    if answered and world.rng.random() < 0.5:
        return make_response(world, answered.popleft())
    call = world.next_call()
    if call is None:
        return None
    answered.append(call)
    return make_response(world, call)


@recipe("peer: many statuses")
def _status_after_answer(world: FuzzState) -> WireMessage | None:
    return make_status(world, world.open_calls[-1]) if world.open_calls else None


# Observed honest messages, sent again with changes.

_REPLAYS: dict[str, Callable[[FuzzState, WireMessage], WireMessage]] = {
    "as mine": lambda world, message: message.with_properties(app_id=MALLORY),
    "as mine, answered to me": lambda world, message: message.with_properties(
        app_id=MALLORY, reply_to=REPLIES
    ),
    "with another id": lambda world, message: message.with_properties(
        app_id=MALLORY, correlation_id=world.mark
    ),
    "with a reply to me": lambda world, message: message.with_properties(
        app_id=MALLORY, reply_to=REPLIES
    ),
    "for another parent": lambda world, message: message.with_properties(
        app_id=MALLORY
    ).with_headers({"x-parent-task-id": world.mark}),
    "without a parent": lambda world, message: message.with_properties(
        app_id=MALLORY
    ).without_header("x-parent-task-id"),
    "unreadable": lambda world, message: message.with_properties(
        app_id=MALLORY, body=b"[" + world.mark.encode()
    ),
    "of another type": lambda world, message: message.with_properties(
        app_id=MALLORY, type=world.rng.choice(KINDS)
    ),
    "elsewhere": lambda world, message: message.with_properties(
        app_id=MALLORY,
        key=f"{world.rng.choice(AGENTS)}.{world.rng.choice(('req', 'resp', 'broadcast'))}",
    ),
    "resumed": lambda world, message: message.with_properties(app_id=MALLORY).with_headers(
        {"x-resume": "9"}
    ),
}
_FORGERIES: dict[str, Callable[[FuzzState, WireMessage], WireMessage]] = {
    "as it was": lambda world, message: message,
    "with its name and my address": lambda world, message: message.with_properties(
        reply_to=REPLIES
    ),
    "with its name, resumed": lambda world, message: message.with_headers({"x-resume": "9"}),
    "with its name, unreadable": lambda world, message: message.with_properties(
        body=b"[" + world.mark.encode()
    ),
    "with its name, an early deadline": lambda world, message: message.with_headers(
        {"x-deadline": 1.0}
    ),
    "with its name, to its requester": lambda world, message: message.with_properties(
        key="ledger.resp"
    ),
    "with another honest name": lambda world, message: message.with_properties(
        app_id=world.rng.choice((*AGENTS, "ledger"))
    ),
}


def _replay_recipe(
    kind: str, change: Callable[[FuzzState, WireMessage], WireMessage], source: str
) -> Recipe:
    def make(world: FuzzState) -> WireMessage | None:
        message = world.random_observed(source)
        return message and change(
            world, message.with_properties(message_id=f"{world.mark}.{kind}", user_id=None)
        )

    return make


for _kind in KINDS[:4]:
    for _what, _alter in _REPLAYS.items():
        _source = ANSWERED_REQUEST if _kind == "request" else _kind
        recipe(f"replayed {_kind} {_what}")(_replay_recipe(_kind, _alter, _source))
    for _what, _alter in _FORGERIES.items():
        recipe(f"replayed {_kind} {_what}", forged=True)(_replay_recipe(_kind, _alter, _kind))


@recipe("request: login of another client", closing=True)
def _login(world: FuzzState) -> WireMessage:
    return make_request(world, user_id="guest")


@recipe("cancel of an honest task as mine")
def _cancel_victim(world: FuzzState) -> WireMessage | None:
    victim = world.random_observed("request")
    if victim is None:
        return None
    return make_cancel(
        world, victim.key.partition(".")[0], str(victim.properties["correlation_id"])
    )


@recipe("forged cancel of an honest task", forged=True)
def _forged_cancel(world: FuzzState) -> WireMessage | None:
    victim = world.random_observed("request")
    if victim is None:
        return None
    message = make_cancel(
        world, victim.key.partition(".")[0], str(victim.properties["correlation_id"])
    )
    parent = victim.headers.get("x-parent-task-id")
    message = message.with_headers({"x-parent-task-id": parent}) if parent else message
    return message.with_properties(app_id=victim.properties["app_id"])


@recipe("forged answer to an honest call", forged=True)
def _forged_answer(world: FuzzState) -> WireMessage | None:
    victim = world.random_observed("request")
    if victim is None or "reply_to" not in victim.properties:
        return None
    return make_response(world, victim, value=FORGED_RESULT, app_id=victim.key.partition(".")[0])


@recipe("answer to an honest call as mine")
def _my_answer(world: FuzzState) -> WireMessage | None:
    victim = world.random_observed("request")
    if victim is None or "reply_to" not in victim.properties:
        return None
    return make_response(world, victim, value=FORGED_RESULT, app_id=MALLORY)


@recipe("status to an honest call as mine")
def _my_status(world: FuzzState) -> WireMessage | None:
    victim = world.random_observed("request")
    if victim is None or "reply_to" not in victim.properties:
        return None
    return make_status(world, victim, app_id=MALLORY)


# Sequences for branches that single messages do not reach.

EVE = "eve"
"""Another name of the fuzzer, to act as a requester other than the original one."""


def _own_earlier_request(world: FuzzState, agent: str, *, back: int) -> WireMessage | None:
    """An earlier request of the fuzzer to `agent`; `back` counts from the newest."""
    requests = world.own_requests[agent]
    return requests[-1 - back] if len(requests) > back else None


def _same_request(world: FuzzState, message: WireMessage, **changes: Any) -> WireMessage:
    return message.with_properties(message_id=f"{world.mark}.again", **changes)


for _agent in ("leaf", "spark", "sleeper", "asker", "doubter"):
    for _age in (0, 1, 12):
        for _what, _by in {
            "again": {},
            "of another requester": {"app_id": EVE, "reply_to": f"{EVE}.replies"},
            "with another input": {"body": None},
            "to an operation of another agent": {
                "key": "leaf.req" if _agent != "leaf" else "spark.req"
            },
        }.items():

            @recipe(f"request {_what}: {_agent}, {_age} back", deep=True)
            def _rerequested(
                world: FuzzState, agent: str = _agent, back: int = _age, by: Any = _by
            ) -> WireMessage | None:
                message = _own_earlier_request(world, agent, back=back)
                if message is None:
                    return None
                if "body" in by:
                    return make_request(world, agent, str(message.properties["correlation_id"]))
                return _same_request(world, message, **by)

        for _order in ("1", "2", "3"):

            @recipe(f"request resumed {_order}: {_agent}, {_age} back", deep=True)
            def _resumed(
                world: FuzzState, agent: str = _agent, back: int = _age, order: str = _order
            ) -> WireMessage | None:
                message = _own_earlier_request(world, agent, back=back)
                return message and _same_request(world, message).with_headers({"x-resume": order})

        for _sender in (MALLORY, EVE):

            @recipe(f"cancel by {_sender}: {_agent}, {_age} back", deep=True)
            def _cancelled(
                world: FuzzState, agent: str = _agent, back: int = _age, by: str = _sender
            ) -> WireMessage | None:
                message = _own_earlier_request(world, agent, back=back)
                if message is None:
                    return None
                return make_cancel(
                    world, agent, str(message.properties["correlation_id"]), app_id=by
                )


def _new_request(world: FuzzState, agent: str, data: Any, **changes: Any) -> WireMessage:
    message = make_request(world, agent, **changes)
    body = json.loads(message.body)
    body["message"]["parts"] = [{"data": data}]
    return message.with_properties(body=json.dumps(body).encode())


for _seconds in (-5, 1, 3):

    @recipe(f"a request that starts in {_seconds} s")
    def _starts_later(world: FuzzState, seconds: int = _seconds) -> WireMessage:
        later = make_request(world, world.rng.choice(("leaf", "spark", "sleeper")))
        return later.with_headers({"x-start-at": time.time() + seconds})


for _what in ("empty", "word", "not utf-8", "text nan", "negative", "bool", "void", "table"):

    @recipe(f"a request that starts at {_what}")
    def _starts_oddly(world: FuzzState, what: str = _what) -> WireMessage:
        return make_request(world).with_headers({"x-start-at": _VALUES[what]})


for _sender in (MALLORY, EVE):
    for _again in (0, 1, 2):

        @recipe(f"a nap that {_sender} cancels {_again}", deep=True)
        def _nap(world: FuzzState, by: str = _sender, again: int = _again) -> list[WireMessage]:
            nap = _new_request(world, "sleeper", 1500)
            task_id = str(nap.properties["correlation_id"])
            return [
                nap,
                *([_same_request(world, nap)] * again),
                make_cancel(world, "sleeper", task_id, app_id=by),
            ]


for _what, _then in {
    "again": {},
    "of another requester": {"app_id": EVE, "reply_to": f"{EVE}.replies"},
    "with another input": {"body": b'{"message":{"role":"ROLE_USER","parts":[{"data":7}]}}'},
    "resumed": {"resume": "5"},
}.items():
    for _agent in ("sleeper", "asker", "doubter"):

        @recipe(f"{_agent}, at once {_what}", deep=True)
        def _twice_now(
            world: FuzzState, agent: str = _agent, then: Any = _then
        ) -> list[WireMessage]:
            first = _new_request(world, agent, 800)
            changes = {name: value for name, value in then.items() if name != "resume"}
            second = _same_request(world, first, **changes)
            return [
                first,
                second.with_headers({"x-resume": then["resume"]}) if "resume" in then else second,
            ]


@recipe("a failed task that is resumed", deep=True)
def _fails(world: FuzzState) -> list[WireMessage]:
    failed = _new_request(world, world.rng.choice(("leaf", "spark")), "no piece")
    resumed = _same_request(world, failed).with_headers({"x-resume": "1"})
    return [failed, resumed, _same_request(world, failed), resumed]


for _turn in range(2):

    @recipe(f"a failed task that is resumed twice in one order, {_turn}", deep=True)
    def _fails_again(world: FuzzState) -> MessageScript:
        failed = _new_request(world, "leaf", "no piece").with_headers({"x-resume": "1"})
        resumed = _same_request(world, failed).with_headers({"x-resume": "2"})
        return MessageScript([failed], ((0.6, resumed), (0.9, resumed), (1.3, resumed)))

    @recipe(f"a refused request whose reply has to wait, {_turn}", deep=True)
    def _refused_and_full(world: FuzzState) -> WireMessage:
        refused = make_request(world, world.rng.choice(("spark", "doubter")), reply_to=FULL_QUEUE)
        return refused.with_headers({"x-deadline": time.time() - 5})

    @recipe(f"a traceparent, {_turn}", deep=True)
    def _traced(world: FuzzState) -> WireMessage:
        return make_request(world).with_headers(
            {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        )


@recipe("a cancel for an earlier attempt", deep=True)
def _stale_resume(world: FuzzState) -> list[WireMessage]:
    agent = world.rng.choice(("sleeper", "asker"))
    task = _new_request(world, agent, 900).with_headers(
        {"x-parent-task-id": f"{world.mark}~resume-2"}
    )
    task_id = str(task.properties["correlation_id"])
    return [
        task,
        make_cancel(world, agent, task_id).with_headers(
            {"x-parent-task-id": f"{world.mark}~resume-1"}
        ),
    ]


@recipe("a resumed nap, and its copies", deep=True)
def _resumed_nap(world: FuzzState) -> list[WireMessage]:
    nap = _new_request(world, "sleeper", 2500).with_headers({"x-resume": "1"})
    before, world.running_task_id = world.running_task_id, str(nap.properties["correlation_id"])
    cancel = [make_cancel(world, "sleeper", before)] if before else []
    return [*cancel, nap, *[_same_request(world, nap.without_header("x-resume"))] * 2]


for _turn in range(3):
    recipe(f"a resumed nap, and the end of the last one, {_turn}", deep=True)(_resumed_nap)


@recipe("a crowd of naps", deep=True)
def _many_requests(world: FuzzState) -> list[WireMessage]:
    return [
        _new_request(world, "sleeper", 300, task_id=f"{world.mark}-{number}")
        for number in range(30)
    ]


@recipe("an id that only a resumed call may have", deep=True)
def _marked_id(world: FuzzState) -> WireMessage:
    return make_request(world, "leaf", f"{world.mark}-{new_id()}~resume-1")


@recipe("a status without a listener", deep=True)
def _unobserved_calls(world: FuzzState) -> list[WireMessage]:
    quiet = [
        _new_request(world, agent, 1, task_id=f"{world.mark}-{agent}").with_properties(
            reply_to=None
        )
        for agent in ("asker", "doubter")
    ]
    world.quiet_task_ids.extend(str(each.properties["correlation_id"]) for each in quiet)
    calls = [world.quiet_calls.popleft() for _ in range(len(world.quiet_calls))]
    return [
        *quiet,
        *(make_status(world, call) for call in calls),
        *(make_response(world, call) for call in calls),
    ]


@recipe("a flood of statuses", deep=True)
def _many_statuses(world: FuzzState) -> list[WireMessage] | None:
    return [make_status(world, world.open_calls[-1])] * 30 if world.open_calls else None


@recipe("a long status", deep=True)
def _long_status(world: FuzzState) -> WireMessage | None:
    if not world.open_calls:
        return None
    message = make_status(world, world.open_calls[-1])
    return message.with_properties(
        body=message.body.replace(b'{"percent": 40}', b'"' + b"n" * 70_000 + b'"')
    )


@recipe("a refusal of another request", deep=True)
def _refusal_of_another(world: FuzzState) -> WireMessage | None:
    if not world.open_calls:
        return None
    call = world.open_calls.pop()  # the newest: older ones may have timed out
    message = make_response(world, call, "FAILED")
    body = json.loads(message.body)
    body["task"]["metadata"] = {"failure": "invalid", "refuses": "0" * 64}
    return message.with_properties(body=json.dumps(body).encode())


for _wrong, _metadata_ in {
    "user": {"userId": 5},
    "session": {"sessionId": ["s"]},
    "configuration": {"userConfig": 7},
    "scopes": {"securityContext": "all"},
    "long user": {"userId": "x" * 300},
    "deep team": {"team": _nested_lists(190)},
    "deep scopes": {"securityContext": _nested_lists(190)},
    "deep configuration": {"userConfig": _nested_lists(190)},
}.items():

    @recipe(f"metadata with a wrong {_wrong}", deep=True)
    def _wrong_metadata(world: FuzzState, metadata: Any = _metadata_) -> WireMessage:
        message = make_request(world, "leaf")
        return message.with_properties(
            body=json.dumps({**json.loads(message.body), "metadata": metadata}).encode()
        )


for _depth_ in (1.5, 11, 999):

    @recipe(f"a call depth of {_depth_}", deep=True)
    def _deep_call(world: FuzzState, depth: float = _depth_) -> WireMessage:
        return make_request(world).with_headers({"x-call-depth": depth})


@recipe("an idle timeout of a moment", deep=True)
def _moment(world: FuzzState) -> WireMessage:
    return make_request(world, "asker").with_headers({"x-idle-timeout": 0.5})


def _by_operator(world: FuzzState, message: WireMessage) -> WireMessage:
    return _same_request(
        world, message, app_id=OPERATOR, user_id=OPERATOR, reply_to=f"{OPERATOR}.replies"
    )


for _age in (0, 1, 12):
    for _agent in ("leaf", "sleeper", "asker"):

        @recipe(f"operator: request again, {_agent}, {_age} back", deep=True, servers=True)
        def _operator_again(
            world: FuzzState, agent: str = _agent, back: int = _age
        ) -> WireMessage | None:
            message = _own_earlier_request(world, agent, back=back)
            return message and _by_operator(world, message)

        @recipe(f"operator: request resumed, {_agent}, {_age} back", deep=True, servers=True)
        def _operator_resumed(
            world: FuzzState, agent: str = _agent, back: int = _age
        ) -> WireMessage | None:
            message = _own_earlier_request(world, agent, back=back)
            return message and _by_operator(world, message).with_headers({"x-resume": "7"})

    @recipe(f"operator: cancel, {_age} back", deep=True, servers=True)
    def _operator_cancel(world: FuzzState, back: int = _age) -> WireMessage | None:
        agent = world.rng.choice(("sleeper", "asker", "doubter", "leaf"))
        message = _own_earlier_request(world, agent, back=back)
        if message is None:
            return None
        return make_cancel(
            world,
            agent,
            str(message.properties["correlation_id"]),
            app_id=OPERATOR,
            user_id=OPERATOR,
        )


for _agent in ("leaf", "diary"):

    @recipe(f"operator: a failed task of {_agent}, resumed", deep=True, servers=True)
    def _operator_revives(world: FuzzState, agent: str = _agent) -> MessageScript:
        failed = _new_request(world, agent, "no piece" if agent == "leaf" else -1)
        resumed = _by_operator(world, failed).with_headers({"x-resume": "2"})
        return MessageScript([failed], ((0.7, resumed), (1.2, resumed), (2.0, resumed)))


@recipe("operator: a running nap, resumed", deep=True, servers=True)
def _operator_resumes_nap(world: FuzzState) -> MessageScript:
    nap = _new_request(world, "sleeper", 1500).with_headers({"x-resume": "1"})
    return MessageScript([nap], ((0.5, _by_operator(world, nap).with_headers({"x-resume": "2"})),))


@recipe("operator: a completed task, requested again", deep=True, servers=True)
def _operator_asks_again(world: FuzzState) -> MessageScript:
    nap = _new_request(world, "sleeper", 5).with_headers({"x-resume": "1"})
    return MessageScript([nap], ((0.7, _by_operator(world, nap)), (1.2, _by_operator(world, nap))))


@recipe("operator: a refused request, resumed", deep=True, servers=True)
def _operator_revives_refused(world: FuzzState) -> MessageScript:
    refused = make_request(world, "leaf", reply_to=f"{MALLORY}.gone").with_headers(
        {"x-deadline": time.time() - 5}
    )
    resumed = (
        _by_operator(world, refused).without_header("x-deadline").with_headers({"x-resume": "1"})
    )
    return MessageScript([refused], ((0.7, resumed), (1.5, resumed)))


@recipe("an exclusive agent resumed while busy", deep=True)
def _exclusive(world: FuzzState) -> MessageScript:
    work, failed = _new_request(world, "solo", 3000), _new_request(world, "solo", -1)
    resumed = _same_request(world, failed).with_headers({"x-resume": "1"})
    return MessageScript(
        [work, failed], ((0.8, resumed), (1.5, resumed.with_headers({"x-resume": "2"})))
    )


# Questions, signals, values and status queries of tasks that wait for a person.


def _ask(world: FuzzState, agent: str = "clerk", milliseconds: int = 0) -> WireMessage:
    """A request for a task that sets a value, asks a question, and then receives a signal."""
    request = make_request(world, agent)
    body = json.loads(request.body)
    body["message"]["parts"] = [{"data": milliseconds}]
    return request.with_properties(body=json.dumps(body).encode())


def _question_of(asked: WireMessage) -> str:
    agent = asked.key.partition(".")[0]
    task_id = TaskId(str(asked.properties["correlation_id"]))
    return QuestionKey(AgentName(agent), task_id, TaskId(f"{QUESTION_PREFIX}approval.1")).to_id()


def _mail(
    world: FuzzState, kind: str, asked: WireMessage, body: dict[str, Any], **changes: Any
) -> WireMessage:
    """An answer, a signal, a read, an attach or a query for a task of the fuzzer."""
    agent, task_id = asked.key.partition(".")[0], str(asked.properties["correlation_id"])
    identity = {"question": _question_of(asked)} if kind == "complete" else {"id": task_id}
    if "rejects" in body:
        identity = {}
    content = json.dumps({**identity, **body}).encode()
    message = WireMessage(f"{agent}.resp", {}, {}, content).with_properties(
        **{**_properties(world, kind, f"{world.mark}.{new_id()}", task_id), "reply_to": REPLIES}
    )
    return message.with_properties(**changes)


_BY_EVE = {"app_id": EVE, "reply_to": f"{EVE}.replies"}
_BY_OPERATOR = {"app_id": OPERATOR, "user_id": OPERATOR, "reply_to": f"{OPERATOR}.replies"}


def _signal(world: FuzzState, asked: WireMessage, value: Any = 1, **changes: Any) -> WireMessage:
    body = {"signal": "chat", "signalId": new_id(), "value": value}
    return _mail(world, "signal", asked, body, **changes)


def _read(world: FuzzState, asked: WireMessage, **changes: Any) -> WireMessage:
    return _mail(world, "read", asked, {"key": "progress"}, **changes)


def _query(world: FuzzState, asked: WireMessage, **changes: Any) -> WireMessage:
    query = _mail(world, "attach", asked, {}, **changes)
    return query.with_headers({"x-query": world.mark})


def _to_replicas(message: WireMessage) -> WireMessage:
    """The message, sent to every replica."""
    return message.with_properties(key=message.key.replace(".resp", ".broadcast"))


for _agent in ("clerk", "teller"):

    @recipe(f"an answer and a signal for {_agent}", deep=True)
    def _answered_and_signalled(world: FuzzState, agent: str = _agent) -> MessageScript:
        asked = _ask(world, agent)
        answer = _mail(world, "complete", asked, {"value": True})
        signal = _signal(world, asked)
        other_value = signal.with_properties(
            body=signal.body.replace(b'"value": 1', b'"value": 2')
        )
        return MessageScript(
            [asked],
            (
                (0.8, _query(world, asked)),
                (0.8, _read(world, asked)),
                (0.9, _mail(world, "complete", asked, {"value": "perhaps"})),
                (0.9, _mail(world, "complete", asked, {"value": True}, **_BY_EVE)),
                (0.9, _mail(world, "attach", asked, {}, **_BY_EVE)),
                (1.0, answer),
                (1.4, answer),
                (1.4, _mail(world, "complete", asked, {"value": False})),
                (1.5, _query(world, asked)),
                (1.8, _signal(world, asked, **_BY_EVE)),
                (1.8, _read(world, asked, **_BY_EVE)),
                (1.9, signal),
                (2.0, signal),
                (2.1, other_value),
                (2.6, _signal(world, asked)),
                (2.6, _query(world, asked)),
                (2.6, _query(world, asked, **_BY_EVE)),
            ),
        )

    @recipe(f"one answer for {_agent}, many times", deep=True)
    def _answered_often(world: FuzzState, agent: str = _agent) -> MessageScript:
        asked = _ask(world, agent)
        answer = _mail(world, "complete", asked, {"value": True})
        return MessageScript(
            [asked],
            (
                *((delay, answer) for delay in (0.8, 1.6, 2.6, 4.0)),
                # now it waits for a signal
                *((delay, _query(world, asked)) for delay in (2.0, 3.5, 5.0, 6.5, 8.0)),
            ),
        )

    @recipe(f"a rejection for {_agent}, and a signal before it", deep=True)
    def _rejected(world: FuzzState, agent: str = _agent) -> MessageScript:
        asked = _ask(world, agent)
        rejection = {"rejects": _question_of(asked), "reason": world.mark}
        return MessageScript(
            [asked],
            (
                (0.8, _signal(world, asked, "not a number")),
                (1.0, _mail(world, "complete", asked, rejection)),
            ),
        )

    @recipe(f"mail for the first segment of {_agent}", deep=True)
    def _early_mail(world: FuzzState, agent: str = _agent) -> MessageScript:
        asked, other = _ask(world, agent, 1500), _ask(world, agent, 1501)
        eve = [
            *(_to_replicas(make(world, asked, **_BY_EVE)) for make in (_signal, _read, _query)),
            _to_replicas(_mail(world, "attach", asked, {}, **_BY_EVE)),
        ]
        return MessageScript(
            [asked, other],
            (
                *((0.6, message) for message in eve),
                (0.7, _mail(world, "attach", asked, {})),
                (0.8, _query(world, asked)),
                (0.8, _read(world, asked)),
                (0.9, _mail(world, "complete", asked, {"value": True})),
                (1.0, _signal(world, asked)),
                (0.8, _read(world, other)),
                (0.6, _mail(world, "attach", other, {})),
                (0.9, _mail(world, "attach", other, {})),
            ),
        )

    @recipe(f"mail by broadcast for a waiting {_agent}", deep=True)
    def _broadcast_mail(world: FuzzState, agent: str = _agent) -> MessageScript:
        asked = _ask(world, agent)
        mail = [
            _mail(world, "attach", asked, {}),
            *(make(world, asked) for make in (_query, _read, _signal)),
            _mail(world, "complete", asked, {"value": True}),
        ]
        late = [_mail(world, "attach", asked, {}), _query(world, asked)]
        return MessageScript(
            [asked],
            (
                *((1.0, _to_replicas(message)) for message in mail),
                *((1.6, _to_replicas(message)) for message in late),
            ),
        )

    @recipe(f"operator: mail for {_agent}", deep=True, servers=True)
    def _operator_mail(world: FuzzState, agent: str = _agent) -> MessageScript:
        asked = _ask(world, agent)
        return MessageScript(
            [asked],
            (
                (0.8, _read(world, asked, **_BY_OPERATOR)),
                (0.9, _mail(world, "complete", asked, {"value": True}, **_BY_OPERATOR)),
                (1.0, _signal(world, asked, **_BY_OPERATOR)),
            ),
        )


@recipe("attaches to tasks that run", deep=True)
def _attach_to_running(world: FuzzState) -> MessageScript:
    naps = [_new_request(world, agent, 2500) for agent in ("diary", "dozer")]
    attaches = [_mail(world, "attach", nap, {}) for nap in naps]
    mail = [*attaches, *(_signal(world, nap) for nap in naps)]
    return MessageScript(naps, tuple((delay, each) for delay in (0.5, 1.0, 1.8) for each in mail))


@recipe("attaches from more addresses than a task can have", deep=True)
def _attach_from_many_addresses(world: FuzzState) -> MessageScript:
    asked, nap = _ask(world), _new_request(world, "diary", 2500)
    addresses = [REPLIES, *(f"{MALLORY}.private.{new_id()}" for _ in range(5))]
    attaches = [
        _mail(world, "attach", each, {}, reply_to=address).with_headers({"x-snapshot": 1})
        for address in addresses
        for each in (asked, nap)
    ]
    repeated = [_same_request(world, nap, reply_to=address) for address in addresses]
    return MessageScript(
        [asked, nap],
        tuple((delay, each) for delay in (0.5, 1.5) for each in (*attaches, *repeated)),
    )


@recipe("attaches to a task whose reply has to wait", deep=True)
def _attach_to_unsent(world: FuzzState) -> MessageScript:
    request = make_request(world, "spark", reply_to=FULL_QUEUE)
    attach = _mail(world, "attach", request, {})
    return MessageScript([request], tuple((delay, attach) for delay in (0.5, 1.0, 1.8)))


@recipe("mail for a locked task", deep=True, servers=True)
def _locked_mail(world: FuzzState) -> MessageScript:
    asked = _ask(world, milliseconds=1)  # the row appears, and is locked, when the task waits
    hold = RowLock(str(asked.properties["correlation_id"]), 4.0, delay=1.0)
    return MessageScript(
        [asked],
        (
            (2.6, _mail(world, "attach", asked, {})),
            (2.6, _mail(world, "complete", asked, {"value": True})),
            (2.8, _same_request(world, asked, reply_to=f"{MALLORY}.private.{world.mark}")),
            *((2.8, _signal(world, asked)) for _ in range(4)),  # some wait behind another
        ),
        row_lock=hold,
    )


@recipe("mail for a cancelled task, and for one of another agent", deep=True)
def _useless_mail(world: FuzzState) -> list[WireMessage]:
    asked, other = _ask(world), make_request(world, "leaf")
    cancel = make_cancel(world, "clerk", str(asked.properties["correlation_id"]))
    elsewhere = [
        make(world, other).with_properties(key="clerk.resp") for make in (_query, _read, _signal)
    ]
    mail = [_query(world, asked), _signal(world, asked), _query(world, asked, **_BY_EVE)]
    return [cancel, *mail, other, *elsewhere]


@recipe("a flood of queries and attaches", deep=True, reaches=("search",))
def _many_queries(world: FuzzState) -> list[WireMessage]:
    unknown = [_ask(world, "teller") for _ in range(100)]
    return [
        make
        for each in unknown
        for make in (_mail(world, "attach", each, {}), _query(world, each))
    ]


@recipe("queries for tasks that sleep, or wait for a peer", deep=True)
def _queries_of_waits(world: FuzzState) -> MessageScript:
    asleep, calling = _ask(world, milliseconds=2), make_request(world, "asker")
    return MessageScript(
        [asleep, calling],
        tuple(
            (delay, _query(world, each))
            for delay in (0.4, 1.0, 1.8, 2.6)
            for each in (asleep, calling)
        ),
    )


@recipe("a signal with an invalid name", deep=True)
def _signal_with_invalid_name(world: FuzzState) -> WireMessage:
    return make_signal(world, {"signal": world.rng.choice(("a b", "", "x" * 300, "~?a"))})


@recipe("a signal that is too long", deep=True)
def _long_signal(world: FuzzState) -> WireMessage:
    """Short in its message, and long as it is stored: `1e15` becomes `1000000000000000.0`."""
    signal = _signal(world, _ask(world), [])
    numbers = b"[" + b", ".join([b"1e15"] * 30_000) + b"]"
    return signal.with_properties(body=signal.body.replace(b"[]", numbers))


@recipe("queries of two senders for one task", deep=True, reaches=("answer_and_broadcast",))
def _queries_of_two_senders(world: FuzzState) -> MessageScript:
    asked = _ask(world)
    queries = (_query(world, asked), *[_query(world, asked, **_BY_EVE)] * 3)
    return MessageScript([asked], tuple((delay, each) for delay in (0.8, 1.4) for each in queries))


@recipe("queries for tasks behind a crowd", deep=True, reaches=("_conclude",))
def _queries_behind_a_crowd(world: FuzzState) -> list[WireMessage]:
    naps = [
        _new_request(world, "sleeper", 300, task_id=f"{world.mark}-c{number}")
        for number in range(40)
    ]
    unknown = [make_request(world, "sleeper") for _ in range(4)]
    return [*naps, *(_query(world, each) for each in unknown)]


@recipe("early answers", deep=True, reaches=("_explain_unasked",))
def _early_answers(world: FuzzState) -> MessageScript:
    """While the first segment runs, and while the task sleeps before it asks."""
    running, asleep = _ask(world, milliseconds=1501), _ask(world, milliseconds=2)
    answers = [_mail(world, "complete", each, {"value": True}) for each in (running, asleep)]
    return MessageScript(
        [running, asleep], tuple((delay, each) for delay in (0.7, 1.0, 1.2) for each in answers)
    )


def _from_elsewhere(world: FuzzState, message: WireMessage, number: int = 0) -> WireMessage:
    """The same request, from another private queue."""
    return _same_request(world, message, reply_to=f"{MALLORY}.private.{world.mark}{number}")


@recipe("copies of a running nap", deep=True, reaches=("_add_repeated",))
def _copies_of_running(world: FuzzState) -> MessageScript:
    nap, quiet = _new_request(world, "sleeper", 1500), _new_request(world, "sleeper", 1501)
    quiet = quiet.with_properties(reply_to=None)
    copies = [
        _same_request(world, nap),
        *(_from_elsewhere(world, nap, number) for number in (1, 1, 2, 3, 4, 5, 6, 7)),
        _same_request(world, quiet),
    ]
    return MessageScript(
        [nap, quiet], tuple((delay, each) for delay in (0.3, 0.8) for each in copies)
    )


@recipe("copies of a nap as it ends in a process", deep=True, reaches=("_add_repeated",))
def _copies_of_ending_in_process(world: FuzzState) -> MessageScript:
    nap = _new_request(world, SWITCHED_OFF, 200)
    copy = _from_elsewhere(world, nap)
    return MessageScript([nap], tuple((0.15 + number / 100, copy) for number in range(20)))


@recipe("copies of a task that waits in a process", deep=True, reaches=("_add_repeated",))
def _copies_of_in_process_task(world: FuzzState) -> MessageScript:
    asked = _ask(world, "teller")
    copies = [_from_elsewhere(world, asked, number) for number in (1, 2, 3)]
    return MessageScript([asked], tuple((delay, each) for delay in (0.5, 1.2) for each in copies))


@recipe(
    "mail for a task whose agent keeps it in memory",
    deep=True,
    reaches=("Completions._record", "answer_and_broadcast"),
)
def _mail_in_memory(world: FuzzState) -> MessageScript:
    """Its agent has a database for earlier tasks."""
    nap = _new_request(world, SWITCHED_OFF, 1500)
    mail = [
        _mail(world, "complete", nap, {"value": True}),
        _query(world, nap),
        _signal(world, nap),
    ]
    return MessageScript([nap], tuple((delay, each) for delay in (0.4, 0.8) for each in mail))


for _what, _delays in {
    "runs": (0.4, 0.7, 1.0),
    "has paused, and runs again": (5.3, 5.6, 5.9, 6.2),
}.items():

    @recipe(f"starts of a task that {_what}", deep=True, reaches=("_add_start",))
    def _starts_while_it_runs(
        world: FuzzState, delays: tuple[float, ...] = _delays
    ) -> MessageScript:
        started = _ask(world, "clerk", 1502).with_headers({"x-start": "token"})
        copies = [
            _same_request(world, started),
            _from_elsewhere(world, started),
            _same_request(world, started).with_headers({"x-start": new_id()}),
        ]
        return MessageScript(
            [started], tuple((delay, each) for delay in delays for each in copies)
        )


@recipe(
    "a request that starts later in a process",
    deep=True,
    reaches=("_begin_delayed", "keep_until_start"),
)
def _starts_later_in_process(world: FuzzState) -> WireMessage:
    return make_request(world, "spark").with_headers({"x-start-at": time.time() + 1})


@recipe("a sleeping task, resumed from elsewhere", deep=True, reaches=("with_requester",))
def _resumed_from_elsewhere(world: FuzzState) -> MessageScript:
    asleep = _ask(world, "clerk", 2)
    resumed = _from_elsewhere(world, asleep).with_headers({"x-resume": "1"})
    return MessageScript([asleep], ((1.0, resumed), (1.5, resumed)))


# Requests that the broker has delivered before, and rows locked by a second session.


@recipe("copies of a delayed request", deep=True, servers=True, reaches=("_begin_delayed",))
def _copies_of_delayed(world: FuzzState) -> MessageScript:
    """Both replicas insert its row at the same time."""
    later = make_request(world, world.rng.choice(("leaf", "sleeper")))
    later = later.with_headers({"x-start-at": time.time() + 3})
    copies = [later, later, _from_elsewhere(world, later), _from_elsewhere(world, later)]
    return MessageScript(copies, row_lock=_lock_before_insert(later))


@recipe("starts at once", deep=True, servers=True, reaches=("_settle_not_begun",))
def _starts_at_once(world: FuzzState) -> MessageScript:
    nap = _new_request(world, "sleeper", 5)
    starts = [_same_request(world, nap).with_headers({"x-start": each}) for each in "aabb"]
    return MessageScript(starts, row_lock=_lock_before_insert(nap))


@recipe("copies of a nap that begins", deep=True, servers=True, reaches=("_add_repeated",))
def _copies_of_beginning(world: FuzzState) -> MessageScript:
    nap = _new_request(world, "sleeper", 5)
    copy = _from_elsewhere(world, nap)
    return MessageScript(
        [nap.with_headers({"x-resume": "1"})],
        tuple((delay, copy) for delay in (0.1, 0.15, 0.2, 0.25)),
        row_lock=_lock_before_insert(nap),
    )


@recipe(
    "copies of a nap that ends, and attaches to it",
    deep=True,
    servers=True,
    reaches=("_add_repeated", "_attach_here"),
)
def _copies_of_ending(world: FuzzState) -> MessageScript:
    nap = _new_request(world, "sleeper", 300)
    attach = _mail(world, "attach", nap, {}).with_headers({"x-snapshot": 1})
    later = (_from_elsewhere(world, nap), attach, _to_replicas(attach))
    hold = RowLock(str(nap.properties["correlation_id"]), 1.5, before_insert=True)
    return MessageScript(
        [nap], tuple((delay, each) for delay in (0.7, 1.0, 1.2) for each in later), row_lock=hold
    )


@recipe("attaches to a task that has sent a status", deep=True, reaches=("_attach_here",))
def _attaches_with_snapshot(world: FuzzState) -> MessageScript:
    work = _new_request(world, "diary", 2500)
    attach = _mail(world, "attach", work, {}).with_headers({"x-snapshot": 1})
    return MessageScript([work], tuple((delay, attach) for delay in (0.8, 1.4, 2.0)))


@recipe("a crowd of worn requests", deep=True, servers=True)
def _redelivered_requests(world: FuzzState) -> MessageScript:
    naps = [
        _new_request(world, "sleeper", 300, task_id=f"{world.mark}-w{number}")
        for number in range(28)
    ]
    return MessageScript(naps, redeliveries=1)


for _turn in range(2):

    @recipe(f"a worn request without a database, {_turn}", deep=True, servers=True)
    def _worn_out(world: FuzzState) -> MessageScript:
        return MessageScript([make_request(world, "spark")], redeliveries=6)

    @recipe(f"worn copies of one request, {_turn}", deep=True, servers=True)
    def _worn_copies(world: FuzzState) -> MessageScript:
        nap = _new_request(world, "sleeper", 5)
        copies = [
            nap,
            _same_request(world, nap),
            _same_request(world, nap),
            _same_request(world, nap),
        ]
        return MessageScript(copies, redeliveries=1, row_lock=_lock_before_insert(nap))

    @recipe(f"worn copies of two requesters, {_turn}", deep=True, servers=True)
    def _worn_strangers(world: FuzzState) -> MessageScript:
        nap = _new_request(world, "sleeper", 5)
        other = _same_request(world, nap, app_id=EVE, reply_to=f"{EVE}.replies")
        return MessageScript(
            [nap, other, nap, other], redeliveries=1, row_lock=_lock_before_insert(nap)
        )

    @recipe(f"resumed requests at once, {_turn}", deep=True, servers=True)
    def _resumed_at_once(world: FuzzState) -> MessageScript:
        nap = _new_request(world, "sleeper", 5)
        copies = [
            _same_request(world, nap).with_headers({"x-resume": order})
            for order in ("1", "2", "1", "2")
        ]
        return MessageScript(copies, row_lock=_lock_before_insert(nap))

    @recipe(f"a cancel before the resumed request, {_turn}", deep=True, servers=True)
    def _cancel_just_before(world: FuzzState) -> MessageScript:
        nap = _new_request(world, "sleeper", 5).with_headers({"x-resume": "1"})
        cancel = make_cancel(world, "sleeper", str(nap.properties["correlation_id"]))
        return MessageScript(
            [cancel, cancel], ((0.15, nap), (0.15, nap)), row_lock=_lock_before_insert(nap)
        )

    @recipe(f"copies of a running request, {_turn}", deep=True, servers=True)
    def _copies_at_work(world: FuzzState) -> MessageScript:
        work = _new_request(world, "diary", 1500)
        copy = _same_request(world, work)
        return MessageScript([work], ((0.5, copy), (0.6, copy), (0.7, copy), (0.8, copy)))

    @recipe(f"a request resumed as it begins, {_turn}", deep=True, servers=True)
    def _as_it_begins(world: FuzzState) -> MessageScript:
        work = _new_request(world, "diary", 5)
        resumed = _same_request(world, work).with_headers({"x-resume": "1"})
        return MessageScript(
            [work],
            ((0.15, resumed), (0.16, resumed), (0.17, resumed)),
            row_lock=_lock_before_insert(work),
        )

    @recipe(f"a copy while the reply is sent, {_turn}", deep=True, servers=True)
    def _while_settling(world: FuzzState) -> MessageScript:
        nap = _new_request(world, "sleeper", 500).with_headers({"x-resume": "1"})
        copy = _same_request(world, nap)
        hold = RowLock(str(nap.properties["correlation_id"]), 1.0, delay=0.3)
        later = tuple((seconds, copy) for seconds in (0.1, 0.2, 0.8, 0.85, 0.95, 1.05))
        return MessageScript([nap], later, row_lock=hold)

    @recipe(f"a response for a locked task, {_turn}", deep=True, servers=True)
    def _response_to_locked_task(world: FuzzState) -> MessageScript | None:
        call = _durable_call(world)
        if call is None:
            return None
        return MessageScript(
            [make_response(world, call)],
            row_lock=RowLock(str(call.headers["x-parent-task-id"]), 3.0),
        )

    @recipe(f"a cancel of a locked task, {_turn}", deep=True, servers=True)
    def _cancel_of_locked_task(world: FuzzState) -> MessageScript | None:
        call = _durable_call(world)
        if call is None:
            return None
        task_id = str(call.headers["x-parent-task-id"])
        return MessageScript(
            [make_cancel(world, "asker", task_id)], row_lock=RowLock(task_id, 3.0)
        )


def _lock_before_insert(message: WireMessage) -> RowLock:
    return RowLock(str(message.properties["correlation_id"]), 0.5, before_insert=True)


def _durable_call(world: FuzzState) -> WireMessage | None:
    for call in world.open_calls:
        if call.properties.get("app_id") == "asker":
            world.open_calls.remove(call)
            return call
    return None


for _what in (
    "request: another id in the body",
    "request: body over the limit",
    "peer: a status that ends",
    "peer: not final",
    "peer: of another sender",
    "peer: without a parent",
    "request: deadline past",
    "peer: unreadable",
    "peer: a status without a parent",
    "own cancel before the request",
    "cancel of a task not requested yet",
    "request after its cancel",
):
    DEEP.add(_what)

_DEEP_METADATA = ("team", "scopes", "configuration")
_ASKED_AGAIN = ("leaf", "sleeper", "asker")
_REACHED_BY_RECIPE: dict[str, tuple[str, ...]] = {
    **{f"metadata with a wrong deep {each}": ("parse_request",) for each in _DEEP_METADATA},
    **{f"operator: request again, {each}, 0 back": ("attach_sender",) for each in _ASKED_AGAIN},
    "peer: of a name that only waits have": ("parse_claim",),
    "attach without an address": ("parse_attach",),
    "signal for another address": ("identify_signaller",),
    "attach for another address": ("identify_attacher",),
    "a refusal of another request": ("_drop_unrelated_refusals", "_request_fingerprint"),
    "a status without a listener": ("_build_forwarded_statuses",),
    "attach to the task of another": ("attach_and_broadcast",),
    "answer for another address": ("Completions._identify",),
    "answer that is also a rejection": ("Completions._parse",),
    "an answer and a signal for clerk": (
        "Completions._answer",
        "Signals._finish",
        "Signals._read",
        "_explain_unasked",
        "attach_and_broadcast",
    ),
    "a rejection for clerk, and a signal before it": ("_build_outcome",),
    "a signal with an invalid name": ("_check_names", "_parse_signal"),
    "odd signal": ("_check_names", "_parse_signal"),
    "signal that is nested too deep": ("_parse_signal",),
    "a signal that is too long": ("Signals._signal",),
    "mail for the first segment of clerk": ("Signals._read", "_read_here"),
    "mail for the first segment of teller": ("Signals._read", "_read_here"),
    "worn copies of two requesters, 0": ("settle_id_conflict",),
    "a cancel before the resumed request, 0": ("_settle_not_begun",),
    "mail for a locked task": ("handle_signals", "handle_completions", "attempt"),
}
REACHES.update(_REACHED_BY_RECIPE)

_REPEATED_RECIPES = (
    "mail for a locked task",
    "signal of an odd sender",
    "a cancel before the resumed request, 0",
    "a call depth of 1.5",
    "a failed task that is resumed",
    "a flood of statuses",
    "a refusal of another request",
    "a response for a locked task, 0",
    "a status without a listener",
    "a worn request without a database, 0",
    "an exclusive agent resumed while busy",
    "an id that only a resumed call may have",
    "operator: a failed task of diary, resumed",
    "own cancel of a running task",
    "peer: a status that ends",
    "peer: of another sender",
    "request: another id in the body",
    "worn copies of one request, 0",
    "worn copies of two requesters, 0",
)
"""Recipes without which certain branches are not reached, and which do not always reach them."""

for _what in _REPEATED_RECIPES:
    for _turn in range(2):
        _again_ = f"{_what}, once more {_turn}"
        RECIPES[_again_] = RECIPES[_what]
        DEEP.add(_again_)
        if _what in ON_SERVERS:
            ON_SERVERS.add(_again_)
