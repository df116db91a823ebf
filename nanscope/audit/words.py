"""How an audit names sizes, and losses with their settings."""

from __future__ import annotations

from collections.abc import Sequence

from nanscope.frameworks.rows import Setting
from nanscope.text import count, listed


def sizes(counts: Sequence[int], noun: str) -> str:
    """Return "100 and 900 tokens", or the range of many."""
    if len(counts) > 4:
        return f"{min(counts)} to {count(max(counts), noun)}"
    return listed([*map(str, counts[:-1]), count(counts[-1], noun)])


def use(key: str, settings: Sequence[tuple[str, Setting]]) -> str:
    """Return a loss, or a framework with what is set there: "trl.grpo", "verl token-mean", "openrlhf token_level_loss=False"."""
    told = [value if isinstance(value, str) else f"{name}={value}" for name, value in settings if isinstance(value, (str, bool))]
    return " ".join([key.split(".")[0], *told]) if told else key
