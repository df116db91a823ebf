"""Text and numbers of a run as reports show them: nothing hidden, nothing hostile, cut to a limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import odd

from nanscope.report.clean import clean


@given(st.text(), st.integers(1, 40))
def test_clean_hides_nothing_and_stays_short(text: str, limit: int) -> None:
    """One line, no character that hides or reorders another, at most `limit` long."""
    cleaned = clean(text, limit)
    assert not odd(cleaned) and "\n" not in cleaned and "\t" not in cleaned and len(cleaned) <= limit
    assert cleaned.encode().decode() == cleaned


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain − text ℓ", "plain − text ℓ"),
        ("\x1b[2J\x7f", "⟨U+001B⟩[2J⟨U+007F⟩"),
        ("a\n   b", "a b"),
        ("a\tb", "a    b"),
        ("abc\u202edef", "abc⟨U+202E⟩def"),
        ("\ud800", "⟨U+D800⟩"),
        ("x" * 50, "x" * 23 + "…"),
        (None, "None"),
        (412, "412"),
    ],
)
def test_clean(text: object, shown: str) -> None:
    """What people write stays, what deceives is spelled out."""
    assert clean(text, 24) == shown
