"""Stores for the conversations of agents; see `conversations=` of each framework's `durable`."""

from __future__ import annotations

from meshpoint.adapters.sql.conversations import SqlConversations
from meshpoint.ports.conversations import ConversationKey, Conversations, ConversationTurn

__all__ = ["ConversationKey", "ConversationTurn", "Conversations", "SqlConversations"]
