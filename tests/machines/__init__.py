"""A model of the checkpoint store, and state machines that compare real stores with it."""
