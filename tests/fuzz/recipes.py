"""Recipes for mutated messages: valid but for one change, so that most pass the first checks."""

from __future__ import annotations

import json
import random
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from meshpoint.model.ids import new_id

from .amqp import Letter, Raw, Value, table
from .mesh import AGENTS, DURABLE, IN_PROCESS, LARGEST, OPERATOR

ME = "mallory"
EVIL = "evil"
REPLIES = f"{ME}.replies"
FULL = f"{ME}.full"
KINDS = ("request", "response", "status", "cancel", "wake")


ANSWERED = "answered request"
"""Honest requests that were answered.

Until a replica has read a request, another one may take its id.
"""
_REMEMBERED = 5000
FORGED_RESULT = 666
"""Result that forged answers carry."""


@dataclass(frozen=True)
class Hold:
    """A lock held by a second database session meanwhile: on a task's row, or on a task id.

    An id is held by inserting its row in a transaction that is rolled back later.
    """

    task_id: str
    seconds: float
    after: float = 0.0
    unborn: bool = False


@dataclass(frozen=True)
class Scene:
    """Messages with one mark, and what happens around them.

    Each of `later` has its delay in seconds. `worn`: delivery count that the broker must reach
    before a replica gets `letters`.
    """

    letters: list[Letter]
    later: tuple[tuple[float, Letter], ...] = ()
    worn: int = 0
    hold: Hold | None = None

    @property
    def all(self) -> list[Letter]:
        """Every message, in order."""
        return [*self.letters, *(letter for _, letter in self.later)]


@dataclass
class World:
    """What the fuzzer knows about the mesh: observed traffic and its own messages."""

    chance: random.Random
    seen: dict[str, deque[Letter]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=200)))
    privates: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    asked: dict[str, deque[Letter]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=60)))
    mine: dict[str, deque[str]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=60)))
    calls: deque[Letter] = field(default_factory=lambda: deque(maxlen=200))
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    mark: str = "fz-0000000"
    napping: str = ""  # id of a task that has a row and runs for a while
    # ids of tasks whose requester wants no reply
    quiet: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    quiet_calls: deque[Letter] = field(default_factory=lambda: deque(maxlen=20))

    def asked_me(self, call: Letter) -> None:
        """Record a request to the peer that the fuzzer plays."""
        quiet = call.headers.get("x-parent-task-id") in self.quiet
        (self.quiet_calls if quiet else self.calls).append(call)

    unanswered: OrderedDict[str, Letter] = field(default_factory=OrderedDict)

    def passed(self, kind: str, letter: Letter) -> None:
        """Record an observed honest message."""
        self.seen[kind].append(letter)
        task_id = str(letter.properties.get("correlation_id"))
        if kind == "request":
            self.unanswered[task_id] = letter
            if len(self.unanswered) > _REMEMBERED:
                self.unanswered.popitem(last=False)
        elif kind == "response" and (asked := self.unanswered.pop(task_id, None)):
            self.seen[ANSWERED].append(asked)

    def some(self, kind: str) -> Letter | None:
        """A random observed honest message of `kind`."""
        found = self.seen[kind]
        return self.chance.choice(found) if found else None

    def call(self) -> Letter | None:
        """The oldest open call from an honest agent to the peer that the fuzzer plays."""
        return self.calls.popleft() if self.calls else None


@dataclass
class Cook:
    """Chooses recipes rank by rank; each recipe of a rank is used once before any is repeated."""

    world: World
    names: list[str]
    _lines: list[list[str]] = field(default_factory=lambda: [[], [], []])
    made: int = 0

    def next(self) -> tuple[str, Scene] | None:
        """A recipe's name and its marked messages, or None when the recipe lacks material."""
        rank = self.made % 3
        line = self._lines[rank]
        if not line:
            line += [name for name in self.names if _rank(name) == rank] or list(self.names)
            self.world.chance.shuffle(line)
        name = line.pop()
        self.made += 1
        self.world.mark = f"fz-{self.made:07}"
        made = RECIPES[name](self.world)
        if not made:
            return None
        scene = made if isinstance(made, Scene) else Scene([made] if isinstance(made, Letter) else made)
        for letter in scene.all:
            self._remember(letter)
        return name, scene

    def _remember(self, letter: Letter) -> None:
        agent, _, kind = letter.key.partition(".")
        properties, named = letter.properties, str(letter.properties.get("correlation_id", "")).startswith("fz-")
        # otherwise the broker closes the connection
        sound = letter.raw_headers is None and "user_id" not in properties
        if (
            kind == "req"
            and named
            and sound
            and properties.get("app_id") == ME
            and properties.get("type") == "request"
        ):
            self.world.asked[agent].append(letter)


def _rank(name: str) -> int:
    return 2 if name in DEEP else 1 if name in SPECIAL else 0


Recipe = Callable[[World], Letter | list[Letter] | Scene | None]
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
CLOSING: set[str] = set()
"""Recipes that can make the broker close the connection; sent rarely, on a separate connection."""


def recipe(
    name: str, *, forged: bool = False, closing: bool = False, deep: bool = False, servers: bool = False
) -> Callable[[Recipe], Recipe]:
    """Register a recipe under `name`."""

    def enter(make: Recipe) -> Recipe:
        RECIPES[name] = make
        SPECIAL.add(name)
        if deep:
            DEEP.add(name)
        if forged:
            FORGED.add(name)
        if closing:
            CLOSING.add(name)
        if servers:
            ON_SERVERS.add(name)
        return make

    return enter


def an_input(world: World, agent: str) -> Any:
    """Valid input for `agent`."""
    number = world.chance.randrange(10**6)
    match agent:
        case "root" | "light":
            return {"number": number, "rounds": 1}
        case "leaf" | "spark":
            return {"number": number, "round": 0, "index": 0}
        case "sleeper" | "solo" | "diary":
            return world.chance.choice((0, 5, 300, 1500))
        case _:
            return number


