"""Durable waiting for agents that call agents."""

from __future__ import annotations

from meshpoint._version import __version__
from meshpoint.agents.discovery import offer_peers, peer_of_card
from meshpoint.agents.entrypoint import load_agent
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Addressable, Peer, PeerCall
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.client.found_agents import AgentReplica, FoundAgent
from meshpoint.client.mesh import Mesh
from meshpoint.client.requests import SendOptions
from meshpoint.client.task_handle import TaskHandle
from meshpoint.client.updates import (
    ArtifactUpdate,
    Ended,
    QuestionUpdate,
    StatusUpdate,
    TextDelta,
    Update,
)
from meshpoint.connecting import Connecting, connect
from meshpoint.errors import (
    AgentFailed,
    AgentMisbehaved,
    AnswerRefused,
    ConfigurationError,
    ConsistencyError,
    IncompatibleState,
    InvalidInput,
    InvalidOption,
    InvalidOutput,
    MemoryLost,
    MemoryRefused,
    MemoryUnavailable,
    MeshClosed,
    MeshpointError,
    NoCheckpoint,
    NotJson,
    OperationCompleted,
    OperationConflict,
    OperationNotFound,
    OperationRunning,
    OtherRequester,
    OutcomeUnknown,
    PeerFailed,
    QuestionNotOpen,
    QueueFull,
    ReplayMismatch,
    ResumeRefused,
    SendInDoubt,
    SignalNotKept,
    SignalRefused,
    StepFailed,
    SubtaskRefused,
    TaskCancelled,
    TaskExists,
    TaskFailed,
    TaskNotFound,
    TaskTimeout,
    TooManyFollowers,
    UnknownAgent,
)
from meshpoint.model.agent_memory import AgentMemory
from meshpoint.model.calls import ALL, AT_LEAST, FIRST, Call, Done, Join, Paused
from meshpoint.model.cards import AgentCard, AgentSkill
from meshpoint.model.context import A2AContext, Context, TaskExecutionContext
from meshpoint.model.current_context import current_context
from meshpoint.model.log_context import LogContextFilter
from meshpoint.model.memory import MemoryRecovery, MemorySource
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome, Outcomes
from meshpoint.model.questions import Question, QuestionWait
from meshpoint.model.recorded_work import step
from meshpoint.model.retry_policy import Duration, RetryPolicy
from meshpoint.model.secrets import Secret
from meshpoint.model.signals import Signal
from meshpoint.model.subtasks import SubtaskProgress
from meshpoint.model.task_status import OpenWait, TaskStatus
from meshpoint.model.usage import Tokens, TokenUsage
from meshpoint.model.waitable import Waitable
from meshpoint.model.waits import Sleep
from meshpoint.ports.agent import DurableAgent
from meshpoint.subtasks.checkpointer import AgentCheckpointer
from meshpoint.subtasks.migrating import migrates
from meshpoint.subtasks.versions import subtask

__all__ = [
    "ALL",
    "AT_LEAST",
    "FIRST",
    "A2AContext",
    "Addressable",
    "AgentCard",
    "AgentCheckpointer",
    "AgentFailed",
    "AgentMemory",
    "AgentMisbehaved",
    "AgentReplica",
    "AgentSkill",
    "AnswerRefused",
    "ArtifactUpdate",
    "Call",
    "ConfigurationError",
    "Connecting",
    "ConsistencyError",
    "Context",
    "Done",
    "DurableAgent",
    "Duration",
    "Ended",
    "Failed",
    "FailureKind",
    "FoundAgent",
    "FunctionAgent",
    "IncompatibleState",
    "InvalidInput",
    "InvalidOption",
    "InvalidOutput",
    "Join",
    "LogContextFilter",
    "MemoryLost",
    "MemoryRecovery",
    "MemoryRefused",
    "MemorySource",
    "MemoryUnavailable",
    "Mesh",
    "MeshClosed",
    "MeshpointError",
    "NoCheckpoint",
    "NotJson",
    "Ok",
    "OpenWait",
    "OperationCompleted",
    "OperationConflict",
    "OperationNotFound",
    "OperationRunning",
    "OtherRequester",
    "Outcome",
    "OutcomeUnknown",
    "Outcomes",
    "Paused",
    "Peer",
    "PeerCall",
    "PeerFailed",
    "Question",
    "QuestionNotOpen",
    "QuestionUpdate",
    "QuestionWait",
    "QueueFull",
    "ReplayMismatch",
    "Replies",
    "ResumeRefused",
    "RetryPolicy",
    "Secret",
    "SendInDoubt",
    "SendOptions",
    "Signal",
    "SignalNotKept",
    "SignalRefused",
    "Sleep",
    "StatefulAgent",
    "StatusUpdate",
    "StepFailed",
    "SubtaskProgress",
    "SubtaskRefused",
    "TaskCancelled",
    "TaskExecutionContext",
    "TaskExists",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "TaskStatus",
    "TaskTimeout",
    "TextDelta",
    "TokenUsage",
    "Tokens",
    "TooManyFollowers",
    "UnknownAgent",
    "Update",
    "Waitable",
    "__version__",
    "agent",
    "connect",
    "current_context",
    "load_agent",
    "migrates",
    "offer_peers",
    "peer_of_card",
    "step",
    "subtask",
]
