"""The origin in words: where it is, what code made it, and what that computed."""

from __future__ import annotations

from pathlib import PurePath

from nanscope.locate.observe import BACKWARD_OF, CLIPPED, REPLACED, TOKENS
from nanscope.report.clean import clean, numeral
from nanscope.snapshot.observation import Origin
from nanscope.text import row_token, show_index
from nanscope.verdict import arithmetic
from nanscope.verdict.token import Token


def where(place: Origin, limit: int = 240) -> str:
    """Return file name and line of the origin, "" if unknown."""
    if not place.file:
        return ""
    name = PurePath(clean(place.file, limit)).name
    return name if place.line is None else f"{name}:{clean(place.line, 12)}"


def where_in(place: Origin, limit: int = 240) -> str:
    """Return where the origin is and in which function, "" if unknown."""
    return where(place, limit) + (f", in {clean(place.function, 80)}" if place.function and place.file else "")


def element(place: Origin) -> str:
    """Return which element of how many: [2, 27] of [8, 512]; and which token that is, where the tensor is a piece of the batch."""
    elsewhere = place.batch is not None and place.batch != place.index[: len(place.batch)]
    count = " (global index)" if place.sharded else f" = {row_token(*place.batch)}" if place.batch and elsewhere else ""
    return f"{show_index(place.index)} of {show_index(place.shape)}{count}" if place.shape or place.index else ""


SHORT = 40  # characters of a token's text in a line of facts


def token_words(token: Token | None) -> str:
    """Return the id of a token with its text, "" if unknown."""
    return "" if token is None else token.words(SHORT)


def mask_words(place: Origin, limit: int = 240) -> str:
    """Return whether the loss counts the element, "" if unknown. A mean of tokens that are all masked is counted."""
    if place.masked is None:
        return ""
    if place.masked and place.masked_by and place.masked_by.startswith(TOKENS):
        return f"not masked: the loss counts it, and all its tokens are {clean(place.masked_by.removeprefix(TOKENS), limit)}"
    if not place.masked:
        return "not masked: the loss counts it"
    by = place.masked_by or ""
    how = "dropped" if by.endswith(CLIPPED) or by.startswith(REPLACED) else "masked"  # a token that the loss counts, by another number
    return f"{how}: {clean(by or 'outside the loss', limit)}"


def source_of(place: Origin, around: int, limit: int = 240) -> list[tuple[str, str, bool]]:
    """Return lines of source as (number, text, is it the origin's), `around` of them before and after it, without empty ends."""
    lines = list(place.source)
    middle = next((n for n, (line, _) in enumerate(lines) if line == place.line), 0)
    lines = lines[max(0, middle - around) : middle + around + 1]
    while lines and not str(lines[0][1]).strip():
        del lines[0]
    while lines and not str(lines[-1][1]).strip():
        del lines[-1]
    return [(clean(line, 12), clean(str(text).expandtabs(4).rstrip(), limit), line == place.line) for line, text in lines]


def subject(place: Origin, limit: int = 240) -> str:
    """Return the code that made the origin: variable = expression, as far as known."""
    if place.expression and place.expression.startswith(BACKWARD_OF):
        return clean(place.expression, limit)
    if place.variable and place.expression and place.op != "input":
        return clean(f"{place.variable} = {place.expression}", limit)
    return clean(place.variable or place.expression or place.op, limit)


def calculation(place: Origin, limit: int = 240) -> str:
    """Return what the op computed: exp(200) = +inf."""
    return clean(arithmetic.calculation(place) or numeral(place.value), limit)
