"""Branches that no message can reach while everything works, each with its reason."""

from __future__ import annotations

from .branches import Branch

_FUNCTIONS: dict[tuple[str, str], str] = {
    ("lifecycle.claim", "expire"): "time, not a message",
    ("lifecycle.claim", "take_over"): "time, not a message",
}
_DEFECT = "only a defect, and there must be none"
_RACE = "only between two steps of another replica"
_DIED = "only after a replica died"
_REFUSED_BEFORE = "refused before, by `Letters._refusal`"
_BY_THE_ADAPTER = "the adapters refuse a message without it"
_BRANCHES: dict[tuple[str, str, str], str] = {
    ("lifecycle.receive", "request", "if not (message.correlation_id"): _BY_THE_ADAPTER,
    ("lifecycle.receive", "claim", "if not message.app_id"): _BY_THE_ADAPTER,
    ("lifecycle.receive", "_sub_task", "if not message.correlation_id"): _BY_THE_ADAPTER,
    ("lifecycle.receive", "claim", "impostor("): _REFUSED_BEFORE,
    ("lifecycle.receive", "unreadable_claim", "impostor("): _REFUSED_BEFORE,
    ("lifecycle.senders", "canceller_of", "is_operator"): "no operator's login is configured",
    ("worker.requests", "_take_in", "if redelivered"): _DIED,
    ("lifecycle.receive", "asked_by", "return replace("): "no operator's login is configured",
    ("worker.requests", "_followed_up", "raise"): _DEFECT,
    ("worker.requests", "_is_at_work", "live.settling"): "only while the reply of the task is on its way",
    ("worker.requests", "_is_at_work", "return True"): "only while the reply of the task is on its way",
    ("worker.requests", "_asked_again", "live.beginning"): "only while the row of the task is being written",
    ("worker.requests", "_again", "not home.durable"): "the process that holds the task sees it before",
    ("worker.requests", "_wish", "same_requester"): "no operator's login is configured",
    ("worker.requests", "_reply_again", "not known.early"): "no operator's login is configured",
    ("worker.requests", "_revive", "if wish.order is None"): "no operator's login is configured",
    ("worker.requests", "_revive", "await self._settled(segment)"): "no operator's login is configured",
    ("worker.requests", "_revive", "OTHER_ACTIVE"): "no agent here is exclusive",
    ("worker.requests", "_revive", "case NotRevived("): _RACE,
    ("worker.requests", "_refusal", "dead_reason"): _DIED,
    ("worker.requests", "_refusal", "begin_at_delivery"): _DIED,
    ("worker.requests", "_settled", "dead_reason"): _DIED,
    ("worker.requests", "on_requests", "raise"): "only while the database or the broker is unavailable",
    ("worker.requests", "on_requests", "len(left) == 1"): _DEFECT,
    ("worker.requests", "_as_it_is_now", "known is None"): _RACE,
    ("worker.letters", "_take_in", "again"): _DEFECT,
    ("worker.letters", "_take_in", "return"): _DEFECT,
    ("lifecycle.refuse", "internal_error", "return"): _DEFECT,
}
_FUNCTIONS |= {
    ("worker.requests", "_write_redelivered"): _DIED,
    ("worker.requests", "_not_begun"): _RACE,
    ("worker.requests", "_met_row"): _RACE,
}
_ANYWHERE = {
    "except Exception": _DEFECT,
    "case Locked()": "only while another session holds a row",
    "isinstance(arrival, Locked)": "only while another session holds a row",
    "assert_never(": "a type checker's",
    "except NO_DEFECT": "only while the database or the broker is unavailable",
}


def reason_to_exclude(branch: Branch) -> str | None:
    """Why no message can reach `branch`, or `None`."""
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
