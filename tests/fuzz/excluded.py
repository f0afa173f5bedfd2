"""Branches that no message reaches in normal operation, or that nothing may reach."""

from __future__ import annotations

from .branches import Branch

_DEFECT = "only a defect"
_AWAY = "only while the database or the broker is unavailable"
_BETWEEN = "only if the row is changed or removed between two statements"
_SLOT = "only if a resumed task takes the slot meanwhile: prefetch equals the number of slots"
_BY_THE_ADAPTER = "the adapters refuse a message without it"
_REFUSED_BEFORE = "refused before, by `Letters._refusal`"

_NEVER = {
    ("engine.refusals", "internal_error", "return"): _DEFECT,
    ("engine.responses", "_try", "set_aside"): _DEFECT,
    ("engine.requests", "on_requests", "len(left) == 1"): _DEFECT,
    ("engine.requests", "_followed_up", "raise"): _DEFECT,
}
_NEVER_ANYWHERE = {"except Exception": _DEFECT, "assert_never(": "only if a type checker is wrong"}

_BRANCHES = {
    ("engine.receive", "request", "if not (message.correlation_id"): _BY_THE_ADAPTER,
    ("engine.receive", "claim", "if not message.app_id"): _BY_THE_ADAPTER,
    ("engine.receive", "_sub_task", "if not message.correlation_id"): _BY_THE_ADAPTER,
    ("engine.receive", "claim", "impostor("): _REFUSED_BEFORE,
    ("engine.receive", "unreadable_claim", "impostor("): _REFUSED_BEFORE,
    ("engine.claim", "take_over", "return"): "only after a lease has expired",
    ("engine.refusals", "bury", "except ConfigurationError"): "only while no dead-letter queue can be declared",
    ("engine.responses", "on_letters", "raise"): _AWAY,
    ("engine.requests", "on_requests", "raise"): _AWAY,
    ("engine.requests", "_take_in", "busy = True"): _SLOT,
    ("engine.requests", "_write_redelivered", "if isinstance(result, Begun): self"): _SLOT,
    ("engine.requests", "_again", "not home.durable"): "the process that holds the task sees it before",
    ("engine.requests", "_revive", "case NotRevived(detail=detail): await self._come_again"): _BETWEEN,
    ("engine.requests", "_revive", "case NotRevived(detail=detail): await self._refuse_in_use"): _BETWEEN,
    ("engine.requests", "_revive", "case NotRevived(): await self._come_again"): _BETWEEN,
    ("engine.requests", "_as_it_is_now", "known is None"): _BETWEEN,
}
_ANYWHERE = {"except NON_DEFECT_ERRORS": _AWAY}

_IN_TIME = {
    ("engine.cancels", "cancelled"): "",
    ("engine.receive", "asked_by"): "return replace(",
    ("engine.responses", "on_responses"): "Locked",
    ("engine.responses", "_fingerprint"): "",
    ("engine.responses", "_without_refusals_of_others"): "call is not None",
    ("engine.responses", "_forward"): "letter is None",
    ("engine.responses", "on_cancels"): "case Locked",
    ("engine.responses", "_cancel_everywhere"): "case Cancel",
    ("engine.responses", "_cancel_here"): "case",
    ("engine.requests", "_is_at_work"): "live",
    ("engine.requests", "_asked_again"): "",
    ("engine.requests", "_ack_if_row_is_enough"): "",
    ("engine.requests", "_write_redelivered"): "",
    ("engine.requests", "_write_first"): "return False",
    ("engine.requests", "_not_begun"): "",
    ("engine.requests", "_met_row"): "",
    ("engine.requests", "_again"): "known",
    ("engine.requests", "_revive"): "case",
    ("engine.requests", "_wish"): "not same_requester",
    ("engine.requests", "_as_it_is_now"): "",
    ("engine.requests", "_wait_for_its_end"): "",
    ("engine.requests", "_reply_again"): "not known.early",
}
"""Branches that depend on the timing of messages, which a busy machine may not provide."""

Rules = dict[tuple[str, str, str], str]


def reason_to_exclude(branch: Branch) -> str | None:
    """Why no message can reach `branch`, or `None`."""
    return _found(branch, _ANYWHERE, _BRANCHES)


def reason_never(branch: Branch) -> str | None:
    """Why nothing may reach `branch`, or `None`."""
    return _found(branch, _NEVER_ANYWHERE, _NEVER)


def is_a_matter_of_time(branch: Branch) -> bool:
    """Whether reaching `branch` depends on the timing of messages."""
    text = _IN_TIME.get(_place(branch))
    return text is not None and text in branch.what


def _place(branch: Branch) -> tuple[str, str]:
    return branch.module.removeprefix("meshpoint."), branch.function.rpartition(".")[2]


def _found(branch: Branch, anywhere: dict[str, str], rules: Rules) -> str | None:
    place = _place(branch)
    reasons = [reason for text, reason in anywhere.items() if text in branch.what]
    reasons += [reason for rule, reason in rules.items() if rule[:2] == place and rule[2] in branch.what]
    return reasons[0] if reasons else None
