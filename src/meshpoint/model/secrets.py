"""Detect secret values, and remove them from texts and JSON before they leave the task."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from traceback import TracebackException

from pydantic import JsonValue

from meshpoint.model.error_text import make_storable, quantity

MASK = "***"

_MAX_MASKED_CHARS = 200_000
_MAX_REASON_LENGTH = 2_000
"""Maximum characters of a reason in an event or a row. The reply has all of it."""

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
_PLURALS = tuple(
    f"{key}s" for key in _KEYS if key not in {"token", "credentials"}
)  # `max_tokens` is a number

_TOKEN_PATTERN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"sk-[A-Za-z0-9_-]{16,}|[sr]k_(?:live|test)_\w{10,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|hf_[A-Za-z0-9]{20,}"
    r"|pypi-[\w-]{16,}|eyJ[\w-]{5,400}+\.[\w-]{5,}(?:\.[\w-]*)?)"
)
_PRIVATE_KEY_MARKER = re.compile(r"-----(?P<edge>BEGIN|END) [A-Z ]{0,30}PRIVATE KEY-----")
_URL_CREDENTIALS = re.compile(r"(?<=://)([^\s/?#:@\"']{0,256}):[^\s/\"']{1,1024}@")
_AUTH_SCHEME = re.compile(r"\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_VALUE = (
    r"(?:(?P<escaped>\\[\"'])[^\n]*?(?:(?P=escaped)|(?=\n)|\Z)"
    r"|(?P<prefix>[bruf]{0,2})(?P<quote>[\"'])(?:(?!(?P=quote))[^\\\n]|\\.)*(?P=quote)?"
    r"|[\[{(][^\n]*"  # a pattern cannot find the matching bracket
    r"|(?:(?:bearer|basic|digest|token)\s+)?[^\s,;&)}\]\"'<>]+)"
)
_REST_OF_LINE = r"(?P<rest>[^\n\"']*[^\s\"'])"


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
    normalized = _normalize(name).rstrip("0123456789")
    return normalized.endswith(_normalized_keys(tuple(keys)))


def mask_secrets(text: str, keys: Collection[str] = ()) -> str:
    """Replace everything in `text` that looks like a secret with `***`.

    Masked are values after a secret name (`name=…`, `name: …`, `"name": "…"`, also in escaped
    JSON; see `is_secret_key`), passwords in URLs, the credentials after `Bearer` or `Basic`,
    private keys, and tokens in well-known formats.
    """
    text = _TOKEN_PATTERN.sub(MASK, _mask_private_keys(text))
    text = _URL_CREDENTIALS.sub(rf"\1:{MASK}@", text)
    text = _AUTH_SCHEME.sub(rf"\1\2{MASK}", text)
    named_pattern, validation_pattern = _patterns(tuple(keys))
    return named_pattern.sub(_mask_match, validation_pattern.sub(rf"\1{MASK}", text))


def mask_reason(reason: str, keys: Collection[str] = ()) -> str:
    """Return `reason` for operators: masked like `mask_secrets`, storable and short."""
    masked = mask_secrets(make_storable(reason), keys)
    return masked if len(masked) <= _MAX_REASON_LENGTH else f"{masked[:_MAX_REASON_LENGTH]}…"


def _mask_private_keys(text: str) -> str:
    """Replace each private key in `text` with `***`; without an end marker, cut the rest.

    A single pass: a pattern that searches for the end from each start would take quadratic time.
    """
    parts: list[str] = []
    end = 0
    inside = False
    for marker in _PRIVATE_KEY_MARKER.finditer(text):
        if marker["edge"] == "BEGIN" and not inside:
            parts += [text[end : marker.start()], MASK]
            inside = True
        elif marker["edge"] == "END" and inside:
            end, inside = marker.end(), False
    return "".join(parts) if inside else "".join([*parts, text[end:]])


def remove_secrets(
    value: JsonValue, pointers: Iterable[str], keys: Collection[str] = ()
) -> tuple[JsonValue, tuple[str, ...]]:
    """A copy of `value` with secrets set to null, and their places as JSON pointers.

    Secrets are the values at `pointers` and under keys for which `is_secret_key` is true. Nulls,
    booleans and empty values are never secrets. A pointer to a missing place is ignored.
    """
    removed: list[str] = []
    return _remove_secrets(value, "", frozenset(pointers), keys, removed), tuple(removed)


def json_pointer(*steps: str | int) -> str:
    """The JSON pointer (RFC 6901) for a path. Without steps, the whole document."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def _remove_secrets(
    value: JsonValue,
    path: str,
    pointers: Collection[str],
    keys: Collection[str],
    removed: list[str],
) -> JsonValue:
    if path in pointers and _may_be_secret(value):
        removed.append(path)
        return None
    match value:
        case dict():
            secret_pointers = {
                path + json_pointer(key) for key in value if is_secret_key(key, keys)
            }
            all_pointers = {*pointers, *secret_pointers} if secret_pointers else pointers
            return {
                key: _remove_secrets(item, path + json_pointer(key), all_pointers, keys, removed)
                for key, item in value.items()
            }
        case list():
            return [
                _remove_secrets(each, f"{path}/{index}", pointers, keys, removed)
                for index, each in enumerate(value)
            ]
    return value


