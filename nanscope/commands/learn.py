"""Learn: the verbs that need no run of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nanscope.bench import NAMES
from nanscope.commands.application import LEARN, app, leave
from nanscope.commands.given import load_torch
from nanscope.errors import NanscopeError
from nanscope.report.clean import clean
from nanscope.report.exit import writing, wrote_json
from nanscope.text import listed, meant


def _causes(incomplete: str) -> list[str]:
    from nanscope.causes import Cause

    return [cause for cause in Cause if cause is not Cause.UNKNOWN and cause.startswith(incomplete)]


@app.command(rich_help_panel=LEARN)
def explain(
    slug: Annotated[
        str | None,
        typer.Argument(metavar="CAUSE", help="A cause as a verdict names it; without one, all of them.", autocompletion=_causes),
    ] = None,
) -> None:
    """Explain a cause: how it kills, and what mends it.

    The mechanism, the smallest example, the right fix, the wrong ones, and where it was met.

    Example: nanscope explain where_grad_trap
    """
    from nanscope.causes import Cause
    from nanscope.report.explain import print_causes, print_explanation

    if slug is None:
        print_causes(file=sys.stdout)
    elif slug in set(Cause) - {Cause.UNKNOWN}:
        print_explanation(Cause(slug), file=sys.stdout)
    else:
        near = meant(slug, _causes("")) or "; `nanscope explain` lists them"
        raise NanscopeError(f"no cause is called {slug!r}{near}", slug="unknown-cause")


@app.command(hidden=True)
def variants(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="verl, trl.gr, ...; without one, everything.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it as JSON, with all settings.")] = None,
) -> None:
    """List what a step can be replayed under: `nanscope replay --list`.

    The losses of the frameworks, with settings and flaws, and the edits.

    Example: nanscope variants verl.vanilla
    """
    from nanscope.replay.variants import variants as variants_of
    from nanscope.report.variants import print_variants

    found = variants_of(prefix)
    whole = wrote_json(json_file, found.to_json())
    print_variants(found, bool(prefix), file=sys.stdout)
    leave(False, whole)


@app.command(rich_help_panel=LEARN)
def atlas(
    prefixes: Annotated[list[str] | None, typer.Argument(metavar="PREFIX", help="verl, trl.grpo, ...; without one, everything.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it: atlas.html, .json or .txt.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with the functions of the installed frameworks.")] = False,
) -> None:
    """Show which fault reaches the loss, for every framework.

    Or the gradient, computed while you wait: -inf, NaN or an overflow in each tensor, at a masked or a counted token. With --verify the
    status is 3 if an installed framework's own function answers otherwise.

    Example: nanscope atlas trl.grpo verl.vanilla
    """
    from nanscope import atlas as computed
    from nanscope.report import atlas as shown
    from nanscope.report.console import progress
    from nanscope.report.render import choose

    if output is not None:
        choose(shown.RENDERERS, output)
    with progress("running every loss on every fault", file=sys.stderr):
        found = computed.atlas(prefixes)
        verification = computed.verify(found) if verify else None
    if output is None:
        shown.print_atlas(found, verification, file=sys.stdout)
    else:
        with writing(output):
            shown.render_atlas(found, output, verification)
        print(clean(str(output)))
        if verification is not None:
            shown.print_verification(verification, file=sys.stdout)
    leave(verification is not None and bool(verification.disagreements))


def _subjects(incomplete: str) -> list[str]:
    return [name for name in NAMES if name.startswith(incomplete)]


@app.command(rich_help_panel=LEARN)
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            help=f"{', '.join(NAMES)}; without one, a selection.",
            autocompletion=_subjects,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and smaller sizes: half a minute instead of four minutes.")] = False,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", min=1, help="Rounds of each; more make the quartiles narrower.")
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", min=1, help="Threads of torch; on a busy machine more than one is noisier.")
    ] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")] = None,
    history: Annotated[Path | None, typer.Option("--history", metavar="FILE", help="Append a row to the table in this .md file.")] = None,
) -> None:
    """Measure on this machine what watching a run costs.

    Watched and bare take turns, other tools too. Times are shown and never judged; status 1 if the weights are not bit-identical watched
    and bare, or if nanscope did not see every step.

    Example: nanscope bench small 24m --json figures.json
    """
    load_torch()
    import torch

    from nanscope.bench.subjects import Setting, chosen, measured
    from nanscope.bench.table import append, history_row, print_chapter, print_setting, to_json
    from nanscope.report.console import progress

    wanted = chosen(names or [], quick)
    torch.set_num_threads(threads)
    setting = Setting.here()
    print_setting(setting, file=sys.stdout)
    chapters = []
    with progress(f"measuring {wanted[0]}", file=sys.stderr) as now:
        for at, chapter in enumerate(measured(wanted, quick, rounds), start=1):
            chapters.append(chapter)
            print_chapter(chapter, file=sys.stdout)
            sys.stdout.flush()
            now(f"measuring {wanted[min(at, len(wanted) - 1)]}")
    whole = wrote_json(json_file, to_json(setting, chapters, quick))
    if history is not None:
        with writing(history):
            append(history, history_row(setting, chapters, quick))
    failed = [chapter.name for chapter in chapters if chapter.failed]
    if failed:
        raise NanscopeError(f"what must hold does not: {listed(failed)}", slug="bench-failed")
    leave(False, whole)
