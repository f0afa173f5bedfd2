"""Agents of other frameworks, wrapped as agents of the mesh.

Each framework has a module of its own, which needs the extra of the same name. What they share is
here: peers as tools, the history of a task, the steps of a segment.
"""

from __future__ import annotations

from meshpoint.frameworks.approval import APPROVAL, Approval
from meshpoint.frameworks.budget import BUDGET, Budget, Price
from meshpoint.frameworks.peers import PeerTool, peer_tools

__all__ = ["APPROVAL", "BUDGET", "Approval", "Budget", "PeerTool", "Price", "peer_tools"]
