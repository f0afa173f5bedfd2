"""The text of an error, as it is sent, stored and logged: bounded, and safe to take from an error that misbehaves."""

from __future__ import annotations

MAX_ERROR_TEXT = 10_000
"""Characters of an error that are kept."""


def described(error: BaseException) -> str:
    """`Type: message` of any error. One whose `__str__` fails is described by its type alone."""
    try:
        name = type(error).__name__
    except BaseException:  # a metaclass may raise whatever it likes
        name = "an error"
    return storable(f"{name}: {_message(error)}")


def text_of(error: BaseException) -> str:
    """The message of any error."""
    return storable(_message(error))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "(its message cannot be read)"


def storable(text: str) -> str:
    """`text` as every database and every message takes it, cut after `MAX_ERROR_TEXT` characters with a note."""
    if len(text) > MAX_ERROR_TEXT:
        text = f"{text[:MAX_ERROR_TEXT]}… ({len(text) - MAX_ERROR_TEXT} characters left out)"
    if "\0" in text:
        text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    return text