def a_request(world: World, agent: str | None = None, task_id: str | None = None, **changes: Any) -> Letter:
    """A valid request."""
    agent = agent or world.chance.choice(("leaf", "spark", "leaf", "spark", "sleeper", "asker", "doubter"))
    task_id = task_id or f"{world.mark}-{new_id()}"
    body = {
        "message": {
            "messageId": world.mark,
            "role": "ROLE_AGENT",
            "parts": [{"data": an_input(world, agent)}],
            "contextId": "fuzz",
            "taskId": task_id,
        },
        "metadata": {"userId": "u", "sessionId": "s", "userConfig": {"a": 1}, "securityContext": {}, "team": "red"},
    }
    world.mine[agent].append(task_id)
    letter = Letter(f"{agent}.req", {}, {"x-call-depth": 0}, json.dumps(body).encode())
    return letter.but(
        **{**_properties(world, "request", task_id, task_id), "reply_to": REPLIES, **changes},
    )


def _properties(world: World, kind: str, message_id: str, task_id: str) -> dict[str, Any]:
    return {
        "content_type": "application/json",
        "delivery_mode": 2,
        "message_id": message_id if world.mark in message_id else f"{world.mark}.{message_id}"[:255],
        "correlation_id": task_id,
        "app_id": ME,
        "type": kind,
        "timestamp": int(time.time()),
    }


def a_response(world: World, call: Letter, state: str = "COMPLETED", value: Any = None, **changes: Any) -> Letter:
    """A response from the called peer."""
    task_id = str(call.properties["correlation_id"])
    part = {"data": {"answer": 1} if value is None else value} if state == "COMPLETED" else {"text": "no"}
    message = {"messageId": world.mark, "role": "ROLE_AGENT", "parts": [part]}
    usage = {"total": {"input": 1, "output": 1, "cached": 0}}
    status = {"state": f"TASK_STATE_{state}", "message": message, "timestamp": "2026-01-01T00:00:00+00:00"}
    task = {
        "id": task_id,
        "contextId": "c",
        "status": status,
        "artifacts": [{"artifactId": "a"}],
        "metadata": {"usage": usage},
    }
    return _back(world, call, "response", {"task": task}, **changes)


def a_status(world: World, call: Letter, **changes: Any) -> Letter:
    """A status update from the called peer."""
    task_id = str(call.properties["correlation_id"])
    message = {"messageId": world.mark, "role": "ROLE_AGENT", "parts": [{"data": {"percent": 40}}]}
    status = {"state": "TASK_STATE_WORKING", "message": message}
    return _back(world, call, "status", {"statusUpdate": {"taskId": task_id, "status": status}}, **changes)


def _back(world: World, call: Letter, kind: str, content: Any, **changes: Any) -> Letter:
    task_id = str(call.properties["correlation_id"])
    letter = Letter(str(call.properties["reply_to"]), {}, {}, json.dumps(content).encode())
    if parent := call.headers.get("x-parent-task-id"):
        letter = letter.with_headers({"x-parent-task-id": parent})
    return letter.but(**{**_properties(world, kind, world.mark, task_id), "app_id": EVIL, **changes})


def a_cancel(world: World, agent: str | None = None, task_id: str | None = None, **changes: Any) -> Letter:
    """A cancel of a task that the fuzzer requested."""
    agent = agent or world.chance.choice((*DURABLE, *IN_PROCESS))
    mine = world.mine[agent]
    task_id = task_id or (world.chance.choice(mine) if mine else f"{world.mark}-{new_id()}")
    body = json.dumps({"id": task_id, "reason": world.mark}).encode()
    letter = Letter(f"{agent}.resp", {}, {}, body)
    return letter.but(**{**_properties(world, "cancel", world.mark, task_id), **changes})


def valid(world: World, kind: str) -> Letter | None:
    """A valid message of `kind`."""
    match kind:
        case "request":
            return a_request(world)
        case "response":
            call = world.call()
            return a_response(world, call, world.chance.choice(("COMPLETED", "FAILED", "CANCELED"))) if call else None
        case "status":
            return a_status(world, world.calls[0]) if world.calls else None
        case "cancel":
            return a_cancel(world)
        case _:
            wake = Letter(f"{world.chance.choice(AGENTS)}.broadcast", {}, {}, b"{}")
            return wake.but(**_properties(world, "wake", world.mark, world.mark))


# Valid messages with one invalid property.

_TEXTS: dict[str, bytes] = {
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
_NAMED = (
    "message_id",
    "correlation_id",
    "app_id",
    "reply_to",
    "type",
    "content_type",
    "content_encoding",
    "cluster_id",
)


def _property(kind: str, name: str, text: bytes | None) -> Recipe:
    def make(world: World) -> Letter | None:
        letter = valid(world, kind)
        changes: dict[str, Any] = {name: text}
        return letter and letter.but(**changes)

    return make


for _kind in KINDS[:4]:
    for _name in _NAMED:
        RECIPES[f"{_kind}: no {_name}"] = _property(_kind, _name, None)
        for _what, _text in _TEXTS.items():
            if _name in _NAMED[:5] or _what in {"not utf-8", "longest"}:
                RECIPES[f"{_kind}: {_name} {_what}"] = _property(_kind, _name, _text)

for _stamp in (0, -1, 2**31, 2**32, 253402300800, 10**13, 2**62, 2**63, 2**64 - 1):

    @recipe(f"timestamp {_stamp}")
    def _timestamp(world: World, stamp: int = _stamp) -> Letter | None:
        letter = valid(world, world.chance.choice(KINDS))
        return letter and letter.but(timestamp=stamp)


# Headers: each known header with each type and many values, unknown headers, arbitrary bytes as
# keys.


def _deep(depth: int, of: bytes) -> bytes:
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
    "deep 100": Raw(_deep(100, b"F")[:1], _deep(100, b"F")[1:]),
    "deep 900": Raw(_deep(900, b"F")[:1], _deep(900, b"F")[1:]),
    "deep 5000": Raw(_deep(5000, b"A")[:1], _deep(5000, b"A")[1:]),
}
_FOR = {
    "request": _HEADERS,
    "response": ("x-parent-task-id", "x-dead-reason"),
    "status": ("x-parent-task-id",),
    "cancel": ("x-parent-task-id",),
}


def _header(kind: str, name: str | bytes, value: Value) -> Recipe:
    def make(world: World) -> Letter | None:
        letter = valid(world, kind)
        return letter and letter.with_headers({name: value})

    return make


