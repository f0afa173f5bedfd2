"""The wheel, as users install it: each extra alone in a clean environment, and next to other frameworks."""
