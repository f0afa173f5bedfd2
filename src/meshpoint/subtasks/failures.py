"""The error of a subtask, kept so that a function that runs again meets it again."""

from __future__ import annotations

import importlib
import json

from meshpoint.errors import MeshpointError, SubtaskFailed
from meshpoint.model.secrets import masked


def kept(error: Exception) -> str:
    """`error` as text. What looks like a secret in it is masked."""
    kind = type(error)
    told = [masked(each) if isinstance(each, str) else each for each in error.args]
    arguments = told if all(each is None or isinstance(each, str | int | float | bool) for each in told) else None
    known = {"type": f"{kind.__module__}:{kind.__qualname__}", "args": arguments, "message": masked(str(error))}
    return json.dumps(known)


def made_again(name: str, text: str) -> Exception:
    """The error that `kept` told of subtask `name`: of the same type if that can be made from what was kept."""
    known = json.loads(text)
    module, _, qualified = known["type"].partition(":")
    try:
        kind = importlib.import_module(module)
        for step in qualified.split("."):
            kind = getattr(kind, step)
        if known["args"] is not None and isinstance(kind, type) and issubclass(kind, Exception):
            error = kind(*known["args"])
            if str(error) == known["message"]:
                return error
    except (ImportError, AttributeError, TypeError, ValueError, MeshpointError):
        pass  # it is a local class, or wants more than its arguments
    return SubtaskFailed(f"subtask {name!r} failed: {qualified}: {known['message']}")
