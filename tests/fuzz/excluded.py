"""Branches that no message can reach while everything works, each with its reason."""

from __future__ import annotations

from .branches import Branch

_FUNCTIONS = {
    ("lifecycle.claim", "expire"): "time, not a message",
    ("lifecycle.claim", "take_over"): "time, not a message",
}
_BRANCHES: dict[tuple[str, str, str], str] = {}
_ANYWHERE = {
    "assert_never(": "a type checker's",
    "except NO_DEFECT": "only while the database or the broker is unavailable",
}


def reason_to_exclude(branch: Branch) -> str | None:
    """Why no message can reach `branch`, if so."""
    module = branch.module.removeprefix("meshpoint.")
    for text, reason in _ANYWHERE.items():
        if text in branch.what:
            return reason
    name = branch.function.rpartition(".")[2]
    return _FUNCTIONS.get((module, name)) or next(
        (
            reason
            for (where, function, text), reason in _BRANCHES.items()
            if where == module and function == name and text in branch.what
        ),
        None,
    )
