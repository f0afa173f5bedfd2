"""Detect secret values, and remove them from texts and JSON before they leave the task."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from traceback import TracebackException

from pydantic import JsonValue

MASK = "***"

_MASKABLE = 200_000

_KEYS = (
    "password",
    "passwd",
    "pwd",
    "passphrase",
    "secret",
    "token",
    "api_key",
    "access_key",
    "private_key",
    "secret_key",
    "signing_key",
    "encryption_key",
    "account_key",
    "session_key",
    "authorization",
    "bearer",
    "cookie",
    "credential",
    "credentials",
)
_PLURALS = tuple(f"{key}s" for key in _KEYS if key not in {"token", "credentials"})  # `max_tokens` is a number

_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"sk-[A-Za-z0-9_-]{16,}|[sr]k_(?:live|test)_\w{10,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|hf_[A-Za-z0-9]{20,}"
    r"|pypi-[\w-]{16,}|eyJ[\w-]{5,400}+\.[\w-]{5,}(?:\.[\w-]*)?)"
)
_KEY_EDGE = re.compile(r"-----(?P<edge>BEGIN|END) [A-Z ]{0,30}PRIVATE KEY-----")
_USER_INFO = re.compile(r"(?<=://)([^\s/?#:@\"']{0,256}):[^\s/\"']{1,1024}@")
_SCHEME = re.compile(r"\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_VALUE = (
    r"(?:(?P<escaped>\\[\"'])[^\n]*?(?:(?P=escaped)|(?=\n)|\Z)"
    r"|(?P<prefix>[bruf]{0,2})(?P<quote>[\"'])(?:(?!(?P=quote))[^\\\n]|\\.)*(?P=quote)?"
    r"|[\[{(][^\n]*"  # a pattern cannot find the matching bracket
    r"|(?:(?:bearer|basic|digest|token)\s+)?[^\s,;&)}\]\"'<>]+)"
)
_END_OF_LINE = r"(?P<rest>[^\n\"']*[^\s\"'])"


class Secret:
    """Marks a string as secret in a deliverable's type: `Annotated[str, Secret]`.

    Secrets are not shown or exported, but are stored like any other value, because a later run
    needs them.
    """


def is_secret_key(name: str, keys: Collection[str] = ()) -> bool:
    """Whether the name marks its value as secret.

    True for names such as `db_password`, `OPENAI_API_KEY` and `accessToken`, and for names that
    end with a key in `keys`.
    """
    bare = _bare(name).rstrip("0123456789")
    return bare.endswith(_bare_keys(tuple(keys)))


def masked(text: str, keys: Collection[str] = ()) -> str:
    """Replace everything in `text` that looks like a secret with `***`.

    Masked are values after a secret name (`name=…`, `name: …`, `"name": "…"`, also in escaped
    JSON; see `is_secret_key`), passwords in URLs, the credentials after `Bearer` or `Basic`,
    private keys, and tokens in well-known formats.
    """
    text = _SHAPES.sub(MASK, _without_private_keys(text))
    text = _USER_INFO.sub(rf"\1:{MASK}@", text)
    text = _SCHEME.sub(rf"\1\2{MASK}", text)
    named, validation = _patterns(tuple(keys))
    return named.sub(_hidden, validation.sub(rf"\1{MASK}", text))


def _without_private_keys(text: str) -> str:
    """Replace each private key in `text` with `***`; without an end marker, cut the rest.

    A single pass: a pattern that searches for the end from each start would take quadratic time.
    """
    kept: list[str] = []
    end = 0
    inside = False
    for found in _KEY_EDGE.finditer(text):
        if found["edge"] == "BEGIN" and not inside:
            kept += [text[end : found.start()], MASK]
            inside = True
        elif found["edge"] == "END" and inside:
            end, inside = found.end(), False
    return "".join(kept) if inside else "".join([*kept, text[end:]])


def without_secrets(
    value: JsonValue, pointers: Iterable[str], keys: Collection[str] = ()
) -> tuple[JsonValue, tuple[str, ...]]:
    """A copy of `value` with secrets set to null, and their places as JSON pointers.

    Secrets are the values at `pointers` and under keys for which `is_secret_key` is true. Nulls,
    booleans and empty values are never secrets. A pointer to a missing place is ignored.
    """
    removed: list[str] = []
    return _without(value, "", frozenset(pointers), keys, removed), tuple(removed)


def pointer(*steps: str | int) -> str:
    """The JSON pointer (RFC 6901) for a path. Without steps, the whole document."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def _without(
    value: JsonValue, at: str, pointers: Collection[str], keys: Collection[str], out: list[str]
) -> JsonValue:
    if at in pointers and _tells(value):
        out.append(at)
        return None
    match value:
        case dict():
            secret = {at + pointer(key) for key in value if is_secret_key(key, keys)}
            inner = {*pointers, *secret} if secret else pointers
            return {key: _without(each, at + pointer(key), inner, keys, out) for key, each in value.items()}
        case list():
            return [_without(each, f"{at}/{index}", pointers, keys, out) for index, each in enumerate(value)]
    return value


