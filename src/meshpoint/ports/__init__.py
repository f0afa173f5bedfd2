"""What Meshpoint needs from the outside, as small protocols. `meshpoint.conformance` tests any implementation."""
