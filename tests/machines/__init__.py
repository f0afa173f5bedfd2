"""A model of the checkpoint store, and machines that drive real stores beside it."""
