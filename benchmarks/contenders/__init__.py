"""Who takes part: Meshpoint, and others that do the same job."""
