"""Error texts for messages, storage and logs: bounded, and safe for exceptions that misbehave."""

from __future__ import annotations

MAX_ERROR_TEXT_LENGTH = 10_000
"""Maximum characters of an error text."""


def describe_exception(error: BaseException) -> str:
    """`Type: message` of any exception, or the type alone if `__str__` fails."""
    return make_storable(f"{type_name(error)}: {_raw_message(error)}")


def type_name(error: BaseException) -> str:
    """The name of the class of any exception."""
    try:
        return type(error).__name__
    except BaseException:  # a metaclass may raise anything
        return "an error"


def exception_message(error: BaseException) -> str:
    """The message of any exception."""
    return make_storable(_raw_message(error))


def _raw_message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "(its message cannot be read)"


def quantity(count: int, noun: str) -> str:
    """`1 call`, `2 calls`: a count with its noun, for nouns with a regular plural."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def escape_unprintable(text: str, *, allowed: str = "") -> str:
    """Escape control characters, so that `text` cannot break a log line or control a terminal.

    Args:
        text: untrusted text.
        keep: unprintable characters to leave as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in allowed else _escape(character)
        for character in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def make_storable(text: str) -> str:
    """Make `text` valid for every database and message.

    Text beyond `MAX_ERROR_TEXT_LENGTH` characters is cut, with a note.
    """
    if len(text) > MAX_ERROR_TEXT_LENGTH:
        left_out = len(text) - MAX_ERROR_TEXT_LENGTH
        text = f"{text[:MAX_ERROR_TEXT_LENGTH]}… ({quantity(left_out, 'character')} left out)"
    if "\0" in text:
        text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    return text
