"""The mismatch between sampler and trainer of a recorded batch, and what corrections make of it: on the terminal, and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from nanscope.objective.mismatch import BEYOND
from nanscope.replay.correction import THRESHOLDS, CorrectionSweep, CorrectionTrial, Outlier
from nanscope.report.clean import clean
from nanscope.report.console import HARM, PROVEN, QUIET, STRONG, show, table
from nanscope.text import number

HEADS = ("correction", "left out", "truncated", "effective size", "loss", "gradient", "cosine")


def print_correction(found: CorrectionSweep, *, file: IO[str]) -> None:
    """Print how far sampler and trainer are apart, the tokens where they are furthest, and a row for each correction."""
    shown = table(*HEADS)
    for column in shown.columns[1:]:
        column.justify = "right"
    for trial in found.trials:
        shown.add_row(*_row(trial))
    parts = [Text.assemble(("● ", STRONG), clean(found.sentence))]
    if found.worst:
        parts.append(Text("\n  furthest apart, Δ in nat, with the tokens around them (masked ones in brackets)", QUIET))
        parts += [Text(f"  {_worst(one)}") for one in found.worst]
    note = (
        f"{found.key} on the recorded batch; gradient: change at counted tokens against no correction, relative; tis truncates exp Δ at C,"
    )
    note += " icepop leaves out what lies outside of [1/C, C], seq-mask the sequences above C, geo-mask those whose mean weight is outside"
    body = (Padding(shown, (1, 2)), Padding(Text(clean(note), QUIET), (0, 2)))
    show(Group(*parts, *body), file=file)


def _row(trial: CorrectionTrial) -> tuple[Text, ...]:
    name = Text(trial.id, STRONG if trial.in_force else "")
    shares = [Text(_share(one)) for one in (trial.dropped, trial.cut)]
    size = Text(_share(trial.sample_size))
    if trial.loss is None:
        return name, *shares, size, Text(clean(trial.note, 40), QUIET), Text("–", QUIET), Text("–", QUIET)
    loss = Text(number(trial.loss), "" if math.isfinite(trial.loss) else HARM)
    if not trial.works:
        return name, *shares, size, loss, Text("not finite", HARM), Text("–", QUIET)
    change = Text("unchanged", PROVEN) if trial.change is not None and trial.change < 1e-6 else Text(number(trial.change))
    return name, *shares, size, loss, change, Text(number(trial.cosine))


def _share(part: float) -> str:
    return "–" if not part else "100 %" if part == 1 else f"{100 * part:.2g} %"


def _worst(one: Outlier) -> str:
    around = [f"{number(delta)}" if counts else f"({number(delta)})" for token, delta, counts in one.neighbours if token < one.token]
    behind = [f"{number(delta)}" if counts else f"({number(delta)})" for token, delta, counts in one.neighbours if token > one.token]
    chances = f"p {number(math.exp(min(one.trainer, 0.0)))} of the trainer, {number(math.exp(min(one.rollout, 0.0)))} of the sampler"
    return f"[{one.row}, {one.token}]  {' '.join([*around, f'→ {number(one.delta)} ←', *behind])}   {chances}"


def draw_correction(found: CorrectionSweep, path: Path) -> None:
    """Draw the probability of each token by trainer and by sampler, and what each correction leaves out. The suffix chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=150)
    plane, shares = figure.subplots(1, 2, width_ratios=(1, 1.2))
    inside = [token for token in found.tokens if math.isfinite(token[2]) and abs(token[2]) <= BEYOND]
    outside = [token for token in found.tokens if math.isfinite(token[2]) and abs(token[2]) > BEYOND]
    for tokens, colour, words in ((inside, "#2a5a8c", "weight within [1/2, 2]"), (outside, "#c8290b", "outside")):
        if tokens:
            plane.scatter([t[4] for t in tokens], [t[3] for t in tokens], s=7, color=colour, alpha=0.6, linewidths=0, label=words)
    top = 1.05 * max([max(token[3:]) for token in (*inside, *outside)] or [1.0])
    plane.plot([0, top], [0, top], color="#777777", lw=0.8, ls=":")
    plane.set(xlabel="probability by the sampler", ylabel="by the trainer", xlim=(-0.02 * top, top), ylim=(-0.02 * top, top))
    plane.legend(fontsize=7, frameon=False, loc="upper left")
    kinds: dict[str, list[CorrectionTrial]] = {}
    for trial in found.trials:
        if trial.threshold is not None and not trial.in_force:
            kinds.setdefault(trial.id.partition(":")[0], []).append(trial)
    for kind, trials in kinds.items():
        shares.plot([t.threshold for t in trials], [t.dropped + t.cut for t in trials], marker="o", ms=3, lw=1.2, label=kind)
    shares.set(xscale="log", xlabel="threshold of the weight", ylabel="tokens left out or truncated")
    shares.set_xticks(THRESHOLDS, [f"{limit:g}" for limit in THRESHOLDS], minor=False)
    shares.minorticks_off()
    shares.set_ylim(bottom=0)
    shares.legend(fontsize=7, frameon=False)
    for axes in (plane, shares):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
