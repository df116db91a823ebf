"""What a row of the loss tables is: a framework's own option names and defaults, and the objective that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

from nanscope.errors import NanscopeError
from nanscope.objective.bounds import Bounds
from nanscope.objective.reduction import Over, Reduction
from nanscope.objective.settings import LossSettings

T = TypeVar("T")
Setting = bool | int | float | str | tuple | list | None  # type: ignore[type-arg]  # parameters would break isinstance


class Options(Protocol):
    """The options of one framework, a frozen dataclass: field names and defaults are the framework's."""

    def settings(self) -> LossSettings:
        """Return the objective that these options mean."""
        ...


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss of one framework.

    key:     framework and loss, as `framework_loss` takes it.
    options: their dataclass. fixed: those that the key itself decides.
    site:    where the formula stands, in the framework's own files. version: the release it was read and measured in.
    flaws:   what the framework does wrong there; reproduced, not repaired.
    """

    key: str
    options: type[Options]
    site: str
    version: str
    fixed: tuple[tuple[str, Setting], ...] = ()
    flaws: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Return the names of the settings that a caller may pass."""
        decided = dict(self.fixed)
        return tuple(option.name for option in fields(self.options) if option.name not in decided)  # type: ignore[arg-type]


def pick(name: str, value: str, table: Mapping[str, T]) -> T:
    """Return the row of `table` that a setting names. Raises NanscopeError with the choices if there is none."""
    if value not in table:
        raise NanscopeError(f"{name}={value!r} is not known: choose one of {', '.join(table)}", slug="unknown-setting-value")
    return table[value]


def clip(low: float, high: float | None = None) -> Bounds:
    """Return the interval [1 − low, 1 + high] of a ratio; high None is low."""
    return Bounds(1 - low, 1 + (low if high is None else high))


ROW_MEANS = Reduction(Over.ROW_MEANS)
ROW_SUMS = Reduction(Over.ROW_SUMS)
TOKEN_MEAN = Reduction(Over.TOKENS)
ROW_VALUES = Reduction(Over.VALUES)
