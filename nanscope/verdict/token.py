"""The token that an origin belongs to: its id, and what that stands for, where both were saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nanscope.locate.layout import Layout
from nanscope.roles import Role
from nanscope.snapshot.texts import LONGEST, told
from nanscope.verdict.tokens import RECORDED, TokenMap


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the batch. text: as its tokenizer has it, None where that was not saved."""

    id: int
    text: str | None = None

    def words(self, most: int = LONGEST) -> str:
        """Return it as a person reads it: 279 “␣the”. most: characters of the text."""
        return told(self.id, {} if self.text is None else {self.id: self.text}, most)


def with_texts(tokens: TokenMap | None, texts: Mapping[int, str]) -> TokenMap | None:
    """Return a map with the text of the token ids that are kept in it."""
    if tokens is None or not texts:
        return tokens
    ids = {
        cell
        for track in tokens.tracks
        if track.role == Role.RESPONSE_IDS
        for window in track.cells[RECORDED]
        for row in window
        for cell in row
    }
    return replace(tokens, texts={int(one): texts[int(one)] for one in sorted(ids) if math.isfinite(one) and int(one) in texts})


def token_at_origin(tokens: TokenMap | None) -> Token | None:
    """Return the token at the origin, None where its id was not saved, or the origin is one number a row."""
    if tokens is None or tokens.layout is Layout.ROWS or not tokens.windows:  # a row is no token of its own
        return None
    ids = next((track for track in tokens.tracks if track.role == Role.RESPONSE_IDS), None)
    if ids is None:
        return None
    window = tokens.windows[0]
    found = ids.cells[RECORDED][0][tokens.row - window.row][0 if ids.per_row else tokens.column - window.column]
    return Token(int(found), tokens.texts.get(int(found))) if math.isfinite(found) else None
