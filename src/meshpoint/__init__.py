"""Durable waiting for agents that call agents."""

from __future__ import annotations

from meshpoint._version import __version__
from meshpoint.agents.entrypoint import load_agent
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Addressable, Peer, PeerCall
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.client.mesh import Mesh
from meshpoint.client.requests import SendOptions
from meshpoint.client.task_handle import TaskHandle
from meshpoint.client.updates import ArtifactUpdate, Ended, StatusUpdate, Update
from meshpoint.connecting import Connecting, connect
from meshpoint.errors import (
    AgentFailed,
    AgentMisbehaved,
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
    PeerFailed,
    QueueFull,
    ReplayMismatch,
    ResumeRefused,
    SendInDoubt,
    StepFailed,
    SubtaskRefused,
    TaskCancelled,
    TaskFailed,
    TaskTimeout,
    UnknownAgent,
)
from meshpoint.model.agent_memory import AgentMemory
from meshpoint.model.calls import ALL, AT_LEAST, FIRST, Call, Done, Join, Paused
from meshpoint.model.context import A2AContext, TaskExecutionContext
from meshpoint.model.log_context import LogContextFilter
from meshpoint.model.memory import MemoryRecovery, MemorySource
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome, Outcomes
from meshpoint.model.recorded_work import step
from meshpoint.model.retry_policy import Duration, RetryPolicy
from meshpoint.model.secrets import Secret
from meshpoint.model.subtasks import SubtaskProgress
from meshpoint.model.usage import Tokens, TokenUsage
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
    "AgentCheckpointer",
    "AgentFailed",
    "AgentMemory",
    "AgentMisbehaved",
    "ArtifactUpdate",
    "Call",
    "ConfigurationError",
    "Connecting",
    "ConsistencyError",
    "Done",
    "DurableAgent",
    "Duration",
    "Ended",
    "Failed",
    "FailureKind",
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
    "OperationCompleted",
    "OperationConflict",
    "OperationNotFound",
    "OperationRunning",
    "Outcome",
    "Outcomes",
    "Paused",
    "Peer",
    "PeerCall",
    "PeerFailed",
    "QueueFull",
    "ReplayMismatch",
    "Replies",
    "ResumeRefused",
    "RetryPolicy",
    "Secret",
    "SendInDoubt",
    "SendOptions",
    "StatefulAgent",
    "StatusUpdate",
    "StepFailed",
    "SubtaskProgress",
    "SubtaskRefused",
    "TaskCancelled",
    "TaskExecutionContext",
    "TaskFailed",
    "TaskHandle",
    "TaskTimeout",
    "TokenUsage",
    "Tokens",
    "UnknownAgent",
    "Update",
    "__version__",
    "agent",
    "connect",
    "load_agent",
    "migrates",
    "step",
    "subtask",
]
