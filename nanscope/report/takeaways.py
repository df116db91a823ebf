"""The atlas in sentences: what a tired reader should know, counted, and how it compares with the frameworks themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from nanscope.atlas.cells import Atlas
from nanscope.atlas.faults import Fault, FaultKind, Where
from nanscope.atlas.harm import GRADIENT, Harm
from nanscope.atlas.verification import Verification
from nanscope.text import count, listed


def takeaways(atlas: Atlas) -> tuple[str, ...]:
    """Return in plain words, counted in this atlas, what a tired reader should know; fewer sentences where there is nothing to count."""
    real, supposed = _part(atlas, supposed=False), _part(atlas, supposed=True)
    told = (_overflow(real), _clamps(supposed), _masked(real), _swallowed(real), _empty(real))
    return tuple(sentence for sentence in told if sentence)


def _part(atlas: Atlas, *, supposed: bool) -> Atlas:
    """Return the paths that the frameworks have, or those that have a clamp from nanscope."""
    rows = [(path, row) for path, row in zip(atlas.paths, atlas.cells, strict=True) if path.supposed == supposed]
    return Atlas(tuple(path for path, _ in rows), atlas.faults, tuple(row for _, row in rows))


def _overflow(atlas: Atlas) -> str:
    """What the first fault to think of does: the log-ratio of a masked token overflows."""
    faults = [Fault("old_log_probs", FaultKind.PLUS, Where.MASKED, sign) for sign in (1, -1)]
    bad = _paths(atlas, faults, lambda harm: bool(harm & GRADIENT))
    silent = _paths(atlas, faults, lambda harm: harm.silent)
    total = len(atlas.paths)
    if not total or not set(faults) <= set(atlas.faults):
        return ""
    if not bad:
        return f"A log-ratio of +200 at a masked token leaves every gradient finite on {_of_all(total)}."
    return (
        f"A log-ratio of +200 at a masked token leaves the gradient finite on {total - len(bad)} of {count(total, 'path')} and puts NaN "
        f"into it on {len(bad)} ({_shares(atlas, bad)}). {_of_these(len(silent), len(bad))} the loss is finite for one sign of the "
        "advantage at least: no curve shows it, and the next optimizer step makes every weight NaN."
    )


def _clamps(supposed: Atlas) -> str:
    """What a clamp of the log-ratio would do about it, in either order."""
    faults = [fault for fault in supposed.faults if fault.kind is FaultKind.PLUS and fault.tensor in ("log_probs", "old_log_probs")]
    bad = _paths(supposed, faults, lambda harm: bool(harm & GRADIENT))
    late = [path.name for path in supposed.paths if dict(path.settings).get("clamp_after_exp")]
    early = [path.name for path in supposed.paths if path.name not in late]
    if not faults or not early or not late:
        return ""
    return (
        f"With a clamp of ±20 nats on the log-ratio before exp, {sum(name not in bad for name in early)} of {len(early)} such paths (†) "
        f"keep every gradient finite at +200; with the same clamp after exp, {sum(name not in bad for name in late)} of {len(late)}."
    )


def _masked(atlas: Atlas) -> str:
    """Who is immune at masked tokens."""
    faults = [fault for fault in atlas.faults if fault.where is Where.MASKED and fault.tensor != "entropy"]
    bad = _paths(atlas, faults, bool)
    harmed = {name.split(".")[0] for name in bad}
    immune = [name for name in dict.fromkeys(path.framework for path in atlas.paths) if name not in harmed]
    if not faults or not immune:
        return ""
    return f"Nothing at a masked token reaches the loss or a gradient of {listed(immune)}."


def _swallowed(atlas: Atlas) -> str:
    """Where a NaN vanishes."""
    faults = [fault for fault in atlas.faults if fault.where is Where.VALID and fault.kind is FaultKind.NAN]
    hidden = _paths(atlas, faults, lambda harm: harm is Harm.CHANGED)
    if not hidden:
        return ""
    return (
        f"On {len(hidden)} of {count(len(atlas.paths), 'path')} a NaN at a counted token can vanish (≠): "
        "loss and gradients are finite, and the token is trained on a wrong number or not at all."
    )


def _empty(atlas: Atlas) -> str:
    """What a batch without a valid token does."""
    faults = [fault for fault in atlas.faults if fault.where is Where.BATCH]
    bad = _paths(atlas, faults, lambda harm: Harm.LOSS in harm)
    return f"A batch without a valid token makes the loss NaN on {count(len(bad), 'path')} ({_shares(atlas, bad)})." if bad else ""


def _paths(atlas: Atlas, faults: Iterable[Fault], harmed: Callable[[Harm], bool]) -> list[str]:
    """Return the names of the paths that one of the faults harms in this way."""
    places = [atlas.faults.index(fault) for fault in faults if fault in atlas.faults]
    return [path.name for path, row in zip(atlas.paths, atlas.cells, strict=True) if any(harmed(row[place]) for place in places)]


def _shares(atlas: Atlas, names: Sequence[str]) -> str:
    """`trl 21 of 28, liger 17 of 21`."""
    totals: dict[str, int] = {}
    for path in atlas.paths:
        totals[path.framework] = totals.get(path.framework, 0) + 1
    counts = {framework: sum(name.startswith(f"{framework}.") for name in names) for framework in totals}
    return ", ".join(f"{framework} {count} of {totals[framework]}" for framework, count in counts.items() if count)


def _of_all(number: int) -> str:
    return "the one path" if number == 1 else f"all {number} paths"


def _of_these(some: int, number: int) -> str:
    return ("There" if number == 1 else "On all of these") if some == number else f"On {some} of these"


def verification_words(verification: Verification) -> Iterator[str]:
    """Yield what was compared, every disagreement, and what could not be compared."""
    for one in verification.compared:
        read = "" if one.version == one.known else f" (nanscope's rows were read in {one.known})"
        yield f"{one.framework} {one.version}: {one.cells} cells of {count(one.paths, 'path')} compared{read}"
    if verification.compared:
        number = len(verification.disagreements)
        yield f"{count(number, 'cell')} {'disagrees' if number == 1 else 'disagree'}" + (":" if number else "")
    for d in verification.disagreements:
        yield f"✗ {d.path.name} | {d.fault.name} | nanscope {d.ours.code} | {d.path.framework} {d.theirs.code}"
    refused: dict[tuple[str, str], list[str]] = {}
    for path, fault, why in verification.refused:
        refused.setdefault((why, fault.name), []).append(path.name)
    for (why, fault_name), names in refused.items():
        yield f"not compared, {fault_name}: {', '.join(names)} stop by themselves: {why}"
    for path, why in verification.unreached:
        yield f"not compared: {path.name}: {why}"
    if verification.absent:
        yield f"not installed here, or without an adapter: {', '.join(verification.absent)}"
