"""Ways to write an agent."""
