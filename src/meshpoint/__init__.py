"""Durable waiting for agents that call agents."""
