"""What Meshpoint needs from the outside, as small protocols; `testing.conformance` tests implementations."""
