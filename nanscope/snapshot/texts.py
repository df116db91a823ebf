"""The text of token ids in a snapshot: what is in the file, how much of it, and how it is shown.

{"279": " the", "151643": "<|endoftext|>"}      279 “␣the”, 151643 “<|endoftext|>”
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nanscope.errors import visible

MOST = 1 << 16  # ids whose text is kept

LONGEST = 64  # characters of one

_LARGEST = 1 << 63


def kept(text: str) -> str:
    """Return what is kept of a text: its first characters, with no half of a pair among them, which no other program would read."""
    return text[:LONGEST].encode("utf-16", "surrogatepass").decode("utf-16", "replace")[:LONGEST]


def read_texts(data: object) -> dict[int, str]:
    """Return token id → text out of JSON data; nothing for none. Raises TypeError or ValueError for what no release writes."""
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise TypeError(f"texts is {type(data).__name__}")
    if len(data) > MOST:
        raise ValueError(f"texts of {len(data)} token ids")
    found = {}
    for token, text in data.items():
        if (
            not re.fullmatch(r"0|[1-9][0-9]{0,18}", str(token))
            or int(token) >= _LARGEST
            or not isinstance(text, str)
            or len(text) > LONGEST
        ):
            raise ValueError("texts are no texts of token ids")
        found[int(token)] = kept(text)
    return found


_BLANKS = {" ": "␣", "\n": "↵", "\t": "⇥"}


def legible(text: str, most: int = LONGEST) -> str:
    """Return the text of a token as a person reads it: blanks are seen, and nothing in it commands a terminal. most: characters."""
    parts = [_BLANKS.get(char) or (f"⟨U+{ord(char):04X}⟩" if char.isspace() else visible(char)) for char in text[: most + 1]]
    if sum(map(len, parts)) <= most:
        return "".join(parts)
    while sum(map(len, parts)) > most - 1:
        parts.pop()
    return f"{''.join(parts)}…"


def told(token: int, texts: Mapping[int, str], most: int = LONGEST) -> str:
    """Return a token id with its text, where that is known: 279 “␣the”."""
    return f"{token} “{legible(texts[token], most)}”" if token in texts else str(token)
