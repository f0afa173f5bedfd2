"""Error texts for messages, storage and logs: bounded, and safe for exceptions that misbehave."""

from __future__ import annotations

MAX_ERROR_TEXT = 10_000
"""Maximum characters of an error text."""


def described(error: BaseException) -> str:
    """`Type: message` of any exception, or the type alone if `__str__` fails."""
    try:
        name = type(error).__name__
    except BaseException:  # a metaclass may raise anything
        name = "an error"
    return storable(f"{name}: {_message(error)}")


def text_of(error: BaseException) -> str:
    """The message of any exception."""
    return storable(_message(error))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "(its message cannot be read)"


def printable(text: str, *, keep: str = "") -> str:
    """Escape control characters, so that `text` cannot break a log line or control a terminal.

    Args:
        text: untrusted text.
        keep: unprintable characters to leave as they are.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def storable(text: str) -> str:
    """Make `text` valid for every database and message.

    Text beyond `MAX_ERROR_TEXT` characters is cut, with a note.
    """
    if len(text) > MAX_ERROR_TEXT:
        text = f"{text[:MAX_ERROR_TEXT]}… ({len(text) - MAX_ERROR_TEXT} characters left out)"
    if "\0" in text:
        text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    return text
