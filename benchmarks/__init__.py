"""What Meshpoint costs, and what the same work costs elsewhere: `python -m benchmarks --help`."""
