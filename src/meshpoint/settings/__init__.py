"""User settings: YAML files with `${VAR}`, and `MESHPOINT_` variables that override them.

Call `load`. Every mistake ends as one `ConfigurationError` that names the key and the fix.
"""

from meshpoint.settings.agent import AgentSettings
from meshpoint.settings.loading import load
from meshpoint.settings.mesh import MeshSettings
from meshpoint.settings.root import Settings

__all__ = ["AgentSettings", "MeshSettings", "Settings", "load"]
