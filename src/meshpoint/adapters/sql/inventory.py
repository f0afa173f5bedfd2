"""What each column holds: sealed, a keyed digest, or clear.

A test fails if a column is in none of these lists. A sealed value is bound to the table and the
column, the qualified name of the agent, and the key columns named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Kind(Enum):
    """How a sealed value is stored."""

    PACKED = auto()  # bytes, with the codec's marker inside the envelope
    BYTES = auto()  # bytes without a marker
    TEXT = auto()
    FIXED = auto()  # text that can be searched: equal values have equal envelopes
    JSON = auto()  # a JSON string in place of the value
    LIST = auto()  # a JSON list, each of whose items is a JSON string
    OBJECT = auto()  # a JSON object, each of whose values is a JSON string
    MEMORY = auto()  # a JSON object that SQL reads, with a JSON string under `SEALED_KEY`


SEALED_KEY = "sealed"


@dataclass(frozen=True, slots=True)
class Sealed:
    """A sealed column.

    Attributes:
        table: Its table.
        column: Its name.
        kind: How its values are stored.
        keys: The columns that its values are bound to.
        place: What else they are bound to. Values that SQL copies keep the place of the original.
    """

    table: str
    column: str
    kind: Kind
    keys: tuple[str, ...]
    place: str


def _sealed(column: str, kind: Kind, *keys: str, place: str | None = None) -> Sealed:
    table, _, name = column.partition(".")
    return Sealed(table, name, kind, keys, place or column)


_TASK, _CALL = ("logical_task_id",), ("logical_task_id", "sub_task_id")

A2A_CONTEXT = _sealed("agent_paused_tasks.a2a_context", Kind.TEXT, *_TASK)
ARTIFACTS = _sealed("agent_paused_tasks.produced_artifacts", Kind.TEXT, *_TASK)
ARTIFACT_SIGNALS = _sealed("agent_paused_tasks.artifact_signals_to_return", Kind.TEXT, *_TASK)
RESPONSE_BUFFER = _sealed("agent_paused_tasks.response_buffer", Kind.TEXT, *_TASK)
FLAGS = _sealed("agent_paused_tasks.flags", Kind.TEXT, *_TASK)
TOKEN_USAGE = _sealed("agent_paused_tasks.token_usage", Kind.TEXT, *_TASK)
CONTEXT_REST = _sealed("agent_paused_tasks.context_rest", Kind.TEXT, *_TASK)
SECURITY_CONTEXT = _sealed("agent_paused_tasks.security_context", Kind.PACKED, *_TASK)
STATE = _sealed("agent_paused_tasks.state", Kind.PACKED, *_TASK)
REQUEST = _sealed("agent_paused_tasks.request", Kind.PACKED, *_TASK)
REPLY = _sealed("agent_paused_tasks.reply", Kind.PACKED, *_TASK)
REQUEST_DIGEST = _sealed("agent_paused_tasks.request_digest", Kind.TEXT, *_TASK)
# Doctor groups tasks by reason, so equal reasons of one agent are equal when sealed.
REASON = _sealed("agent_paused_tasks.dead_reason", Kind.FIXED)
PARKED_REASON = _sealed("agent_paused_tasks.parked_reason", Kind.FIXED, place=REASON.place)

LOG_ENTRY = _sealed("agent_task_log.entry", Kind.PACKED, "logical_task_id", "seq")

SIGNAL_DIGEST = _sealed("agent_task_signals.digest", Kind.TEXT, "logical_task_id", "signal_id")
SIGNAL_VALUE = _sealed("agent_task_signals.value", Kind.PACKED, "logical_task_id", "signal_id")
QUESTION = _sealed("agent_task_questions.request", Kind.PACKED, *_CALL)
ANSWER = _sealed("agent_task_questions.answer", Kind.PACKED, *_CALL)
VALUE = _sealed("agent_task_values.value", Kind.PACKED, "logical_task_id", "key")

HEADERS = _sealed("agent_peer_sub_tasks.correlation_data", Kind.TEXT, *_TASK)
CALL_REQUEST = _sealed("agent_peer_sub_tasks.request", Kind.PACKED, *_CALL)
OUTCOME = _sealed("agent_peer_sub_tasks.outcome", Kind.PACKED, *_CALL)

# Searched among all agents of the namespace, so it is bound to the namespace only.
SUBJECT = _sealed("agent_operations.subject", Kind.FIXED)
PARAMETERS = _sealed("agent_operations.parameters", Kind.TEXT, "operation_id")
CHILDREN = _sealed("agent_operations.children", Kind.LIST, "operation_id")

RECORD = _sealed("agent_subtask_records.record", Kind.JSON, "analysis_id")
RESULT = _sealed("agent_subtask_records.result", Kind.TEXT, "analysis_id", "name")

_CHECKPOINT = (
    _sealed("agent_checkpoints.subject", Kind.TEXT, "analysis_id"),
    _sealed("agent_checkpoints.working_memory", Kind.MEMORY, "analysis_id"),
    _sealed(
        "agent_checkpoints.interim_results", Kind.OBJECT, "analysis_id", place=RESULT.place
    ),  # each value is also bound to its key
    _sealed("agent_checkpoints.subtasks", Kind.LIST, "analysis_id", place=RECORD.place),
    _sealed("agent_checkpoints.agent_config", Kind.JSON, "analysis_id"),
    _sealed("agent_checkpoints.failure_reason", Kind.TEXT, "analysis_id"),
    _sealed("agent_checkpoints.error_details", Kind.JSON, "analysis_id"),
    _sealed("agent_checkpoints.l1_snapshot_hash", Kind.TEXT, "analysis_id"),
    _sealed("agent_checkpoints.l1_snapshot", Kind.BYTES, "analysis_id"),
)
(
    CHECKPOINT_SUBJECT,
    WORKING_MEMORY,
    INTERIM_RESULTS,
    SUBTASKS,
    AGENT_CONFIG,
    FAILURE_REASON,
    ERROR_DETAILS,
    SNAPSHOT_HASH,
    SNAPSHOT,
) = _CHECKPOINT

# What operators did concerns all agents of the namespace, so it is bound to the namespace only.
ACTION_DETAILS = _sealed("agent_operator_actions.details", Kind.TEXT, "action_id")
ACTION_RESULT = _sealed("agent_operator_actions.result", Kind.TEXT, "action_id")

MESSAGES = _sealed("meshpoint_conversation_turns.messages", Kind.TEXT, "conversation", "task_id")
"""In a table of its own, which is not among the store's."""

