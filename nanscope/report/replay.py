"""A replayed step on the terminal: edits, other objectives, and the sweep of a clamp, which is drawn as well."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.replay.sweep import UNNAMED, Sweep, Trial
from nanscope.replay.under import Others
from nanscope.report.clean import clean
from nanscope.report.console import HARM, PROVEN, QUIET, STRONG, pairs, show, table
from nanscope.report.terminal import incident_shown, tried_shown
from nanscope.report.tried import distortion_words
from nanscope.text import number
from nanscope.verdict.incident import Incident

SUFFIXES = (".png", ".svg", ".pdf")


def print_replay(incident: Incident, failing: bool, next_verb: str = "", *, file: IO[str]) -> None:
    """Print what replaying a snapshot gave. next_verb: which is proposed to go on with."""
    show(Group(*_replayed(incident, failing, next_verb)), file=file)


def _replayed(incident: Incident, failing: bool, next_verb: str) -> list[RenderableType]:
    if not incident.rows:
        return [incident_shown(incident, ""), Text("  nothing can be run again: the file holds no program of this step's loss", QUIET)]
    if failing:
        return [incident_shown(incident, next_verb)]
    head = f"{incident.place} · {clean(incident.process)}: the replayed loss and its gradients are finite"
    parts: list[RenderableType] = [Text.assemble(("● ", PROVEN), head)]
    if incident.reproduces is False:
        words = "The recorded loss does not come out again: the fault was transient (hardware, a race), or lies outside the program."
        parts.append(Text(f"  {words}"))
    elif incident.origin.op not in ("unknown", ""):
        parts.append(Padding(Text(clean(incident.sentence)), (0, 2)))
    return [*parts, tried_shown(incident)]


def print_others(found: Others, *, file: IO[str]) -> None:
    """Print what each objective would have done, a sentence each, and what the batch was read from."""
    lines = pairs(style="")
    lines.padding = (0, 1)
    for outcome in found.outcomes:
        mark = Text("✓", PROVEN) if outcome.proven else Text("≈") if outcome.works else Text("✗", HARM)
        mark = Text("–", QUIET) if outcome.loss is None else mark
        lines.add_row(mark, Text(clean(outcome.sentence)))
    shape = list(found.batch.inputs.log_probs.shape)
    sources = ", ".join(f"{field} ← {name}" for field, name in found.batch.sources)
    batch = Padding(Text(clean(f"batch {shape}: {sources}"), QUIET), (1, 2, 0, 2))
    show(Group(Text("\n  the recorded batch under other objectives", QUIET), Padding(lines, (0, 2)), batch), file=file)


def print_sweep(sweep: Sweep, *, file: IO[str]) -> None:
    """Print a sweep as a table of bounds, and what to take from it."""
    where = f" ({clean(sweep.place)})" if sweep.place else ""
    overflow = f"{sweep.op}({number(sweep.value)}) overflowed{where}; {sweep.dtype} ends at {sweep.op}({sweep.limit:.4g})"
    healthy = "exponent" if sweep.operand == UNNAMED else f"|{clean(sweep.operand)}|"
    head = Text.assemble(("● ", STRONG), f"{overflow}. The largest healthy {healthy} is {number(sweep.largest)} nat.")
    both = sweep.key is not None
    heads = ["clamp, nat", f"before {sweep.op}", f"after {sweep.op}"]
    shown = table(*heads, *((f"objective: {heads[1]}", heads[2]) if both else ()))
    shown.columns[0].justify = "right"
    for point in sweep.points:
        trials = [point.before, point.after, *((point.objective_before, point.objective_after) if both else ())]
        bound = Text(f"±{point.bound:g}", STRONG if point.bound == sweep.chosen else "")
        shown.add_row(bound, *(_trial(trial, point.bound == sweep.chosen and index == 0) for index, trial in enumerate(trials)))
    note = f"objective: {sweep.key}, on the recorded batch" if both else f"no objective beside it: {sweep.no_objective}"
    words = (Padding(Text(clean(sweep.sentence)), (0, 2)), Padding(Text(clean(note), QUIET), (0, 2)))
    show(Group(head, Padding(shown, (1, 2)), *words), file=file)


def _trial(trial: Trial | None, chosen: bool) -> Text:
    if trial is None:
        return Text("–", QUIET)
    if trial.works:
        if trial.distortion is None:
            return Text("finite")
        words = distortion_words(trial.distortion)
        return Text(f"{words}{'  ← smallest' if chosen else ''}", PROVEN if trial.unchanged else "")
    return Text("gradient not finite" if trial.bad else f"loss {number(trial.loss)}", HARM)


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Draw gradient distortion against the bound, for both orders. The suffix chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    lanes = ((30.0, "after", "#b3261e"), (8.0, "before", "#1b6e3c"))  # above the curve, which ends at 1
    measured = [(p.bound, p.before.distortion) for p in sweep.points if p.before.works and p.before.distortion is not None]
    axes.plot([b for b, _ in measured], [d for _, d in measured], color="#1b6e3c", marker="o", ms=4, label=f"clamp before {sweep.op}")
    top = max([d for _, d in measured] + [1.0])
    for height, side, colour in lanes:
        lost = [p.bound for p in sweep.points if not getattr(p, side).works]
        if lost:
            words = f"clamp {side} {sweep.op}: not finite"
            axes.plot(lost, [top * height] * len(lost), "x", color=colour, label=words)
    axes.axvline(sweep.largest, color="#777777", ls=":", lw=1, label="largest healthy exponent") if sweep.largest > 0 else None
    axes.axvline(sweep.limit, color="#777777", ls="--", lw=1, label=f"{sweep.dtype} ends")
    axes.set(xscale="log", xlabel=f"clamp of {_plain(sweep.operand)}, nat", ylabel="change of a healthy\ntoken's gradient")
    axes.set_yscale("symlog", linthresh=1e-6)
    axes.set_ylim(-1e-7, 100 * top)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def _plain(text: str) -> str:
    """Text from a file without what matplotlib would set as a formula."""
    return clean(text).replace("$", r"\$")