def _tells(value: JsonValue) -> bool:
    return not isinstance(value, bool) and value not in (None, "", [], {})


def _bare(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


@lru_cache(maxsize=64)
def _bare_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(None, map(_bare, (*_KEYS, *_PLURALS, *keys))))


@lru_cache(maxsize=64)
def _patterns(keys: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """One pattern for a name with its value, and one for their two lines in a pydantic error."""
    names = _alternatives([*_KEYS, *_PLURALS, *keys])
    to_the_end = _alternatives(["authorization", "cookie", "cookies"])
    # Possessive `*+`, because backtracking over the blanks would take quadratic time.
    opening = r"\d{0,9}(?:\\?[\"'])?\]?[ \t]*+(?:[:=]=?>?)[ \t]*+"
    named = rf"(?P<name>(?:{to_the_end}){opening})(?:{_END_OF_LINE})|(?P<key>(?:{names}){opening}){_VALUE}"
    validation = rf"^((?:[^\n]*(?:{names})\d*)\n(?>[^\n]*?\binput_value=)).*(?=, input_type=)"
    return re.compile(named, re.IGNORECASE), re.compile(validation, re.IGNORECASE | re.MULTILINE)


def _alternatives(keys: Sequence[str]) -> str:
    words = [list(filter(None, re.split(r"[\W_]+", key))) for key in keys]
    return "|".join(r"[_\-. ]?".join(each) for each in words if each)


def _hidden(match: re.Match[str]) -> str:
    if match["name"]:
        return match["name"] + MASK
    quote = match["escaped"] or match["quote"] or ""
    return f"{match['key']}{match['prefix'] or ''}{quote}{MASK}{quote}"


def traceback_of(
    error: BaseException, keys: Collection[str] = (), *, limit_bytes: int = 8000, frames: int = 20
) -> str:
    """Format the traceback of `error` for people, with its causes and groups.

    It is masked, storable and has no local variables. Each stack keeps its innermost `frames`. If
    the text exceeds `limit_bytes` of UTF-8, lines are removed from the middle.
    """
    told = "".join(TracebackException.from_exception(error, limit=-frames, compact=True).format())
    if len(told) > 2 * _MASKABLE:  # far more than the result keeps
        told = f"{told[:_MASKABLE]}\n{told[-_MASKABLE:]}"
    storable = told.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "backslashreplace").decode()
    return _trimmed(masked(storable, keys).rstrip("\n"), limit_bytes)


def _trimmed(text: str, limit: int) -> str:
    """Cut the middle of `text` to fit `limit` bytes, keeping about twice as much at the end."""
    if len(text.encode()) <= limit:
        return text
    lines = [_cut(line, limit // 4) for line in text.splitlines()]
    sizes = [len(line.encode()) + 1 for line in lines]
    room = limit - len(_left_out(len(lines)).encode()) - 1
    tail = _fitting(list(reversed(sizes)), room * 2 // 3)
    head = _fitting(sizes[: len(lines) - tail], room - sum(sizes[len(lines) - tail :]))
    left_out = len(lines) - tail - head
    kept = [*lines[:head], *([_left_out(left_out)] if left_out else []), *lines[len(lines) - tail :]]
    return _cut("\n".join(kept), limit)


def _left_out(lines: int) -> str:
    return f"… {lines} lines left out …"


def _fitting(sizes: Iterable[int], room: int) -> int:
    return sum(1 for total in accumulate(sizes) if total <= room)


def _cut(text: str, limit: int) -> str:
    encoded = text.encode()
    if len(encoded) <= limit:
        return text
    return encoded[: max(0, limit - len("…".encode()))].decode(errors="ignore") + "…"
