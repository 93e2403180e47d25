"""A worker's side of membership: ``step(event, now) -> AgentReady``."""
