"""How an audit says how many, and of what."""

from __future__ import annotations

from collections.abc import Sequence

from nanscope.frameworks.rows import Setting


def count(many: int, noun: str) -> str:
    """Return "1 row", "3 rows", "2 batches"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{many} {noun if many == 1 else plural}"


def listed(counts: Sequence[int], noun: str) -> str:
    """Return "100 and 900 tokens", or the range of many."""
    if len(counts) > 4:
        return f"{min(counts)} to {count(max(counts), noun)}"
    return f"{', '.join(map(str, counts[:-1]))} and {count(counts[-1], noun)}"


def use(key: str, settings: Sequence[tuple[str, Setting]]) -> str:
    """Return a loss, or a framework with what is set there: "trl.grpo", "verl token-mean", "openrlhf token_level_loss=False"."""
    told = [value if isinstance(value, str) else f"{name}={value}" for name, value in settings if isinstance(value, (str, bool))]
    return " ".join([key.split(".")[0], *told]) if told else key
