"""All sections, and the constraints between them."""

from __future__ import annotations

from pydantic import Field, model_validator

from meshpoint.errors import ConfigurationError
from meshpoint.settings.agent import AgentSettings
from meshpoint.settings.mesh import MeshSettings
from meshpoint.settings.section import Section


class Settings(Section):
    """A mesh, and the agents that one process serves."""

    mesh: MeshSettings = Field(default_factory=MeshSettings)
    agents: tuple[AgentSettings, ...] = ()

    @model_validator(mode="after")
    def _check_agents(self) -> Settings:
        names: set[str] = set()
        for index, agent in enumerate(self.agents):
            if agent.name in names:
                problem = f"two agents are called {agent.name!r}"
                raise ConfigurationError(f"agents[{index}].name", problem, "use unique names")
            names.add(agent.name)
            if agent.max_message_bytes > self.mesh.max_message_bytes:
                problem = f"{agent.max_message_bytes} is above mesh.max_message_bytes"
                fix = f"use at most {self.mesh.max_message_bytes}, or raise mesh.max_message_bytes"
                raise ConfigurationError(f"agents[{index}].max_message_bytes", problem, fix)
            if agent.begin_at_delivery >= self.mesh.delivery_limit:
                problem = f"{agent.begin_at_delivery} is not below mesh.delivery_limit"
                fix = f"use at most {self.mesh.delivery_limit - 1}, or raise mesh.delivery_limit"
                raise ConfigurationError(f"agents[{index}].begin_at_delivery", problem, fix)
            for key in ("peer_logins", "operator_logins"):
                if getattr(agent, key) and not self.mesh.verifies_logins:
                    problem = "only RabbitMQ verifies logins, but mesh.broker_url is another broker"
                    fix = f"remove {key}, or use amqp://"
                    raise ConfigurationError(f"agents[{index}].{key}", problem, fix)
        return self
