"""The wheel as users install it: each extra alone, and next to other frameworks."""
