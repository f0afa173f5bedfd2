"""Arguments of a model that JSON cannot represent.

`json.loads` reads NaN and Infinity, so some models' calls have them. A call with such numbers is
stored with the text of its arguments instead, and the model gets an error, as for other arguments
that do not fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

_TEXT = "meshpoint_invalid_arguments"
"""The only argument of such a call: the text of its arguments."""


def storable_arguments(arguments: Any) -> Any:
    """The arguments, or what is stored in their place."""
    return arguments if _is_finite(arguments) else {_TEXT: json.dumps(arguments, default=str)}


def refuse_arguments(arguments: Any) -> str | None:
    """The error for the model if arguments have such numbers, or have had them, else `None`."""
    is_replaced = isinstance(arguments, Mapping) and arguments.keys() == {_TEXT}
    if is_replaced or not _is_finite(arguments):
        text = arguments[_TEXT] if is_replaced else json.dumps(arguments, default=str)
        return f"invalid arguments: NaN and Infinity are not JSON: {text}"
    return None


def refuse_argument_text(arguments: str) -> str | None:
    """As `refuse_arguments`, for arguments as text. Other text is left to the framework."""
    try:
        return refuse_arguments(json.loads(arguments))
    except (ValueError, RecursionError):
        return None


def _is_finite(value: Any) -> bool:
    left = [value]  # not recursive: a model may nest them deeply
    while left:
        each = left.pop()
        if isinstance(each, float) and not isfinite(each):
            return False
        if isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
    return True
