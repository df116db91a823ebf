"""The text of token ids in a file: as it is read back, what of it is refused, and how a person sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanscope.snapshot.texts import LONGEST, MOST, kept, legible, read_texts, told


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "␣the"),
        ("<|endoftext|>", "<|endoftext|>"),
        ("\n\n\t", "↵↵⇥"),
        ("\u00a0\u3000", "⟨U+00A0⟩⟨U+3000⟩"),
        ("\x1b[31m\u202e\u2066\u200b\ud800", "⟨U+001B⟩[31m⟨U+202E⟩⟨U+2066⟩⟨U+200B⟩⟨U+D800⟩"),
        ("é🙂", "é🙂"),
    ],
)
def test_a_text_is_seen_whole(text: str, shown: str) -> None:
    """Blanks as signs, and nothing that commands a terminal or turns the line around."""
    assert legible(text, 100) == shown
    assert told(279, {279: text}, 100) == f"279 “{shown}”" and told(280, {279: text}) == "280"


@pytest.mark.parametrize("text", ["x" * 90, "\x00" * 90, "ab\x00" * 30, " " * 90])
def test_a_long_text_is_cut_between_characters(text: str) -> None:
    """What is spelled out is not cut in two, and nothing is longer than it may be."""
    shown = legible(text, 16)
    assert shown.endswith("…") and len(shown) <= 16 and shown.count("⟨") == shown.count("⟩")


def test_what_is_kept_can_be_written() -> None:
    """A few characters, and no half of a pair, which no file in UTF-8 could hold."""
    assert kept("x" * 1000) == "x" * LONGEST
    assert kept("a\ud800b") == "a\ufffdb" and kept("\ude42\ud83d").encode() and kept("🙂" * LONGEST) == "🙂" * LONGEST


def test_texts_are_read_as_they_were_written() -> None:
    """Through JSON, and nothing for a file without them."""
    texts = {0: "", 279: " the", (1 << 63) - 1: "é\x00"}
    assert read_texts(json.loads(json.dumps({str(token): text for token, text in texts.items()}))) == texts
    assert read_texts(None) == {} and read_texts({}) == {}
    assert read_texts({"1": "\ud800"}) == {1: "\ufffd"}


@pytest.mark.parametrize(
    "data",
    [
        [], "x", 1, {"x": "y"}, {"-1": "y"}, {"01": "y"}, {"1": 1}, {"1": None}, {"1": ["y"]}, {"9" * 400: "y"}, {"٣": "y"}, {"1\n": "y"},
        {"1": "y" * (LONGEST + 1)}, {str(1 << 63): "y"}, {str(n): "y" for n in range(MOST + 1)},
    ],
)  # fmt: skip
def test_what_no_release_writes_is_refused(data: Any) -> None:
    """Other types, numbers that are no ids, and more than there may be."""
    with pytest.raises((TypeError, ValueError)):
        read_texts(data)
