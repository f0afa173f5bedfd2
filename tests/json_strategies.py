"""Hypothesis strategies for JSON."""

from __future__ import annotations

from hypothesis import strategies as st

texts = st.text(st.characters(codec="utf-8"), max_size=20)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)
json_dicts = st.dictionaries(texts, json_values, max_size=4)
