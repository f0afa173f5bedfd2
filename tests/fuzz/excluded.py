"""Branches that no message can reach while everything works, and those that nothing may reach, with the reasons."""

from __future__ import annotations

from .branches import Branch

_DEFECT = "only a defect"
_AWAY = "only while the database or the broker is unavailable"
_BETWEEN = "only if the row is changed or removed between two statements"
_SLOT = "only if a resumed task takes the slot meanwhile: as many requests are read as there are slots"
_BY_THE_ADAPTER = "the adapters refuse a message without it"
_REFUSED_BEFORE = "refused before, by `Letters._refusal`"

_NEVER = {
    ("lifecycle.refuse", "internal_error", "return"): _DEFECT,
    ("worker.letters", "_try", "set_aside"): _DEFECT,
    ("worker.requests", "on_requests", "len(left) == 1"): _DEFECT,
    ("worker.requests", "_followed_up", "raise"): _DEFECT,
}
_NEVER_ANYWHERE = {"except Exception": _DEFECT, "assert_never(": "only if a type checker is wrong"}

_BRANCHES = {
    ("lifecycle.receive", "request", "if not (message.correlation_id"): _BY_THE_ADAPTER,
    ("lifecycle.receive", "claim", "if not message.app_id"): _BY_THE_ADAPTER,
    ("lifecycle.receive", "_sub_task", "if not message.correlation_id"): _BY_THE_ADAPTER,
    ("lifecycle.receive", "claim", "impostor("): _REFUSED_BEFORE,
    ("lifecycle.receive", "unreadable_claim", "impostor("): _REFUSED_BEFORE,
    ("lifecycle.claim", "take_over", "return"): "only after a lease has ended",
    ("lifecycle.refuse", "bury", "except ConfigurationError"): "only while no dead-letter queue can be declared",
    ("worker.letters", "on_letters", "raise"): _AWAY,
    ("worker.requests", "on_requests", "raise"): _AWAY,
    ("worker.requests", "_take_in", "busy = True"): _SLOT,
    ("worker.requests", "_write_redelivered", "if isinstance(result, Begun): self"): _SLOT,
    ("worker.requests", "_again", "not home.durable"): "the process that holds the task sees it before",
    ("worker.requests", "_revive", "case NotRevived(detail=detail): await self._come_again"): _BETWEEN,
    ("worker.requests", "_revive", "case NotRevived(detail=detail): await self._refuse_in_use"): _BETWEEN,
    ("worker.requests", "_revive", "case NotRevived(): await self._come_again"): _BETWEEN,
    ("worker.requests", "_as_it_is_now", "known is None"): _BETWEEN,
}
_ANYWHERE = {"except NO_DEFECT": _AWAY}

_IN_TIME = {
    ("lifecycle.cancel", "cancelled"): "",
    ("lifecycle.receive", "asked_by"): "return replace(",
    ("worker.letters", "on_responses"): "Locked",
    ("worker.letters", "_fingerprint"): "",
    ("worker.letters", "_without_refusals_of_others"): "call is not None",
    ("worker.letters", "_forward"): "letter is None",
    ("worker.letters", "on_cancels"): "case Locked",
    ("worker.letters", "_cancel_everywhere"): "case Cancel",
    ("worker.letters", "_cancel_here"): "case",
    ("worker.requests", "_is_at_work"): "live",
    ("worker.requests", "_asked_again"): "",
    ("worker.requests", "_ack_if_row_is_enough"): "",
    ("worker.requests", "_write_redelivered"): "",
    ("worker.requests", "_write_first"): "return False",
    ("worker.requests", "_not_begun"): "",
    ("worker.requests", "_met_row"): "",
    ("worker.requests", "_again"): "known",
    ("worker.requests", "_revive"): "case",
    ("worker.requests", "_wish"): "not same_requester",
    ("worker.requests", "_as_it_is_now"): "",
    ("worker.requests", "_wait_for_its_end"): "",
    ("worker.requests", "_reply_again"): "not known.early",
}
"""Branches where messages have to meet in time, which they may not on a busy machine."""

Rules = dict[tuple[str, str, str], str]


def reason_to_exclude(branch: Branch) -> str | None:
    """Why no message can reach `branch`, or `None`."""
    return _found(branch, _ANYWHERE, _BRANCHES)


def reason_never(branch: Branch) -> str | None:
    """Why nothing may reach `branch`, or `None`."""
    return _found(branch, _NEVER_ANYWHERE, _NEVER)


def is_a_matter_of_time(branch: Branch) -> bool:
    """Whether messages reach `branch` only if they meet in time."""
    text = _IN_TIME.get(_place(branch))
    return text is not None and text in branch.what


def _place(branch: Branch) -> tuple[str, str]:
    return branch.module.removeprefix("meshpoint."), branch.function.rpartition(".")[2]


def _found(branch: Branch, anywhere: dict[str, str], rules: Rules) -> str | None:
    place = _place(branch)
    reasons = [reason for text, reason in anywhere.items() if text in branch.what]
    reasons += [reason for rule, reason in rules.items() if rule[:2] == place and rule[2] in branch.what]
    return reasons[0] if reasons else None
