"""Everything that a recorded step can be replayed under: the losses of the frameworks with their settings, and the edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nanscope.errors import NanscopeError
from nanscope.frameworks.clamps import AFTER, CLAMPS, own_clamps
from nanscope.frameworks.losses import LOSSES, framework_settings
from nanscope.frameworks.rows import Loss, Setting
from nanscope.objective.bounds import Bounds
from nanscope.replay.edits import CONTROLS, EDITS, SHORT
from nanscope.replay.patch import Patch, Variant
from nanscope.text import meant


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting with its default. by_key: the key of the loss decides it."""

    name: str
    default: Setting
    by_key: bool = False


@dataclass(frozen=True, slots=True)
class ClampOfLoss:
    """A clamp that a loss can be given, and what it is where nobody asks: "none", "±20", "at most 10". unit: what it is on."""

    name: str
    own: str
    unit: str


@dataclass(frozen=True, slots=True)
class KnownLoss:
    """A loss of a framework, as `framework_loss` and `nanscope replay --as` take it. site: in the framework's own files. version: what it
    was read and measured in. clamps: those it can be given with its default settings."""

    key: str
    version: str
    site: str
    settings: tuple[Knob, ...]
    clamps: tuple[ClampOfLoss, ...]
    flaws: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KnownEdit:
    """An edit of a recorded program, as `nanscope replay --edit` takes it. control: a tempting wrong one. short: its other name."""

    id: str
    what: str
    control: bool
    short: str | None


@dataclass(frozen=True, slots=True)
class Variants:
    """The losses whose keys begin with what was asked for, and, with nothing asked for, the edits."""

    losses: tuple[KnownLoss, ...]
    edits: tuple[KnownEdit, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {"losses": [asdict(loss) for loss in self.losses], "edits": [asdict(edit) for edit in self.edits]}


def variants(prefix: str = "") -> Variants:
    """Return everything that is known, or the losses whose key begins with `prefix` ("verl", "trl.gr").

    Raises NanscopeError if no key begins so.
    """
    losses = tuple(_known(row) for key, row in LOSSES.items() if key.startswith(prefix))
    if not losses:
        families = dict.fromkeys(key.split(".")[0] for key in LOSSES)
        near = meant(prefix, (*LOSSES, *families)) or f": there are {', '.join(families)}"
        raise NanscopeError(f"no loss begins with {prefix!r}{near}", slug="unknown-loss")
    return Variants(losses, () if prefix else (*_edits(EDITS, False), *_edits(CONTROLS, True)))


def _known(loss: Loss) -> KnownLoss:
    decided = dict(loss.fixed)
    knobs = [Knob(name, decided.get(name, default), name in decided) for name, default in loss.defaults().items()]
    return KnownLoss(loss.key, loss.version, loss.site, tuple(knobs), _clamps(loss), loss.flaws)


def _clamps(loss: Loss) -> tuple[ClampOfLoss, ...]:
    try:
        bounds = own_clamps(framework_settings(loss.key))
    except NanscopeError:
        return ()  # it needs a setting that has no default
    found = [ClampOfLoss(name, _shown(bounds[name]), CLAMPS[name].meaning) for name in bounds if name not in loss.defaults()]
    return (*found, ClampOfLoss(AFTER, "False", "bound the result of exp instead: the wrong order")) if found else ()


def _shown(bounds: Bounds) -> str:
    if bounds.low is None and bounds.high is None:
        return "none"
    if bounds.low is None:
        return f"at most {bounds.high:g}"
    return f"±{bounds.high:g}" if bounds.low == -(bounds.high or 0) else f"{bounds.low:g} to {bounds.high:g}"


def _edits(table: Mapping[str, Callable[[Patch], Variant | None]], control: bool) -> list[KnownEdit]:
    short = {name: other for other, name in SHORT.items()}
    return [KnownEdit(name, (edit.__doc__ or "").strip().splitlines()[0], control, short.get(name)) for name, edit in table.items()]
