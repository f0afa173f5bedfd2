"""User settings: YAML files with `${VAR}`, and `MESHPOINT_` variables that override them.

Call `load`. Every mistake ends as one `ConfigurationError` that names the key and the fix.
"""

from meshpoint.settings.agent import AgentOptions, AgentSettings, StoreSettings
from meshpoint.settings.loading import Settings, load
from meshpoint.settings.mesh import MeshSettings

__all__ = ["AgentOptions", "AgentSettings", "MeshSettings", "Settings", "StoreSettings", "load"]
