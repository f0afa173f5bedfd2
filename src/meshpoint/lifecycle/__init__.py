"""The rooms of a task's life, in walking order; `meshpoint.worker` is the corridor between them."""
