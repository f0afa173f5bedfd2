"""Branches that no message reaches in normal operation, or that nothing may reach."""

from __future__ import annotations

from collections.abc import Sequence

from .branches import Branch

_DEFECT = "only a defect"
_UNAVAILABLE = "only while the database or the broker is unavailable"
_CONCURRENT_CHANGE = "only if the row is changed or removed between two statements"
_SLOT_TAKEN = (
    "only if a resumed task takes the slot meanwhile: prefetch equals the number of slots"
)
_BY_THE_ADAPTER = "the adapters refuse a message without it"
_BY_A_REPLICA = "only a replica of the agent may send one, and its own can be read"
_REFUSED_EARLIER = "refused before, by `PeerMessages._find_refusal_reason`"

_NEVER = {
    ("engine.refusals", "internal_error_text", "return"): _DEFECT,
    ("engine.responses", "_handle_batch", "dead_letter_defective"): _DEFECT,
    ("engine.requests", "handle_requests", "len(remaining) == 1"): _DEFECT,
    ("engine.requests", "_answer_or_requeue", "raise"): _DEFECT,
}
_NEVER_ANYWHERE = {"except Exception": _DEFECT, "assert_never(": "only if a type checker is wrong"}

_BRANCHES = {
    ("engine.parsing", "parse_request", "if not (message.correlation_id"): _BY_THE_ADAPTER,
    ("engine.parsing", "parse_claim", "if not message.app_id"): _BY_THE_ADAPTER,
    ("engine.parsing", "_sub_task_id", "if not message.correlation_id"): _BY_THE_ADAPTER,
    ("engine.parsing", "parse_claim", "impersonation_error("): _REFUSED_EARLIER,
    ("engine.parsing", "claim_for_unreadable", "impersonation_error("): _REFUSED_EARLIER,
    (
        "engine.refusals",
        "dead_letter",
        "except ConfigurationError",
    ): "only while no dead-letter queue can be declared",
    ("engine.responses", "handle_messages", "raise"): _UNAVAILABLE,
    (
        "engine.throttle",
        "_get_budget",
        "popitem",
    ): "only while more than 10,000 tasks send status updates",
    ("engine.requests", "handle_requests", "raise"): _UNAVAILABLE,
    ("engine.requests", "_process_batch", "is_busy = True"): _SLOT_TAKEN,
    ("engine.requests", "_process_batch", "not is_complete"): _UNAVAILABLE,
    ("engine.requests", "_postpone_unknown", "pending.remove"): _UNAVAILABLE,
    (
        "engine.requests",
        "_begin_redelivered",
        "if isinstance(result, BeginCommitted): self",
    ): _SLOT_TAKEN,
    (
        "engine.requests",
        "_add_repeated",
        "if await self._settlement.attaches.attach_sender(in_process, command)",
    ): "only if the task ends between two statements",
    (
        "engine.request_answers",
        "_handle_repeated",
        "not backend.is_shared",
    ): "the process that holds the task sees it before",
    (
        "engine.request_answers",
        "_revive",
        "case NotRevived(detail=detail): await self.refuse_id_in_use",
    ): _CONCURRENT_CHANGE,
    (
        "engine.request_answers",
        "_revive",
        "case NotRevived(): await self.requeue",
    ): _CONCURRENT_CHANGE,
    ("engine.request_answers", "_reread_row", "is None"): _CONCURRENT_CHANGE,
    ("engine.request_answers", "_stored_request", "except"): "only if a row is damaged",
    ("engine.attaches", "_show_open_questions", "is None"): _CONCURRENT_CHANGE,
    ("engine.responses", "handle_responses", "except StoreUnavailable"): _UNAVAILABLE,
    ("engine.responses", "handle_completions", "except StoreUnavailable"): _UNAVAILABLE,
    ("engine.responses", "handle_signals", "except StoreUnavailable"): _UNAVAILABLE,
    ("engine.responses", "handle_reads", "except StoreUnavailable"): _UNAVAILABLE,
    ("engine.responses", "_handle_commands", "except StoreUnavailable"): _UNAVAILABLE,
    ("engine.responses", "_handle_commands", "return"): _UNAVAILABLE,
    ("engine.responses", "handle_denials", "except PoisonMessage"): _BY_A_REPLICA,
    ("engine.unknown_tasks", "_if_available", "except Unavailable"): _UNAVAILABLE,
    ("engine.completions", "complete", "except StoreUnavailable"): _UNAVAILABLE,
    ("engine.completions", "complete", "raise"): _UNAVAILABLE,
    (
        "engine.completions",
        "_record",
        "# older task",
    ): "only for a task that paused in the database before checkpointing was switched off",
    ("engine.completions", "_answer", "case MailRefused"): _CONCURRENT_CHANGE,
    ("engine.completions", "_answer", "case _"): _CONCURRENT_CHANGE,
}
_ANYWHERE = {"except NON_DEFECT_ERRORS": _UNAVAILABLE}

