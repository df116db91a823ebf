"""Learn: the verbs that need no run of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nanscope.commands.application import LEARN, app, leave
from nanscope.errors import NanscopeError
from nanscope.report.clean import clean
from nanscope.report.exit import write_json, writing
from nanscope.text import meant


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
    from nanscope.replay.variants import variants as listed
    from nanscope.report.variants import print_variants

    found = listed(prefix)
    write_json(json_file, found.to_json())
    print_variants(found, bool(prefix), file=sys.stdout)


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
