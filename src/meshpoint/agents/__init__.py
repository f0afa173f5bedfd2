"""The three ways to write an agent, and typed handles to its peers."""