SEALED = (
    *(A2A_CONTEXT, ARTIFACTS, ARTIFACT_SIGNALS, RESPONSE_BUFFER, FLAGS, TOKEN_USAGE),
    *(CONTEXT_REST, SECURITY_CONTEXT, STATE, REQUEST, REPLY, REQUEST_DIGEST, REASON),
    *(PARKED_REASON, LOG_ENTRY, SIGNAL_DIGEST, SIGNAL_VALUE, QUESTION, ANSWER, VALUE),
    *(HEADERS, CALL_REQUEST, OUTCOME, SUBJECT, PARAMETERS, CHILDREN, RECORD, RESULT),
    *(ACTION_DETAILS, ACTION_RESULT),
    *_CHECKPOINT,
    *(
        _sealed(
            f"agent_checkpoints_archive.{each.column}", each.kind, *each.keys, place=each.place
        )
        for each in _CHECKPOINT
    ),
)
"""The sealed columns."""

BOUND_TO_NAMESPACE = frozenset({SUBJECT, ACTION_DETAILS, ACTION_RESULT})
"""The columns whose values are bound to the namespace in place of the agent."""

USER, SESSION = "user", "session"
"""Purposes of keyed digests."""

DIGESTED = {
    "agent_paused_tasks.user_id": USER,
    "agent_paused_tasks.effective_session_id": SESSION,
}
"""Copies of context values for people, which become keyed digests, with their purposes."""

CLEAR = {
    "agent_paused_tasks": """logical_task_id agent_name status generation fence run_id owner
        attempt wake_at cancel_requested current_invocation_id state_format app_version framework
        reply_to requester_app_id parent_task_id task_deadline idle_timeout keep_alive_at
        reply_sent reply_attempts incompatible_since checkpointed_at ended_at expires_at
        checkpoint_seq resume_token retry_count rescues tried_versions log_seq suspended_at
        further_reply_to result_ttl""",
    "agent_task_log": "logical_task_id seq run_id",
    "agent_task_signals": "logical_task_id seq signal_id name sender size sent_at received_at",
    "agent_task_questions": "logical_task_id sub_task_id is_kept",
    "agent_task_values": "logical_task_id key set_at",
    "agent_peer_sub_tasks": """logical_task_id sub_task_id agent_name invocation_id seq call_id
        peer_agent status claim_id dispatched_at send_due_at send_attempts idle_timeout
        timeout_deadline absolute_deadline created_at unroutable_since retry""",
    "agent_parallel_invocations": """logical_task_id invocation_id total_expected completed_count
        succeeded_count needed join_deadline agent_name send_due_at send_attempts dispatched_at""",
    "agent_operations": "operation_id agent_name type exclusive preserve created_at",
    # The copy key authenticates only copies in the clear.
    "agent_mesh_secrets": "namespace copy_key",
    "agent_mesh_keys": "agent_name key_id used_at",
    "agent_checkpoints": """analysis_id agent_type seq checkpoint_time progress_pct current_subtask
        completed_subtasks pending_subtasks planned_subtasks retry_count agent_version
        created_at""",
    "agent_subtask_records": "analysis_id agent_type name seq place",
    "agent_replicas": """agent_name replica_id release app_version state_formats slots host
        is_draining started_at seen_at expires_at""",
    "agent_task_timelines": """id logical_task_id agent_name at change replica generation fence
        attempt calls completed total peer ref""",
    "agent_operator_actions": """namespace action_id actor action target started_at ended_at
        succeeded""",
    "agent_checkpoints_archive": """archived_at analysis_id agent_type seq checkpoint_time
        progress_pct current_subtask completed_subtasks pending_subtasks planned_subtasks
        retry_count agent_version created_at""",
}
"""The clear columns: ids, names, states, times, counters, addresses and progress."""
