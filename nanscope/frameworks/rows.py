"""What the file of a framework says: where it computes its losses, what its variables mean, what its options mean, what helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Protocol, TypeVar

from nanscope.errors import NanscopeError
from nanscope.objective.bounds import Bounds
from nanscope.objective.reduction import Over, Reduction
from nanscope.objective.settings import LossSettings
from nanscope.roles import Role

Pairs = tuple[tuple[str, str], ...]
T = TypeVar("T")
Setting = bool | int | float | str | tuple | list | None  # type: ignore[type-arg]  # parameters would break isinstance
Settings = Mapping[str, Setting]


class Options(Protocol):
    """The options of a loss, a frozen dataclass: field names and defaults are the framework's."""

    def settings(self) -> LossSettings:
        """Return the objective that these options mean."""
        ...


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss of one framework.

    key:     framework and loss, as `framework_loss` takes it.
    options: their dataclass. fixed: those that the key itself decides. needs: those without a default, and what the atlas takes for them.
    site:    where the formula stands, in the framework's own files. version: the release it was read and measured in.
    flaws:   what the framework does wrong there; reproduced, not repaired.
    walked:  what the atlas sets besides the defaults, once each. What changes where exp, mask or clamp sit, or what is divided by what,
             stands here; what only scales does not.
    """

    key: str
    options: type[Options]
    site: str
    version: str
    fixed: tuple[tuple[str, Setting], ...] = ()
    flaws: tuple[str, ...] = ()
    walked: tuple[Settings, ...] = ()
    needs: tuple[tuple[str, Setting], ...] = ()

    def defaults(self) -> dict[str, Setting]:
        """Return the framework's default of every option, by name."""
        given = self.options()
        return {option.name: getattr(given, option.name) for option in fields(given)}  # type: ignore[arg-type]

    def names(self) -> tuple[str, ...]:
        """Return the names of the settings that a caller may pass."""
        decided = dict(self.fixed)
        return tuple(option.name for option in fields(self.options) if option.name not in decided)  # type: ignore[arg-type]


class Term(StrEnum):
    """A part of a training step that a remedy acts on."""

    KL = "the KL term"
    RATIO = "the policy's ratio"
    ROLLOUT = "the weight against the rollout engine"
    ENTROPY = "the entropy"
    ADVANTAGES = "the advantages"
    HEAD = "the output head"
    MODEL = "the model"


@dataclass(frozen=True, slots=True)
class Remedy:
    """What helps against a cause, in the framework's own words.

    setting: name=value, None if it has no option for it. term: it helps only where the origin lies there, None for anywhere.
    option: what a run's settings call it, if not by the last part of its name. unless: settings with which it does nothing. needs: an
    option that those trainers have for which it is meant.
    """

    causes: tuple[str, ...]
    text: str
    setting: str | None = None
    term: Term | None = None
    option: str = ""
    unless: tuple[tuple[str, Setting], ...] = ()
    needs: str = ""


class Tries(StrEnum):
    """What a setting that people advise does to the loss."""

    LEAVES_OUT = "leaves the KL term out"
    SCALES = "multiplies its coefficient"
    CHOOSES = "chooses the estimator of the KL term"
    NOTHING = "is not read by this loss"


@dataclass(frozen=True, slots=True)
class Folk:
    """A setting that people advise to each other, whether it helps or not: it is tried on the recorded step.

    setting: as they write it. option: what the loss calls it. value: what it is set to; of one that scales, what its coefficient is
    multiplied by. text: what to know of it.
    """

    setting: str
    option: str
    does: Tries
    value: Setting
    text: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loss that computes its own gradient, or is compiled, so that nothing inside can be recorded: what to take at its door.

    hidden, weight, bias, ids: arguments that the log-probs are computed from, log softmax(hidden · weightᵀ + bias) at the ids. Without a
    weight `hidden` is the logits, [B, T + 1, V], of which the last row is not read. temperature: the argument that divides the logits.
    tensors: arguments of the batch, by role. formula: the loss as plain Python, as a path from the function's locals; "" where there is
    none (a Triton kernel). arguments: parameter of the formula → path. drops_nan: the kernel's min and max drop a NaN.
    """

    hidden: str
    ids: str
    tensors: tuple[tuple[str, Role], ...]
    weight: str = ""
    bias: str = ""
    temperature: str = ""
    formula: str = ""
    arguments: Pairs = ()
    drops_nan: bool = False

    def tensors_read(self) -> tuple[str, ...]:
        """Return the names of all arguments that a second run needs."""
        own = (self.hidden, self.ids, self.weight, self.bias, *(name for name, _ in self.tensors))
        return tuple(name for name in own if name)

    def paths(self) -> tuple[str, ...]:
        """Return what else it needs, as paths from the function's locals."""
        return tuple(path for path in (self.temperature, self.formula, *(path for _, path in self.arguments)) if path)


@dataclass(frozen=True, slots=True)
class LossSite:
    """A function in which a framework computes its loss.

    file: end of its path. function: qualified name. roles: local, argument or key of a mapping → role.
    key:      what `framework_loss` calls this loss; a setting in braces is read live. None for a helper.
    configs:  where the options are held, as paths from the function's locals: `self.args`, `config`.
    settings: options that stand elsewhere, or under another name: setting of the key → path; `path==text` is whether it says so.
    fixed:    settings that this site decides.
    beside:   tensors of the batch that the loss need not read: role → path. One that is a list of tensors has one a sequence.
    """

    file: str
    function: str
    roles: tuple[tuple[str, Role], ...]
    key: str | None = None
    configs: tuple[str, ...] = ()
    settings: Pairs = ()
    fixed: tuple[tuple[str, bool | int | float | str | None], ...] = ()
    kernel: Kernel | None = None
    beside: Pairs = ()

    def role(self, name: str) -> Role | None:
        """Return what a variable of this function means, None if the row does not say."""
        return next((role for known, role in self.roles if known == name), None)

    def is_at(self, file: str, function: str) -> bool:
        """Does a code position lie in this function?"""
        return function == self.function and file.replace("\\", "/").endswith("/" + self.file)


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework.

    package:  its distribution. version: the release or commit that the rows were checked against.
    files:    parts of the paths its loss code lives in.
    settings: option names that matter for the loss, as attributes of its trainer's `args`.
    batch:    the local variable that holds the batch, and its keys of the sampled token ids and of their mask.
    sites:    where it computes its losses, the outermost function first. losses: what they are.
    options:  files that declare the options which the remedies name. guards: what it does against non-finite numbers by itself.
    host:     the framework whose trainer calls its losses.
    folk:     what people advise to each other there against a run that died.
    """

    name: str
    package: str
    version: str
    files: tuple[str, ...]
    settings: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    batch: tuple[str, str, str] | None = None
    sites: tuple[LossSite, ...] = ()
    options: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    host: str | None = None
    folk: tuple[Folk, ...] = ()


def roles(**names: str) -> tuple[tuple[str, Role], ...]:
    """Return pairs of variable and role, from role → names with spaces between them."""
    return tuple((name, Role(role)) for role, words in names.items() for name in words.split())


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

# Clamps that nanscope adds, for the atlas to show what they would do; the values are NeMo-RL's for its KL.
CLAMPED: tuple[Settings, ...] = (
    {"log_ratio_clamp_value": 20.0},
    {"log_ratio_clamp_value": 20.0, "clamp_after_exp": True},  # the tempting order
)
ALL_CLAMPS: Settings = {"log_ratio_clamp_value": 20.0, "kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0}