for _kind, _names in _FOR.items():
    for _name in _names:
        for _what, _value in _VALUES.items():
            RECIPES[f"{_kind}: {_name} {_what}"] = _header(_kind, _name, _value)

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
            RECIPES[f"{_kind}: header key {_what}, {_value_name}"] = _header(_kind, _key, _VALUES[_value_name])

for _depth in (1, 10, 64, 128, 500, 900, 1000):
    for _of in (b"F", b"A"):
        for _kind in KINDS:
            RECIPES[f"{_kind}: nested {_of.decode()} {_depth}"] = _header(
                _kind, "x-nested", Raw(_of, _deep(_depth, _of)[1:])
            )

for _room in (131_064, 131_063, 131_000, 130_920, 130_500, 126_976, 65_536):
    for _kind in KINDS:

        @recipe(f"{_kind}: header frame {_room}")
        def _frame(world: World, room: int = _room, kind: str = _kind) -> Letter | None:
            letter = valid(world, kind)
            if letter is None:
                return None
            letter = letter.with_headers({"x-pad": ""})
            pad = room - len(letter.header_payload())
            return letter.with_headers({"x-pad": "p" * pad})


@recipe("request: traceparent to be copied")
def _traceparent(world: World) -> Letter:
    return a_request(world, world.chance.choice(("asker", "doubter"))).with_headers({"traceparent": "t" * 120_000})


@recipe("request: many headers")
def _many(world: World) -> Letter:
    return a_request(world).with_headers({f"k{number}": number for number in range(3000)})


@recipe("request: doubled headers")
def _doubled(world: World) -> Letter:
    letter = a_request(world)
    one = table({"x-call-depth": 1, "x-deadline": 1})[4:]
    raw = one + table({"x-call-depth": "2", "x-deadline": 9e99})[4:]
    return Letter(letter.key, letter.properties, {}, letter.body, len(raw).to_bytes(4, "big") + raw)


for _what, _raw in {
    "no number": table({"x-deadline": float("nan")}),
    "infinity": table({"x-deadline": float("inf")}),
    "unknown tag": table({"k": Raw(b"Q", b"1234")}),
    "length beyond": b"\0\0\0\x20\x01kS\0\0\xff\xff",
    "cut": table({"k": "value"})[:-3],
    "key beyond": b"\0\0\0\x05\xffabcd",
    "array beyond": table({"k": Raw(b"A", b"\0\0\xff\xff")}),
    "short value": table({"k": Raw(b"l", b"\0\0")}),
}.items():

    @recipe(f"request: table with {_what}", closing=True)
    def _broken(world: World, raw: bytes = _raw) -> Letter:
        letter = a_request(world)
        return Letter(letter.key, letter.properties, {}, letter.body, raw)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


def _put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is _GONE:
        del copy[path[0]]
    else:
        copy[path[0]] = _put(copy[path[0]], path[1:], new)
    return copy