def _may_be_secret(value: JsonValue) -> bool:
    return not isinstance(value, bool) and value not in (None, "", [], {})


def _normalize(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


@lru_cache(maxsize=64)
def _normalized_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(None, map(_normalize, (*_KEYS, *_PLURALS, *keys))))


@lru_cache(maxsize=64)
def _patterns(keys: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """One pattern for a name with its value, and one for their two lines in a pydantic error."""
    names = _alternatives([*_KEYS, *_PLURALS, *keys])
    whole_line_names = _alternatives(["authorization", "cookie", "cookies"])
    # Possessive `*+`, because backtracking over the blanks would take quadratic time.
    separator = r"\d{0,9}(?:\\?[\"'])?\]?[ \t]*+(?:[:=]=?>?)[ \t]*+"
    named_pattern = (
        rf"(?P<name>(?:{whole_line_names}){separator})(?:{_REST_OF_LINE})"
        rf"|(?P<key>(?:{names}){separator}){_VALUE}"
    )
    validation_pattern = (
        rf"^((?:[^\n]*(?:{names})\d*)\n(?>[^\n]*?\binput_value=)).*(?=, input_type=)"
    )
    return re.compile(named_pattern, re.IGNORECASE), re.compile(
        validation_pattern, re.IGNORECASE | re.MULTILINE
    )


def _alternatives(keys: Sequence[str]) -> str:
    words_per_key = [list(filter(None, re.split(r"[\W_]+", key))) for key in keys]
    return "|".join(r"[_\-. ]?".join(key_words) for key_words in words_per_key if key_words)


def _mask_match(match: re.Match[str]) -> str:
    if match["name"]:
        return match["name"] + MASK
    quote = match["escaped"] or match["quote"] or ""
    return f"{match['key']}{match['prefix'] or ''}{quote}{MASK}{quote}"


def format_traceback(
    error: BaseException, keys: Collection[str] = (), *, limit_bytes: int = 8000, frames: int = 20
) -> str:
    """Format the traceback of `error` for people, with its causes and groups.

    It is masked, storable and has no local variables. Each stack keeps its innermost `frames`. If
    the text exceeds `limit_bytes` of UTF-8, lines are removed from the middle.
    """
    text = "".join(TracebackException.from_exception(error, limit=-frames, compact=True).format())
    if len(text) > 2 * _MAX_MASKED_CHARS:  # far more than the result keeps
        text = f"{text[:_MAX_MASKED_CHARS]}\n{text[-_MAX_MASKED_CHARS:]}"
    encodable = (
        text.replace("\0", "\N{REPLACEMENT CHARACTER}")
        .encode("utf-8", "backslashreplace")
        .decode()
    )
    return _cut_middle(mask_secrets(encodable, keys).rstrip("\n"), limit_bytes)


def _cut_middle(text: str, limit: int) -> str:
    """Cut the middle of `text` to fit `limit` bytes, keeping about twice as much at the end."""
    if len(text.encode()) <= limit:
        return text
    lines = [_truncate(line, limit // 4) for line in text.splitlines()]
    sizes = [len(line.encode()) + 1 for line in lines]
    capacity = limit - len(_omission_note(len(lines)).encode()) - 1
    tail = _count_fitting(list(reversed(sizes)), capacity * 2 // 3)
    head = _count_fitting(sizes[: len(lines) - tail], capacity - sum(sizes[len(lines) - tail :]))
    omitted = len(lines) - tail - head
    remaining = [
        *lines[:head],
        *([_omission_note(omitted)] if omitted else []),
        *lines[len(lines) - tail :],
    ]
    return _truncate("\n".join(remaining), limit)


def _omission_note(count: int) -> str:
    return f"… {quantity(count, 'line')} left out …"


def _count_fitting(sizes: Iterable[int], capacity: int) -> int:
    return sum(1 for total in accumulate(sizes) if total <= capacity)


def _truncate(text: str, limit: int) -> str:
    encoded = text.encode()
    if len(encoded) <= limit:
        return text
    return encoded[: max(0, limit - len("…".encode()))].decode(errors="ignore") + "…"
