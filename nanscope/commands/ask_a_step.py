"""Ask a step: the verbs that put one more question to a saved step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from nanscope.commands.application import app, leave
from nanscope.errors import NanscopeError
from nanscope.report.clean import clean
from nanscope.report.exit import FOUND, HEALTHY, UNSEEN, write_json, writing

if TYPE_CHECKING:
    import torch


@app.command()
def replay(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A snapshot, by its path or address.")],
    edit: Annotated[
        list[str] | None, typer.Option("--edit", metavar="EDIT", help="Also try this: clamp:20, mask, clamp_denominator:1e-8, where, ...")
    ] = None,
    under: Annotated[
        list[str] | None, typer.Option("--as", metavar="LOSS", help="Also under this loss: verl.vanilla, trl:beta=0.04, ...")
    ] = None,
    loss: Annotated[list[str] | None, typer.Option("--loss", metavar="MODULE:FUNCTION", help="Also under your own loss.")] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", metavar="clamp|tis", help="Try one clamp, or correction against the sampler, after another.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the sweep: .png, .svg or .pdf.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.")] = None,
) -> None:
    """Run a saved step again, and see what would have prevented it.

    As recorded, in float64, and with edits at the origin, each forward and backward. The tempting wrong fixes are shown failing.

    Example: nanscope replay step-000412.rank0.safetensors --edit clamp:10 --as verl.vanilla
    """
    from nanscope.replay.edits import parse_edit
    from nanscope.replay.tries import replay as execute
    from nanscope.replay.under import replay_under
    from nanscope.report.console import progress
    from nanscope.report.replay import print_others, print_replay
    from nanscope.report.tried import tried_json
    from nanscope.snapshot.fetched import fetched
    from nanscope.snapshot.file import load
    from nanscope.verdict.diagnose import diagnose
    from nanscope.verdict.incident import Verdict

    if (sweep is not None or png is not None) and (edit or loss):
        raise typer.BadParameter("tries its own changes only: leave --edit and --loss out", param_hint="--sweep")
    here = context.with_resource(fetched(file))
    if sweep is not None or png is not None:
        _sweep(here.path, sweep or "clamp", under or [], png, json_file)
        return
    edits = [(text, parse_edit(text)) for text in edit or []]
    snapshot = load(here.path)
    with progress(f"replaying {here.path.name}", file=sys.stderr):
        others = replay_under(snapshot, under or [], loss or []) if under or loss else None
        replayed = execute(snapshot, edits)
        incident = diagnose(snapshot, file, replayed)
    if others is not None:
        incident = replace(incident, rows=(*incident.rows, *(outcome.row for outcome in others.outcomes)))
    told = {"rows": tried_json(incident), **Verdict((incident,), steps=1, bad_steps=1).to_json()}
    write_json(json_file, told if others is None else told | {"alternatives": [outcome.to_json() for outcome in others.outcomes]})
    failing = replayed.location is not None or snapshot.observation.outside  # or it was seen where the file does not reach
    print_replay(incident, failing, file=sys.stdout)
    if others is not None:
        print_others(others, file=sys.stdout)
    leave(failing or not replayed.rows)


def _sweep(file: Path, what: str, under: list[str], png: Path | None, json_file: Path | None) -> None:
    """Sweep a clamp or a correction, show it, and leave with the status of a step that failed, or that only was looked at."""
    from nanscope.report import replay as objectives
    from nanscope.report.console import progress

    if what not in ("clamp", "tis") or len(under) > 1:
        raise typer.BadParameter("takes clamp or tis, with at most one --as", param_hint="--sweep")
    if png is not None and png.suffix.lower() not in objectives.SUFFIXES:
        raise NanscopeError(f"a sweep is drawn as {', '.join(objectives.SUFFIXES)}, not {png.suffix or png.name!r}", slug="unknown-format")
    with progress(f"sweeping {file.name}", file=sys.stderr):
        told, print_it, draw_it = _swept(file, what, under)
    write_json(json_file, told)
    print_it()
    if png is not None:
        with writing(png):
            draw_it(png)
        print(clean(str(png)))
    leave(what == "clamp")


def _swept(file: Path, what: str, under: list[str]) -> tuple[dict[str, Any], Callable[[], None], Callable[[Path], None]]:
    """Return a sweep as JSON, what prints it, and what draws it."""
    from nanscope.replay.correction import sweep_correction
    from nanscope.replay.sweep import sweep_clamp
    from nanscope.replay.under import named_loss
    from nanscope.report import correction
    from nanscope.report import replay as clamps
    from nanscope.snapshot.file import load

    if what == "clamp":
        bounds = sweep_clamp(load(file), *under)
        return bounds.to_json(), partial(clamps.print_sweep, bounds, file=sys.stdout), partial(clamps.draw_sweep, bounds)
    key, settings = named_loss(under[0]) if under else (None, {})
    found = sweep_correction(load(file), key, **settings)
    return found.to_json(), partial(correction.print_correction, found, file=sys.stdout), partial(correction.draw_correction, found)


@app.command()
def check(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="FILE|MODULE:FUNCTION", help="A saved step, healthy or not, or a loss of your own.")],
    dtype: Annotated[list[str] | None, typer.Option("--dtype", metavar="DTYPE", help="Also in this one: bfloat16, float16.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", metavar="FILE", help="Whose batch the loss is given; without one, ours.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it: .html, .txt, .json or .sarif.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the hazards as JSON.")] = None,
    sarif: Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="Write them for a code host, at their lines.")] = None,
) -> None:
    """Say what would kill a loss, although it has not happened yet.

    Every hazard is executed: which tensor, at which token, from which number on, what it spoils, and which fix helps. Status 3 if training
    can reach one with nothing broken, 4 if none was found and the search was cut off.

    Example: nanscope check step-000004.rank0.safetensors

    Example: nanscope check step-000004.rank0.safetensors -o hazards.html

    Example: nanscope check mymodule:my_loss
    """
    import torch

    from nanscope.report.check import print_check
    from nanscope.report.check_page import RENDERERS, write_check
    from nanscope.report.console import progress
    from nanscope.report.render import choose
    from nanscope.report.sarif import sarif_of
    from nanscope.snapshot.fetched import fetched
    from nanscope.snapshot.file import load
    from nanscope.watching.checking import check as search
    from nanscope.watching.checking import check_own

    if output is not None:
        choose(RENDERERS, output)
    unknown = [name for name in dtype or [] if name not in ("bfloat16", "float16", "float32", "float64")]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is none of bfloat16, float16, float32, float64", param_hint="--dtype")
    dtypes = [cast("torch.dtype", getattr(torch, name)) for name in dtype or []]
    with progress(f"checking {what}", file=sys.stderr):
        if ":" in what and not Path(what).exists() and "://" not in what:
            found = check_own(what, load(context.with_resource(fetched(batch)).path) if batch else None, dtypes)
        else:
            found = search(load(context.with_resource(fetched(what)).path), dtypes=dtypes)
    write_json(json_file, found.to_json())
    write_json(sarif, sarif_of(found))
    if output is None:
        print_check(found, file=sys.stdout)
    else:
        with writing(output):
            write_check(found, output)
        print(clean(str(output)))
    raise typer.Exit(FOUND if found.reachable else HEALTHY if found.complete else UNSEEN)


@app.command()
def audit(
    context: typer.Context,
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Snapshots of one step: its ranks, or its micro-batches.")],
    group_size: Annotated[int | None, typer.Option("--group-size", metavar="N", help="Completions of one prompt, if known.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON.")] = None,
) -> None:
    """Audit what the loss of a step is a mean of, and which tokens weigh more than others.

    Means of means over rows, micro-batches and ranks, denominators without a floor, empty rows, advantages normalised twice. Status 3 if a
    finding changes the loss.

    Example: nanscope audit step-000412.rank0.safetensors step-000412.rank1.safetensors
    """
    from nanscope.audit import audit_snapshots
    from nanscope.report.audit import print_audit
    from nanscope.report.console import track
    from nanscope.snapshot.fetched import fetched
    from nanscope.snapshot.file import load

    snapshots = [load(context.with_resource(fetched(file)).path) for file in track(files, "reading", file=sys.stderr)]
    found = audit_snapshots(snapshots, files, group_size=group_size)
    write_json(json_file, found.to_json())
    print_audit(found, file=sys.stdout)
    leave(found.changes_loss)


@app.command()
def precision(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A snapshot, by its path or address.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it: .html, .png, .txt or .json.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON.")] = None,
) -> None:
    """Show where a recorded step loses its bits: call by call against float64, and what a wider dtype at one place gives back.

    Log-probs in half precision, the tokens that the clip decides differently for it, the order of sums, cancellation: all executed. Status
    3 if rounding changes the gradient by more than 1 %.

    Example: nanscope precision step-000004.rank0.safetensors -o precision.html
    """
    from nanscope.foresight.precision import precision as measured
    from nanscope.report import precision as shown
    from nanscope.report.console import progress
    from nanscope.report.precision_text import print_precision
    from nanscope.report.render import choose
    from nanscope.snapshot.fetched import fetched
    from nanscope.snapshot.file import load

    if output is not None:
        choose(shown.RENDERERS, output)
    here = context.with_resource(fetched(file))
    with progress(f"measuring {here.path.name}", file=sys.stderr):
        found = measured(load(here.path))
    write_json(json_file, found.to_json())
    if output is None:
        print_precision(found, file=sys.stdout)
    else:
        with writing(output):
            shown.render_precision(found, output)
        print(clean(str(output)))
    leave(found.harmful)


@app.command()
def inspect(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A snapshot, by its path or address.")],
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything that is in it as JSON.")] = None,
    program: Annotated[bool, typer.Option("--program", help="Also list the recorded calls.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Also read the tensors: their extremes, and what is NaN or Inf.")] = False,
) -> None:
    """Show what is in a snapshot, before you attach it to a public issue.

    Reads the file's head, and compares its checksum; neither torch (but for --values) nor the training code is needed.

    Example: nanscope inspect step-000412.rank0.safetensors
    """
    from nanscope.report.inspect import print_header
    from nanscope.snapshot.fetched import fetched
    from nanscope.snapshot.header import read_header, verify

    path = context.with_resource(fetched(file)).path
    header, snapshot = read_header(path), None
    if values:
        from nanscope.snapshot.file import load

        snapshot = load(path)
    tensors = [[tensor.name, tensor.dtype, list(tensor.shape), tensor.bytes] for tensor in header.tensors]
    write_json(json_file, {"tensors": tensors, "nanscope": header.about})
    print_header(header, file, program, snapshot, file=sys.stdout)
    verify(path, header)  # what is damaged is shown all the same