_GONE = object()
_WRONG: tuple[Any, ...] = (
    _GONE,
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
_WRONG += ({"text": 5}, "TASK_STATE_WORKING", "TASK_STATE_COMPLETED", "ROLE_NOBODY", {"a": {"b": [1] * 50}})


def _wrong_at(kind: str) -> Recipe:
    def make(world: World) -> Letter | None:
        letter = valid(world, kind)
        if letter is None:
            return None
        body = json.loads(letter.body)
        path = world.chance.choice([each for each in _paths(body) if each] or [()])
        return letter.but(body=json.dumps(_put(body, path, world.chance.choice(_WRONG))).encode())

    return make


def _body(kind: str, change: Callable[[World, bytes], bytes]) -> Recipe:
    def make(world: World) -> Letter | None:
        letter = valid(world, kind)
        return letter and letter.but(body=change(world, letter.body))

    return make


def _nest(opened: bytes, closed: bytes, depth: int) -> Callable[[World, bytes], bytes]:
    return lambda _, body: body.replace(
        b'"data": ', b'"data": ' + opened * depth + b"1" + closed * depth + b', "x": ', 1
    )


def _flipped(world: World, body: bytes) -> bytes:
    flipped = bytearray(body)
    for _ in range(world.chance.randrange(1, 4)):
        if flipped:
            flipped[world.chance.randrange(len(flipped))] = world.chance.randrange(256)
    return bytes(flipped)


_BODIES: dict[str, Callable[[World, bytes], bytes]] = {
    "empty": lambda *_: b"",
    "null": lambda *_: b"null",
    "number": lambda *_: b"12",
    "list": lambda _, body: b"[" + body + b"]",
    "cut": lambda world, body: body[: world.chance.randrange(max(len(body), 1))],
    "flipped": _flipped,
    "utf-16": lambda _, body: body.decode(errors="replace").encode("utf-16"),
    "latin-1": lambda _, body: body.replace(b"ROLE_AGENT", b"ROLE_AG\xcbNT"),
    "bom": lambda _, body: b"\xef\xbb\xbf" + body,
    "trailing": lambda _, body: body + b"{}",
    "zero bytes": lambda _, body: body + b"\0" * 100,
    "nan": lambda _, body: body.replace(b": 1", b": NaN", 1),
    "infinity": lambda _, body: body.replace(b'"data": ', b'"data": -Infinity, "x": ', 1),
    "huge integer": lambda _, body: body.replace(b'"data": ', b'"data": ' + b"9" * 5000 + b', "x": ', 1),
    "far float": lambda _, body: body.replace(b'"data": ', b'"data": 1e999999, "x": ', 1),
    "surrogate": lambda _, body: body.replace(b'"data": ', b'"data": "\\ud800", "x": ', 1),
    "escaped zero": lambda _, body: body.replace(b'"data": ', b'"data": "\\u0000", "x": ', 1),
    "surrogate key": lambda _, body: body.replace(b'"data": ', b'"data": {"\\udfff": 1}, "x": ', 1),
    "doubled key": lambda _, body: body[:1] + body[1:-1] + b", " + body[1:],
    "deep 100": _nest(b"[", b"]", 100),
    "deep 190": _nest(b'{"a":', b"}", 190),
    "deep 250": _nest(b"[", b"]", 250),
    "deep 5000": _nest(b'{"a":', b"}", 5000),
    "deep open": _nest(b"[", b"", 20_000),
    "at the limit": lambda _, body: body + b" " * (LARGEST - len(body)),
    "over the limit": lambda _, body: body + b" " * (LARGEST + 1 - len(body)),
    "long text": lambda _, body: body.replace(b'"data": ', b'"data": "' + b"t" * 150_000 + b'", "x": ', 1),
    "long list": lambda _, body: body.replace(b'"data": ', b'"data": [' + b"0," * 60_000 + b'0], "x": ', 1),
    "large": lambda _, body: body + b" " * 2_000_000,
}


for _kind in KINDS[:4]:
    RECIPES[f"{_kind}: wrong at one place"] = _wrong_at(_kind)
    RECIPES[f"{_kind}: wrong at another place"] = _wrong_at(_kind)
    RECIPES[f"{_kind}: wrong at a third place"] = _wrong_at(_kind)
    for _what, _change in _BODIES.items():
        if _what != "large" or _kind == "request":
            RECIPES[f"{_kind}: body {_what}"] = _body(_kind, _change)


@recipe("request: metadata that is not kept")
def _metadata(world: World) -> Letter:
    letter = a_request(world)
    body = json.loads(letter.body)
    body["metadata"] = world.chance.choice(
        ({"userId": 5}, {"sessionId": ["s"]}, {"userConfig": 7}, {"securityContext": "all"}, {"userId": "x" * 300},
         {"userId": "a\nb"}, {"securityContext": _pit(600)}, {"team": _pit(600)}, {"userConfig": _pit(300)})
    )  # fmt: skip
    return letter.but(body=json.dumps(body).encode())


def _pit(depth: int) -> Any:
    pit: Any = 1
    for _ in range(depth):
        pit = {"a": pit}
    return pit


@recipe("request: another id in the body")
def _other_id(world: World) -> Letter:
    letter = a_request(world)
    return letter.but(body=letter.body.replace(b'"taskId": "', b'"taskId": "not-'))


@recipe("request: id of a resumed call")
def _resumed_id(world: World) -> Letter:
    task_id = f"{world.mark}-{new_id()}"
    return a_request(world, task_id=f"{task_id}.r1")


for _what, _seconds in {"past": -5.0, "now": 0.0, "short": 0.2, "fair": 30.0, "far": 3e9, "very far": 2.5e11}.items():

    @recipe(f"request: deadline {_what}")
    def _deadline(world: World, seconds: float = _seconds) -> Letter:
        return a_request(world).with_headers({"x-deadline": time.time() + seconds})


for _calls in (1, 10, 11, 1000, -1, -1000):

    @recipe(f"request: depth {_calls}")
    def _call_depth(world: World, depth: int = _calls) -> Letter:
        return a_request(world).with_headers({"x-call-depth": depth})


for _idle in (0.0, -1.0, 0.1, 5.0, 1e9):

    @recipe(f"request: idle timeout {_idle}")
    def _idle_timeout(world: World, idle: float = _idle) -> Letter:
        return a_request(world, world.chance.choice(("asker", "doubter", "sleeper"))).with_headers(
            {"x-idle-timeout": idle}
        )


# Each kind of message sent to each kind of queue.

for _kind in KINDS:
    for _suffix in ("req", "nested", "resp", "dlq", "broadcast", "private"):

        @recipe(f"{_kind} to .{_suffix}")
        def _misplaced(world: World, kind: str = _kind, suffix: str = _suffix) -> Letter | None:
            letter = valid(world, kind)
            if suffix == "private":
                if not world.privates:
                    return None
                return letter and letter.but(key=world.chance.choice(world.privates))
            return letter and letter.but(key=f"{world.chance.choice(AGENTS)}.{suffix}")


@recipe("request: no such agent")
def _nowhere(world: World) -> Letter:
    return a_request(world).but(key="nobody.req")


# Replies that cannot be delivered, or that would reach others.

for _what, _address in {
    "missing": "missing-{mark}",
    "missing of mine": ME + ".private.{mark}",
    "full": FULL,
    "requests of an agent": "leaf.req",
    "responses of an agent": "root.resp",
    "dead letters": "leaf.dlq",
    "broadcast": "root.broadcast",
    "the honest requester": "ledger.resp",
    "longest": "x" * 248,
}.items():
    for _agent in ("leaf", "spark"):

        @recipe(f"request to {_agent}: reply to {_what}")
        def _reply_to(world: World, address: str = _address, agent: str = _agent) -> Letter:
            return a_request(world, agent, reply_to=address.format(mark=world.mark))


@recipe("request: unreadable, with a reply to another client")
def _unreadable_reply(world: World) -> Letter | None:
    victim = world.some("request")
    if victim is None:
        return None
    letter = a_request(world, "leaf", task_id=str(victim.properties["correlation_id"]))
    return letter.but(reply_to=victim.properties.get("reply_to"), body=b"{" + world.mark.encode()).with_headers(
        {"x-parent-task-id": victim.headers.get("x-parent-task-id", "p")}
    )


# The fuzzer's own tasks: requested again, with another input, resumed, cancelled.


def _mine(world: World) -> tuple[str, str] | None:
    agents = [agent for agent in AGENTS if world.mine[agent]]
    if not agents:
        return None
    agent = world.chance.choice(agents)
    return agent, world.chance.choice(world.mine[agent])


for _what, _more in {
    "again": {},
    "resumed": {"x-resume": "2"},
    "resumed in an earlier attempt": {"x-resume": "1"},
    "resumed much later": {"x-resume": "9" * 20},
    "for another parent": {"x-parent-task-id": "other"},
}.items():

    @recipe(f"own request {_what}")
    def _own(world: World, more: dict[str, str] = _more) -> Letter | None:
        found = _mine(world)
        return found and a_request(world, *found).with_headers({**more})  # type: ignore[dict-item]


@recipe("own request, sent to another agent")
def _own_elsewhere(world: World) -> Letter | None:
    found = _mine(world)
    return found and a_request(world, world.chance.choice([each for each in AGENTS if each != found[0]]), found[1])


@recipe("request resumed before it was sent")
def _resume_first(world: World) -> Letter:
    return a_request(world, world.chance.choice(("leaf", "spark", "sleeper"))).with_headers({"x-resume": "1"})


@recipe("request and its copy at once")
def _at_once(world: World) -> Letter | None:
    found = _mine(world)
    return found and a_request(world, found[0], world.mine[found[0]][-1])


@recipe("own cancel")
def _own_cancel(world: World) -> Letter:
    return a_cancel(world)


@recipe("own cancel of a running task")
def _cancel_running(world: World) -> Letter:
    mine = world.mine["sleeper"]
    return a_cancel(world, "sleeper", mine[-1] if mine else None)


@recipe("own cancel for another parent")
def _cancel_other_parent(world: World) -> Letter:
    return a_cancel(world).with_headers({"x-parent-task-id": "another"})


@recipe("own cancel before the request")
def _cancel_first(world: World) -> Letter:
    return a_cancel(world, task_id=f"{world.mark}-{new_id()}")


@recipe("request after its cancel")
def _after_cancel(world: World) -> Letter | None:
    cancelled = world.seen["mine cancelled"]
    return a_request(world, "leaf", str(cancelled.popleft().properties["correlation_id"])) if cancelled else None


@recipe("cancel of a task not requested yet")
def _cancel_early(world: World) -> Letter:
    letter = a_cancel(world, "leaf", task_id=f"{world.mark}-{new_id()}")
    world.seen["mine cancelled"].append(letter)
    return letter


@recipe("cancel by broadcast")
def _cancel_broadcast(world: World) -> Letter:
    agent = world.chance.choice(AGENTS)
    return a_cancel(world, agent).but(key=f"{agent}.broadcast")


@recipe("cancel at the wrong agent")
def _cancel_elsewhere(world: World) -> Letter:
    return a_cancel(world).but(key=f"{world.chance.choice(AGENTS)}.resp")


# Messages from the lying peer about an open call.

for _what, _answer in {
    "right": a_response,
    "failed": lambda world, call: a_response(world, call, "FAILED"),
    "cancelled": lambda world, call: a_response(world, call, "CANCELED"),
    "not final": lambda world, call: a_response(world, call, "WORKING"),
    "no state": lambda world, call: a_response(world, call, "DREAMING"),
    "of a sender without a name": lambda world, call: a_response(world, call, app_id=""),
    "of another sender": lambda world, call: a_response(world, call, app_id=ME),
    "unreadable of another sender": lambda world, call: a_response(world, call, app_id=ME, body=world.mark.encode()),
    "unreadable": lambda world, call: a_response(world, call, body=world.mark.encode()),
    "a status": a_status,
    "a status that ends": lambda world, call: a_status(world, call).but(
        body=a_status(world, call).body.replace(b"WORKING", b"COMPLETED")
    ),
    "a status without a message": lambda world, call: a_status(world, call).but(
        body=json.dumps(
            {"statusUpdate": {"taskId": world.mark, "status": {"state": "TASK_STATE_SUBMITTED"}}}
        ).encode()
    ),
    "without a parent": lambda world, call: a_response(world, call).without_header("x-parent-task-id"),
    "a status without a parent": lambda world, call: a_status(world, call).without_header("x-parent-task-id"),
    "for another parent": lambda world, call: a_response(world, call).with_headers({"x-parent-task-id": world.mark}),
    "for another call": lambda world, call: a_response(world, call, correlation_id=world.mark),
    "large": lambda world, call: a_response(world, call, value="v" * 180_000),
    "incompressible": lambda world, call: a_response(world, call, value=world.chance.randbytes(60_000).hex()),
}.items():

    @recipe(f"peer: {_what}")
    def _peer(world: World, answer: Callable[[World, Letter], Letter] = _answer) -> Letter | None:
        call = world.call()
        return answer(world, call) if call else None


@recipe("peer: right, twice")
def _twice(world: World) -> Letter | None:
    answered = world.seen["answered"]
    if answered and world.chance.random() < 0.5:
        return a_response(world, answered.popleft())
    call = world.call()
    if call is None:
        return None
    answered.append(call)
    return a_response(world, call)


@recipe("peer: many statuses")
def _news(world: World) -> Letter | None:
    return a_status(world, world.calls[-1]) if world.calls else None


# Observed honest messages, sent again with changes.

_REPLAYS: dict[str, Callable[[World, Letter], Letter]] = {
    "as mine": lambda world, letter: letter.but(app_id=ME),
    "as mine, answered to me": lambda world, letter: letter.but(app_id=ME, reply_to=REPLIES),
    "with another id": lambda world, letter: letter.but(app_id=ME, correlation_id=world.mark),
    "with a reply to me": lambda world, letter: letter.but(app_id=ME, reply_to=REPLIES),
    "for another parent": lambda world, letter: letter.but(app_id=ME).with_headers({"x-parent-task-id": world.mark}),
    "without a parent": lambda world, letter: letter.but(app_id=ME).without_header("x-parent-task-id"),
    "unreadable": lambda world, letter: letter.but(app_id=ME, body=b"[" + world.mark.encode()),
    "of another type": lambda world, letter: letter.but(app_id=ME, type=world.chance.choice(KINDS)),
    "elsewhere": lambda world, letter: letter.but(
        app_id=ME, key=f"{world.chance.choice(AGENTS)}.{world.chance.choice(('req', 'resp', 'broadcast'))}"
    ),
    "resumed": lambda world, letter: letter.but(app_id=ME).with_headers({"x-resume": "9"}),
}
_FORGERIES: dict[str, Callable[[World, Letter], Letter]] = {
    "as it was": lambda world, letter: letter,
    "with its name and my address": lambda world, letter: letter.but(reply_to=REPLIES),
    "with its name, resumed": lambda world, letter: letter.with_headers({"x-resume": "9"}),
    "with its name, unreadable": lambda world, letter: letter.but(body=b"[" + world.mark.encode()),
    "with its name, an early deadline": lambda world, letter: letter.with_headers({"x-deadline": 1.0}),
    "with its name, to its requester": lambda world, letter: letter.but(key="ledger.resp"),
    "with another honest name": lambda world, letter: letter.but(app_id=world.chance.choice((*AGENTS, "ledger"))),
}


def _replay(kind: str, change: Callable[[World, Letter], Letter], source: str) -> Recipe:
    def make(world: World) -> Letter | None:
        letter = world.some(source)
        return letter and change(world, letter.but(message_id=f"{world.mark}.{kind}", user_id=None))

    return make


for _kind in KINDS[:4]:
    for _what, _alter in _REPLAYS.items():
        _source = ANSWERED if _kind == "request" else _kind
        recipe(f"replayed {_kind} {_what}")(_replay(_kind, _alter, _source))
    for _what, _alter in _FORGERIES.items():
        recipe(f"replayed {_kind} {_what}", forged=True)(_replay(_kind, _alter, _kind))


@recipe("request: login of another client", closing=True)
def _login(world: World) -> Letter:
    return a_request(world, user_id="guest")


@recipe("cancel of an honest task as mine")
def _cancel_victim(world: World) -> Letter | None:
    victim = world.some("request")
    if victim is None:
        return None
    return a_cancel(world, victim.key.partition(".")[0], str(victim.properties["correlation_id"]))


@recipe("forged cancel of an honest task", forged=True)
def _forged_cancel(world: World) -> Letter | None:
    victim = world.some("request")
    if victim is None:
        return None
    letter = a_cancel(world, victim.key.partition(".")[0], str(victim.properties["correlation_id"]))
    parent = victim.headers.get("x-parent-task-id")
    letter = letter.with_headers({"x-parent-task-id": parent}) if parent else letter
    return letter.but(app_id=victim.properties["app_id"])


@recipe("forged answer to an honest call", forged=True)
def _forged_answer(world: World) -> Letter | None:
    victim = world.some("request")
    if victim is None or "reply_to" not in victim.properties:
        return None
    return a_response(world, victim, value=FORGED_RESULT, app_id=victim.key.partition(".")[0])


@recipe("answer to an honest call as mine")
def _my_answer(world: World) -> Letter | None:
    victim = world.some("request")
    if victim is None or "reply_to" not in victim.properties:
        return None
    return a_response(world, victim, value=FORGED_RESULT, app_id=ME)


@recipe("status to an honest call as mine")
def _my_status(world: World) -> Letter | None:
    victim = world.some("request")
    if victim is None or "reply_to" not in victim.properties:
        return None
    return a_status(world, victim, app_id=ME)


# Sequences for branches that single messages do not reach.

EVE = "eve"
"""Another name of the fuzzer, to act as a requester other than the original one."""


def _asked(world: World, agent: str, *, back: int) -> Letter | None:
    """An earlier request of the fuzzer to `agent`; `back` counts from the newest."""
    asked = world.asked[agent]
    return asked[-1 - back] if len(asked) > back else None


def _same(world: World, letter: Letter, **changes: Any) -> Letter:
    return letter.but(message_id=f"{world.mark}.again", **changes)


for _agent in ("leaf", "spark", "sleeper", "asker", "doubter"):
    for _age in (0, 1, 12):
        for _what, _by in {
            "again": {},
            "of another requester": {"app_id": EVE, "reply_to": f"{EVE}.replies"},
            "with another input": {"body": None},
            "to an operation of another agent": {"key": "leaf.req" if _agent != "leaf" else "spark.req"},
        }.items():

            @recipe(f"request {_what}: {_agent}, {_age} back", deep=True)
            def _asked_again(world: World, agent: str = _agent, back: int = _age, by: Any = _by) -> Letter | None:
                letter = _asked(world, agent, back=back)
                if letter is None:
                    return None
                if "body" in by:
                    return a_request(world, agent, str(letter.properties["correlation_id"]))
                return _same(world, letter, **by)

        for _order in ("1", "2", "3"):

            @recipe(f"request resumed {_order}: {_agent}, {_age} back", deep=True)
            def _resumed(world: World, agent: str = _agent, back: int = _age, order: str = _order) -> Letter | None:
                letter = _asked(world, agent, back=back)
                return letter and _same(world, letter).with_headers({"x-resume": order})

        for _sender in (ME, EVE):

            @recipe(f"cancel by {_sender}: {_agent}, {_age} back", deep=True)
            def _cancelled(world: World, agent: str = _agent, back: int = _age, by: str = _sender) -> Letter | None:
                letter = _asked(world, agent, back=back)
                if letter is None:
                    return None
                return a_cancel(world, agent, str(letter.properties["correlation_id"]), app_id=by)


def _now(world: World, agent: str, data: Any, **changes: Any) -> Letter:
    letter = a_request(world, agent, **changes)
    body = json.loads(letter.body)
    body["message"]["parts"] = [{"data": data}]
    return letter.but(body=json.dumps(body).encode())


for _sender in (ME, EVE):
    for _again in (0, 1, 2):

        @recipe(f"a nap that {_sender} cancels {_again}", deep=True)
        def _nap(world: World, by: str = _sender, again: int = _again) -> list[Letter]:
            nap = _now(world, "sleeper", 1500)
            task_id = str(nap.properties["correlation_id"])
            return [nap, *([_same(world, nap)] * again), a_cancel(world, "sleeper", task_id, app_id=by)]


for _what, _then in {
    "again": {},
    "of another requester": {"app_id": EVE, "reply_to": f"{EVE}.replies"},
    "with another input": {"body": b'{"message":{"role":"ROLE_USER","parts":[{"data":7}]}}'},
    "resumed": {"resume": "5"},
}.items():
    for _agent in ("sleeper", "asker", "doubter"):

        @recipe(f"{_agent}, at once {_what}", deep=True)
        def _twice_now(world: World, agent: str = _agent, then: Any = _then) -> list[Letter]:
            first = _now(world, agent, 800)
            changes = {name: value for name, value in then.items() if name != "resume"}
            second = _same(world, first, **changes)
            return [first, second.with_headers({"x-resume": then["resume"]}) if "resume" in then else second]


@recipe("a failed task that is resumed", deep=True)
def _fails(world: World) -> list[Letter]:
    failed = _now(world, world.chance.choice(("leaf", "spark")), "no piece")
    resumed = _same(world, failed).with_headers({"x-resume": "1"})
    return [failed, resumed, _same(world, failed), resumed]


for _turn in range(2):

    @recipe(f"a failed task that is resumed twice in one order, {_turn}", deep=True)
    def _fails_again(world: World) -> Scene:
        failed = _now(world, "leaf", "no piece").with_headers({"x-resume": "1"})
        resumed = _same(world, failed).with_headers({"x-resume": "2"})
        return Scene([failed], ((0.6, resumed), (0.9, resumed), (1.3, resumed)))

    @recipe(f"a refused request whose reply has to wait, {_turn}", deep=True)
    def _refused_and_full(world: World) -> Letter:
        refused = a_request(world, world.chance.choice(("spark", "doubter")), reply_to=FULL)
        return refused.with_headers({"x-deadline": time.time() - 5})

    @recipe(f"a traceparent, {_turn}", deep=True)
    def _traced(world: World) -> Letter:
        return a_request(world).with_headers(
            {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        )


@recipe("a cancel for an earlier attempt", deep=True)
def _stale(world: World) -> list[Letter]:
    agent = world.chance.choice(("sleeper", "asker"))
    task = _now(world, agent, 900).with_headers({"x-parent-task-id": f"{world.mark}~resume-2"})
    task_id = str(task.properties["correlation_id"])
    return [task, a_cancel(world, agent, task_id).with_headers({"x-parent-task-id": f"{world.mark}~resume-1"})]


@recipe("a resumed nap, and its copies", deep=True)
def _resumed_nap(world: World) -> list[Letter]:
    nap = _now(world, "sleeper", 2500).with_headers({"x-resume": "1"})
    before, world.napping = world.napping, str(nap.properties["correlation_id"])
    cancel = [a_cancel(world, "sleeper", before)] if before else []
    return [*cancel, nap, *[_same(world, nap.without_header("x-resume"))] * 2]


for _turn in range(3):
    recipe(f"a resumed nap, and the end of the last one, {_turn}", deep=True)(_resumed_nap)


@recipe("a crowd of naps", deep=True)
def _crowd(world: World) -> list[Letter]:
    return [_now(world, "sleeper", 300, task_id=f"{world.mark}-{number}") for number in range(30)]


@recipe("an id that only a resumed call may have", deep=True)
def _marked_id(world: World) -> Letter:
    return a_request(world, "leaf", f"{world.mark}-{new_id()}~resume-1")


@recipe("a status without a listener", deep=True)
def _unheard(world: World) -> list[Letter]:
    quiet = [
        _now(world, agent, 1, task_id=f"{world.mark}-{agent}").but(reply_to=None) for agent in ("asker", "doubter")
    ]
    world.quiet.extend(str(each.properties["correlation_id"]) for each in quiet)
    calls = [world.quiet_calls.popleft() for _ in range(len(world.quiet_calls))]
    return [*quiet, *(a_status(world, call) for call in calls), *(a_response(world, call) for call in calls)]


@recipe("a flood of statuses", deep=True)
def _much_news(world: World) -> list[Letter] | None:
    return [a_status(world, world.calls[-1])] * 30 if world.calls else None


@recipe("a long status", deep=True)
def _long_news(world: World) -> Letter | None:
    if not world.calls:
        return None
    letter = a_status(world, world.calls[-1])
    return letter.but(body=letter.body.replace(b'{"percent": 40}', b'"' + b"n" * 70_000 + b'"'))


@recipe("a refusal of another request", deep=True)
def _refusal_of_another(world: World) -> Letter | None:
    call = world.call()
    if call is None:
        return None
    letter = a_response(world, call, "FAILED")
    body = json.loads(letter.body)
    body["task"]["metadata"] = {"failure": "invalid", "refuses": "0" * 64}
    return letter.but(body=json.dumps(body).encode())


for _wrong, _metadata_ in {
    "user": {"userId": 5}, "session": {"sessionId": ["s"]}, "configuration": {"userConfig": 7},
    "scopes": {"securityContext": "all"}, "long user": {"userId": "x" * 300}, "deep team": {"team": _pit(190)},
    "deep scopes": {"securityContext": _pit(190)}, "deep configuration": {"userConfig": _pit(190)},
}.items():  # fmt: skip

    @recipe(f"metadata with a wrong {_wrong}", deep=True)
    def _wrong_metadata(world: World, metadata: Any = _metadata_) -> Letter:
        letter = a_request(world, "leaf")
        return letter.but(body=json.dumps({**json.loads(letter.body), "metadata": metadata}).encode())


for _depth_ in (1.5, 11, 999):

    @recipe(f"a call depth of {_depth_}", deep=True)
    def _deep_call(world: World, depth: float = _depth_) -> Letter:
        return a_request(world).with_headers({"x-call-depth": depth})


@recipe("an idle timeout of a moment", deep=True)
def _moment(world: World) -> Letter:
    return a_request(world, "asker").with_headers({"x-idle-timeout": 0.5})


def _by_operator(world: World, letter: Letter) -> Letter:
    return _same(world, letter, app_id=OPERATOR, user_id=OPERATOR, reply_to=f"{OPERATOR}.replies")


for _age in (0, 1, 12):
    for _agent in ("leaf", "sleeper", "asker"):

        @recipe(f"operator: request again, {_agent}, {_age} back", deep=True, servers=True)
        def _operator_again(world: World, agent: str = _agent, back: int = _age) -> Letter | None:
            letter = _asked(world, agent, back=back)
            return letter and _by_operator(world, letter)

        @recipe(f"operator: request resumed, {_agent}, {_age} back", deep=True, servers=True)
        def _operator_resumed(world: World, agent: str = _agent, back: int = _age) -> Letter | None:
            letter = _asked(world, agent, back=back)
            return letter and _by_operator(world, letter).with_headers({"x-resume": "7"})

    @recipe(f"operator: cancel, {_age} back", deep=True, servers=True)
    def _operator_cancel(world: World, back: int = _age) -> Letter | None:
        agent = world.chance.choice(("sleeper", "asker", "doubter", "leaf"))
        letter = _asked(world, agent, back=back)
        if letter is None:
            return None
        return a_cancel(world, agent, str(letter.properties["correlation_id"]), app_id=OPERATOR, user_id=OPERATOR)


for _agent in ("leaf", "diary"):

    @recipe(f"operator: a failed task of {_agent}, resumed", deep=True, servers=True)
    def _operator_revives(world: World, agent: str = _agent) -> Scene:
        failed = _now(world, agent, "no piece" if agent == "leaf" else -1)
        resumed = _by_operator(world, failed).with_headers({"x-resume": "2"})
        return Scene([failed], ((0.7, resumed), (1.2, resumed), (2.0, resumed)))


@recipe("operator: a running nap, resumed", deep=True, servers=True)
def _operator_resumes_nap(world: World) -> Scene:
    nap = _now(world, "sleeper", 1500).with_headers({"x-resume": "1"})
    return Scene([nap], ((0.5, _by_operator(world, nap).with_headers({"x-resume": "2"})),))


@recipe("operator: a completed task, requested again", deep=True, servers=True)
def _operator_asks_again(world: World) -> Scene:
    nap = _now(world, "sleeper", 5).with_headers({"x-resume": "1"})
    return Scene([nap], ((0.7, _by_operator(world, nap)), (1.2, _by_operator(world, nap))))


@recipe("operator: a refused request, resumed", deep=True, servers=True)
def _operator_revives_refused(world: World) -> Scene:
    refused = a_request(world, "leaf", reply_to=f"{ME}.gone").with_headers({"x-deadline": time.time() - 5})
    resumed = _by_operator(world, refused).without_header("x-deadline").with_headers({"x-resume": "1"})
    return Scene([refused], ((0.7, resumed), (1.5, resumed)))


@recipe("an exclusive agent resumed while busy", deep=True)
def _exclusive(world: World) -> Scene:
    work, failed = _now(world, "solo", 3000), _now(world, "solo", -1)
    resumed = _same(world, failed).with_headers({"x-resume": "1"})
    return Scene([work, failed], ((0.8, resumed), (1.5, resumed.with_headers({"x-resume": "2"}))))


# Requests that the broker has delivered before, and rows locked by a second session.


@recipe("a crowd of worn requests", deep=True, servers=True)
def _worn(world: World) -> Scene:
    naps = [_now(world, "sleeper", 300, task_id=f"{world.mark}-w{number}") for number in range(28)]
    return Scene(naps, worn=1)


for _turn in range(2):

    @recipe(f"a worn request without a database, {_turn}", deep=True, servers=True)
    def _worn_out(world: World) -> Scene:
        return Scene([a_request(world, "spark")], worn=6)

    @recipe(f"worn copies of one request, {_turn}", deep=True, servers=True)
    def _worn_copies(world: World) -> Scene:
        nap = _now(world, "sleeper", 5)
        copies = [nap, _same(world, nap), _same(world, nap), _same(world, nap)]
        return Scene(copies, worn=1, hold=_unborn(nap))

    @recipe(f"worn copies of two requesters, {_turn}", deep=True, servers=True)
    def _worn_strangers(world: World) -> Scene:
        nap = _now(world, "sleeper", 5)
        other = _same(world, nap, app_id=EVE, reply_to=f"{EVE}.replies")
        return Scene([nap, other, nap, other], worn=1, hold=_unborn(nap))

    @recipe(f"resumed requests at once, {_turn}", deep=True, servers=True)
    def _resumed_at_once(world: World) -> Scene:
        nap = _now(world, "sleeper", 5)
        copies = [_same(world, nap).with_headers({"x-resume": order}) for order in ("1", "2", "1", "2")]
        return Scene(copies, hold=_unborn(nap))

    @recipe(f"a cancel before the resumed request, {_turn}", deep=True, servers=True)
    def _cancel_just_before(world: World) -> Scene:
        nap = _now(world, "sleeper", 5).with_headers({"x-resume": "1"})
        cancel = a_cancel(world, "sleeper", str(nap.properties["correlation_id"]))
        return Scene([cancel, cancel], ((0.15, nap), (0.15, nap)), hold=_unborn(nap))

    @recipe(f"copies of a running request, {_turn}", deep=True, servers=True)
    def _copies_at_work(world: World) -> Scene:
        work = _now(world, "diary", 1500)
        copy = _same(world, work)
        return Scene([work], ((0.5, copy), (0.6, copy), (0.7, copy), (0.8, copy)))

    @recipe(f"a request resumed as it begins, {_turn}", deep=True, servers=True)
    def _as_it_begins(world: World) -> Scene:
        work = _now(world, "diary", 5)
        resumed = _same(world, work).with_headers({"x-resume": "1"})
        return Scene([work], ((0.15, resumed), (0.16, resumed), (0.17, resumed)), hold=_unborn(work))

    @recipe(f"a copy while the reply is sent, {_turn}", deep=True, servers=True)
    def _while_settling(world: World) -> Scene:
        nap = _now(world, "sleeper", 500).with_headers({"x-resume": "1"})
        copy = _same(world, nap)
        hold = Hold(str(nap.properties["correlation_id"]), 1.0, after=0.3)
        later = tuple((seconds, copy) for seconds in (0.1, 0.2, 0.8, 0.85, 0.95, 1.05))
        return Scene([nap], later, hold=hold)

    @recipe(f"a response for a held task, {_turn}", deep=True, servers=True)
    def _held_response(world: World) -> Scene | None:
        call = _durable_call(world)
        if call is None:
            return None
        return Scene([a_response(world, call)], hold=Hold(str(call.headers["x-parent-task-id"]), 3.0))

    @recipe(f"a cancel of a held task, {_turn}", deep=True, servers=True)
    def _held_cancel(world: World) -> Scene | None:
        call = _durable_call(world)
        if call is None:
            return None
        task_id = str(call.headers["x-parent-task-id"])
        return Scene([a_cancel(world, "asker", task_id)], hold=Hold(task_id, 3.0))


def _unborn(letter: Letter) -> Hold:
    return Hold(str(letter.properties["correlation_id"]), 0.5, unborn=True)


def _durable_call(world: World) -> Letter | None:
    for call in world.calls:
        if call.properties.get("app_id") == "asker":
            world.calls.remove(call)
            return call
    return None


for _what in ("request: another id in the body", "request: body over the limit", "peer: a status that ends",
              "peer: not final", "peer: of another sender", "peer: without a parent", "request: deadline past",
              "peer: unreadable", "peer: a status without a parent", "own cancel before the request",
              "cancel of a task not requested yet", "request after its cancel"):  # fmt: skip
    DEEP.add(_what)

_OFTEN = (
    "a cancel before the resumed request, 0",
    "a call depth of 1.5",
    "a failed task that is resumed",
    "a flood of statuses",
    "a refusal of another request",
    "a response for a held task, 0",
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

for _what in _OFTEN:
    for _turn in range(2):
        _again_ = f"{_what}, once more {_turn}"
        RECIPES[_again_] = RECIPES[_what]
        DEEP.add(_again_)
        if _what in ON_SERVERS:
            ON_SERVERS.add(_again_)
