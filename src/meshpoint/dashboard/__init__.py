"""The operators' dashboard: an ASGI application of its own, or mounted in another one."""

from meshpoint.extras import DASHBOARD

DASHBOARD.require("meshpoint.dashboard")

from meshpoint.dashboard.access import (  # noqa: E402  # after the check
    Access,
    LocalAccess,
    ProxyAccess,
    Role,
    TokenAccess,
    User,
)
from meshpoint.dashboard.app import Dashboard  # noqa: E402

__all__ = ["Access", "Dashboard", "LocalAccess", "ProxyAccess", "Role", "TokenAccess", "User"]
