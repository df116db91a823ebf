"""A recorded batch under other objectives, a sweep of clamps, and the catalogue of both, in a terminal; the sweep also as a picture.

verl.vanilla would have survived this batch: loss −0.1732, and a finite gradient at every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanscope.report.terminal import HARM, PROVEN, QUIET, STRONG, console_for, safe
from nanscope.words import number

if TYPE_CHECKING:
    from nanscope.alternatives import Alternatives
    from nanscope.catalogue import Catalogue, KnownLoss
    from nanscope.sweep import Sweep, Trial

SUFFIXES = (".png", ".svg", ".pdf")


def print_alternatives(found: Alternatives, *, file: IO[str]) -> None:
    """Print what each objective would have done, a sentence each, and what the batch was read from."""
    console = console_for(file)
    console.print(Text("\n  the recorded batch under other objectives", QUIET))
    for outcome in found.outcomes:
        mark = Text("–", QUIET) if outcome.loss is None else Text("✓", PROVEN) if outcome.works else Text("✗", HARM)
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(overflow="fold")
        line.add_row(mark, safe(outcome.sentence))
        console.print(Padding(line, (0, 2)))
    shape = list(found.batch.inputs.logprobs.shape)
    sources = ", ".join(f"{field} ← {name}" for field, name in found.batch.sources)
    console.print(Padding(Text(safe(f"batch {shape}: {sources}"), QUIET), (1, 2, 0, 2)))


# -- the sweep -----------------------------------------------------------------------------------------------------------------------


def print_sweep(sweep: Sweep, *, file: IO[str]) -> None:
    """Print a sweep as a table of bounds, and what to take from it."""
    from nanscope.sweep import UNNAMED

    console = console_for(file)
    where = f" ({safe(sweep.place)})" if sweep.place else ""
    overflow = f"{sweep.op}({number(sweep.value)}) overflowed{where}; {sweep.dtype} ends at {sweep.op}({sweep.limit:.4g})"
    healthy = "exponent" if sweep.operand == UNNAMED else f"|{safe(sweep.operand)}|"
    console.print(Text.assemble(("● ", STRONG), f"{overflow}. The largest healthy {healthy} is {number(sweep.largest)} nat."))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=QUIET)
    both = sweep.key is not None
    heads = ["clamp, nat", f"before {sweep.op}", f"after {sweep.op}"]
    heads += [f"objective: before {sweep.op}", f"after {sweep.op}"] if both else []
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index == 0 else "left", no_wrap=True)
    for point in sweep.points:
        trials = [point.before, point.after, *((point.objective_before, point.objective_after) if both else ())]
        bound = Text(f"±{point.bound:g}", STRONG if point.bound == sweep.chosen else "")
        table.add_row(bound, *(_trial(trial, point.bound == sweep.chosen and index == 0) for index, trial in enumerate(trials)))
    console.print(Padding(table, (1, 2)))
    console.print(Padding(Text(safe(sweep.sentence)), (0, 2)))
    note = f"objective: {sweep.key}, on the recorded batch" if both else f"no objective beside it: {sweep.no_objective}"
    console.print(Padding(Text(safe(note), QUIET), (0, 2)))


def _trial(trial: Trial | None, chosen: bool) -> Text:
    if trial is None:
        return Text("–", QUIET)
    if trial.works:
        if trial.distortion is None:
            return Text("finite")
        words = "unchanged" if trial.unchanged else f"off by {_percent(trial.distortion)}"
        return Text(f"{words}{'  ← smallest' if chosen else ''}", PROVEN if trial.unchanged else "")
    return Text("gradient not finite" if trial.bad else f"loss {number(trial.loss)}", HARM)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.2g} %"


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
    return safe(text).replace("$", r"\$")


# -- the catalogue -------------------------------------------------------------------------------------------------------------------


def print_catalogue(found: Catalogue, detailed: bool, *, file: IO[str]) -> None:
    """Print the losses, one line each or with all their settings, and the edits."""
    console = console_for(file)
    if detailed:
        first: dict[object, str] = {}  # what was shown already, and with which loss
        for loss in found.losses:
            console.print(_loss(loss, first))
    else:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=QUIET)
        for head in ("loss", "version", "where, and what is wrong there"):
            table.add_column(head, overflow="fold", no_wrap=head != "where, and what is wrong there")
        for loss in found.losses:
            table.add_row(
                Text(loss.key, STRONG), loss.version, Text("\n").join([Text(loss.site, QUIET), *(Text(f"⚠ {f}") for f in loss.flaws)])
            )
        console.print(table)
        console.print(
            Text("\nnanscope variants verl shows the settings; nanscope replay FILE --as verl.vanilla:clip_ratio=0.3 uses them", QUIET)
        )
    if found.edits:
        edits = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=QUIET)
        for head in ("edit of the recorded step", "short", "what it does"):
            edits.add_column(head, overflow="fold", no_wrap=head != "what it does")
        for edit in found.edits:
            edits.add_row(Text(edit.id, STRONG), edit.short or "", edit.what + ("  (tempting, and wrong)" if edit.control else ""))
        console.print(Text(""))
        console.print(edits)
        console.print(Text("\nnanscope replay FILE --edit clamp:10 tries one at the origin", QUIET))


def _loss(loss: KnownLoss, first: dict[object, str]) -> Padding:
    """A loss with its settings and clamps; those that another one has alike are not repeated."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column(overflow="fold")
    own = tuple(f"{knob.name}={knob.default!r}" for knob in loss.settings if not knob.by_key)
    fixed = [f"{knob.name}={knob.default!r}" for knob in loss.settings if knob.by_key]
    table.add_row("where", f"{loss.site}, in {loss.version}")
    like = first.setdefault(own, loss.key)
    table.add_row("settings", ", ".join(own) if like == loss.key else f"as {like}")
    if fixed:
        table.add_row("by its key", ", ".join(fixed))
    like = first.setdefault(loss.clamps, loss.key)
    shown = [f"{clamp.name}   {clamp.own}; {clamp.unit}" for clamp in loss.clamps] if like == loss.key else [f"as {like}"]
    for index, words in enumerate(shown):
        table.add_row("clamps" if index == 0 else "", words)
    for flaw in loss.flaws:
        table.add_row(Text("flaw", HARM), flaw)
    body = Table.grid()
    body.add_row(Text(loss.key, STRONG))
    body.add_row(Padding(table, (0, 2)))
    return Padding(body, (0, 0, 1, 0))


def suffixes() -> Sequence[str]:
    """Return the suffixes that `draw_sweep` knows."""
    return SUFFIXES
