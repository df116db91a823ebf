"""A replayed step on the terminal: edits, other objectives, and the sweep of a clamp, which is drawn as well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from nanscope.verdict.incident import Incident

from typing import TYPE_CHECKING

from nanscope.report.console import HARM, PROVEN, QUIET, STRONG, console_for, safe
from nanscope.report.terminal import _incident, _table
from nanscope.text import number

if TYPE_CHECKING:
    from nanscope.replay.sweep import Sweep, Trial
    from nanscope.replay.under import Alternatives


def print_replay(incident: Incident, failing: bool, *, file: IO[str]) -> None:
    """Print what replaying a snapshot gave."""
    console = console_for(file)
    if failing or not incident.rows:
        console.print(_incident(incident))
        if not incident.rows:
            console.print(Text("  nothing can be run again: the file holds no program of this step's loss", QUIET))
        return
    console.print(
        Text.assemble(("● ", PROVEN), f"step {incident.step} · rank {incident.rank}: the replayed loss and its gradients are finite")
    )
    if incident.reproduces is False:
        console.print(
            Text("  The recorded loss does not come out again: the fault was transient (hardware, a race), or lies outside the program.")
        )
    elif incident.origin.op not in ("unknown", ""):
        console.print(Padding(Text(safe(incident.sentence)), (0, 2)))
    console.print(_table(incident))


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
    shape = list(found.batch.inputs.log_probs.shape)
    sources = ", ".join(f"{field} ← {name}" for field, name in found.batch.sources)
    console.print(Padding(Text(safe(f"batch {shape}: {sources}"), QUIET), (1, 2, 0, 2)))


def print_sweep(sweep: Sweep, *, file: IO[str]) -> None:
    """Print a sweep as a table of bounds, and what to take from it."""
    from nanscope.replay.sweep import UNNAMED

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


def suffixes() -> Sequence[str]:
    """Return the suffixes that `draw_sweep` knows."""
    return SUFFIXES
