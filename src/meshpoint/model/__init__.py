"""Pure values: what Meshpoint talks about. Nothing here does I/O."""
