"""Durable waiting for agents that call agents."""

from __future__ import annotations

from meshpoint.agents.entrypoint import load_agent
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Peer, PeerCall
from meshpoint.agents.replies import Replies
from meshpoint.agents.stateful import StatefulAgent
from meshpoint.errors import (
    AgentFailed,
    AgentMisbehaved,
    ConfigurationError,
    IncompatibleState,
    InvalidInput,
    InvalidOutput,
    MeshpointError,
    NotJson,
    PeerFailed,
    ReplayMismatch,
)
from meshpoint.model.calls import ALL, AT_LEAST, FIRST, Call, Done, Join, Paused
from meshpoint.model.context import A2AContext, TaskExecutionContext
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome, Outcomes
from meshpoint.model.usage import Tokens, TokenUsage
from meshpoint.ports.agent import DurableAgent

__all__ = [
    "ALL",
    "AT_LEAST",
    "FIRST",
    "A2AContext",
    "AgentFailed",
    "AgentMisbehaved",
    "Call",
    "ConfigurationError",
    "Done",
    "DurableAgent",
    "Failed",
    "FailureKind",
    "FunctionAgent",
    "IncompatibleState",
    "InvalidInput",
    "InvalidOutput",
    "Join",
    "MeshpointError",
    "NotJson",
    "Ok",
    "Outcome",
    "Outcomes",
    "Paused",
    "Peer",
    "PeerCall",
    "PeerFailed",
    "ReplayMismatch",
    "Replies",
    "StatefulAgent",
    "TaskExecutionContext",
    "TokenUsage",
    "Tokens",
    "agent",
    "load_agent",
]