_TIMING_DEPENDENT = {
    ("engine.parsing", "with_requester"): "return replace(",
    ("engine.responses", "_settle_responses"): "TaskLocked",
    ("engine.responses", "_request_fingerprint"): "",
    ("engine.responses", "_drop_unrelated_refusals"): "dispatch is not None",
    ("engine.responses", "_build_forwarded_statuses"): "not target.followers",
    ("engine.responses", "_handle_commands"): "case TaskLocked",
    ("engine.responses", "handle_completions"): "not locked is None",
    ("engine.responses", "handle_signals"): "not locked is None",
    ("engine.attaches", "attempt"): "TaskLocked",
    ("engine.responses", "_cancel_and_broadcast"): "case Cancel",
    ("engine.responses", "_cancel_in_process"): "case",
    ("engine.requests", "_delegate_to_local_task"): "live",
    ("engine.requests", "_begin_delayed"): "not isinstance",
    ("engine.requests", "_add_repeated"): "",
    ("engine.requests", "_find_request"): "",
    ("engine.requests", "_redirect_reply"): "",
    ("engine.requests", "_begin_redelivered"): "",
    ("engine.requests", "_begin_before_run"): "return False",
    ("engine.requests", "_settle_not_begun"): "",
    ("engine.request_answers", "settle_id_conflict"): "",
    ("engine.request_answers", "handle_existing"): "existing",
    ("engine.request_answers", "_handle_repeated"): "existing",
    ("engine.request_answers", "answer_start"): "",
    ("engine.requests", "_add_start"): "",
    ("engine.request_answers", "_attach_sender"): "",
    ("engine.request_answers", "_stored_request"): "",
    ("engine.request_answers", "_revive"): "case",
    ("engine.request_answers", "_build_revive"): "not same_requester",
    ("engine.request_answers", "_settle_from_current_row"): "",
    ("engine.request_answers", "_leave_to_task"): "",
    ("engine.request_answers", "_resend_reply"): "not existing.is_early_cancel",
    # where a task is when the message arrives: in memory, in the database, in a queue, or ended
    ("engine.attaches", "_attach_here"): "",
    ("engine.attaches", "report_dropped_later"): "",
    ("engine.attaches", "attach_in_process"): "",
    ("engine.attaches", "settle_unrecorded"): "",
    ("engine.completions", "_answer"): "",
    ("engine.completions", "_explain_unasked"): "",
    ("engine.signals", "_find_here"): "",
    ("engine.signals", "_read"): "segments.get",
    ("engine.signals", "_forward_early"): "",
    ("engine.signals", "_forward_unknown"): "",
    ("engine.status_queries", "answer_and_broadcast"): "",
    ("engine.status_queries", "answer_in_process"): "",
    ("engine.unknown_tasks", "search"): "",
    ("engine.unknown_tasks", "_conclude"): "",
    ("engine.unknown_tasks", "_has_row"): "",
    ("engine.unknown_tasks", "add_denial"): "",
}
"""Branches that depend on the timing of messages, which a busy machine may not provide."""

Rules = dict[tuple[str, str, str], str]


def reason_to_exclude(branch: Branch) -> str | None:
    """Why no message can reach `branch`, or `None`."""
    return _matching_reason(branch, _ANYWHERE, _BRANCHES)


def reason_unreachable(branch: Branch) -> str | None:
    """Why nothing may reach `branch`, or `None`."""
    return _matching_reason(branch, _NEVER_ANYWHERE, _NEVER)


def depends_on_timing(branch: Branch) -> bool:
    """Whether reaching `branch` depends on the timing of messages."""
    text = _TIMING_DEPENDENT.get(_location(branch))
    return text is not None and text in branch.text


def rules_without_branch(branches: Sequence[Branch]) -> list[str]:
    """Rules that match none of `branches`, because the source has changed."""
    anywhere = [(("", ""), text) for text in (*_ANYWHERE, *_NEVER_ANYWHERE)]
    located = [((module, function), text) for module, function, text in (*_BRANCHES, *_NEVER)]
    rules = [*anywhere, *located, *_TIMING_DEPENDENT.items()]
    return [
        ": ".join((*location, text))
        for location, text in rules
        if not any(
            location in {("", ""), _location(branch)} and text in branch.text
            for branch in branches
        )
    ]


def _location(branch: Branch) -> tuple[str, str]:
    return branch.module.removeprefix("meshpoint."), branch.function.rpartition(".")[2]


def _matching_reason(branch: Branch, anywhere: dict[str, str], rules: Rules) -> str | None:
    location = _location(branch)
    reasons = [reason for text, reason in anywhere.items() if text in branch.text]
    reasons += [
        reason for rule, reason in rules.items() if rule[:2] == location and rule[2] in branch.text
    ]
    return reasons[0] if reasons else None
