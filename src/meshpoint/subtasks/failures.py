"""Record the error of a subtask, to raise it again in later runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from contextlib import suppress
from types import ModuleType

from meshpoint.errors import PeerFailed, SubtaskFailed
from meshpoint.model.error_text import exception_message, make_storable
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.secrets import mask_secrets


def serialize_error(error: Exception, secret_keys: Collection[str] = ()) -> str:
    """Serialize `error`, limited in length.

    Secrets that `mask_secrets` finds with `secret_keys` become `***`.
    """
    kind = type(error)
    masked_args = [
        mask_secrets(make_storable(each), secret_keys) if isinstance(each, str) else each
        for each in error.args
    ]
    arguments = (
        masked_args
        if all(each is None or isinstance(each, str | int | float | bool) for each in masked_args)
        else None
    )
    message = mask_secrets(exception_message(error), secret_keys)
    record = {
        "type": f"{kind.__module__}:{kind.__qualname__}",
        "args": arguments,
        "message": message,
    }
    if kind is PeerFailed and isinstance(failed := getattr(error, "outcome", None), Failed):
        reason = mask_secrets(failed.message, secret_keys)
        record["peer_failure"] = [str(getattr(error, "peer", "")), failed.kind.value, reason]
    return json.dumps(record)


def rebuild_error(name: str, text: str) -> Exception:
    """Rebuild the error of subtask `name` from the text of `serialize_error`.

    It has the original type if that is loaded and can be constructed. A record never imports
    anything, and calls nothing but an exception's constructor.
    """
    record = json.loads(text)
    module, _, qualified = record["type"].partition(":")
    kind = _loaded_exception(module, qualified)
    if kind is PeerFailed and (failure := record.get("peer_failure")) is not None:
        with suppress(Exception):  # the record is damaged
            peer, failure_kind, reason = failure
            return PeerFailed(peer, Failed(FailureKind(failure_kind), reason))
    if kind is not None and record["args"] is not None:
        with suppress(Exception):  # the constructor has other parameters, or str() fails
            error = kind(*record["args"])
            if str(error) == record["message"]:
                return error
    return SubtaskFailed(f"subtask {name!r} failed: {qualified}: {record['message']}")


def _loaded_exception(module: str, qualified: str) -> type[Exception] | None:
    """Return the exception class with this name, if its module is loaded and defines it."""
    found: object = sys.modules.get(module)
    for step in qualified.split("."):
        found = vars(found).get(step) if isinstance(found, ModuleType | type) else None
    if not (isinstance(found, type) and issubclass(found, Exception)):
        return None
    return found if (found.__module__, found.__qualname__) == (module, qualified) else None
