"""Ask a step: the verbs that put one more question to a saved step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from nanscope.commands.application import ASK, app, is_verb, leave
from nanscope.commands.given import (
    Fresh,
    Reply,
    ask_each,
    load_torch,
    no_page,
    or_latest,
    refuse_missing,
    say_before,
    snapshots_near,
    step_of,
)
from nanscope.commands.learn import variants
from nanscope.errors import NanscopeError
from nanscope.report.clean import clean
from nanscope.report.exit import FAILED, FOUND, HEALTHY, UNSEEN, attempt, failed, writing, wrote_json
from nanscope.snapshot.fetched import SNAPSHOT
from nanscope.snapshot.remote import is_remote

if TYPE_CHECKING:
    import torch

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE...", help="Snapshots or runs, by path or address; without one, the latest run.", autocompletion=snapshots_near
    ),
]


@app.command(rich_help_panel=ASK)
def replay(
    context: typer.Context,
    files: Files = None,
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
    listing: Annotated[bool, typer.Option("--list", help="List all losses and edits; verl.vanilla: of those.")] = False,
    fresh: Fresh = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.")] = None,
) -> None:
    """Run a saved step again: what would have prevented it?

    As recorded, in float64, and with edits at the origin, each forward and backward. The tempting wrong fixes are shown failing. Of a run
    the first bad step is taken.

    Example: nanscope replay nanscope-runs/latest

    Example: nanscope replay FILE --edit clamp:10 --as verl.vanilla

    Example: nanscope replay --list verl
    """
    if listing:
        variants((files or [""])[0], json_file)
        return
    if (sweep is not None or png is not None) and (edit or loss):
        raise typer.BadParameter("tries its own changes only: leave --edit and --loss out", param_hint="--sweep")
    given = or_latest(files)
    no_page(png, given, "--png")
    if sweep is not None or png is not None:
        ask_each(given, lambda one: _sweep(step_of(context, one).path, sweep or "clamp", under or [], png), json_file)
    ask_each(given, partial(_replay, context, edit or [], under or [], loss or [], fresh), json_file)


def _replay(context: typer.Context, edit: list[str], under: list[str], loss: list[str], fresh: bool, given: str) -> Reply:
    """Replay one step, and show it; what came of it before is enough where no further edit is asked for."""
    load_torch()
    from nanscope.replay.edits import parse_edit
    from nanscope.replay.tries import replay as execute
    from nanscope.replay.under import replay_under
    from nanscope.report.console import progress
    from nanscope.report.replay import print_others, print_replay
    from nanscope.report.tried import tried_json
    from nanscope.snapshot.file import load
    from nanscope.verdict.diagnose import diagnosis
    from nanscope.verdict.incident import Verdict
    from nanscope.verdict.remembered import Diagnosis, Memory

    edits = [(text, parse_edit(text)) for text in edit]
    step = step_of(context, given)
    memory = Memory(fresh)
    with progress(f"reading {step.path.name}", file=sys.stderr) as now:
        snapshot = load(step.path) if edits or under or loss else None
        now(f"replaying {step.path.name} under other losses")
        others = replay_under(snapshot, under, loss) if snapshot is not None and (under or loss) else None

        def run() -> Diagnosis:
            now(f"replaying {step.path.name}, edit by edit")
            read = load(step.path) if snapshot is None else snapshot
            replayed = execute(read, edits)
            now(f"diagnosing {step.path.name}")
            return diagnosis(read, replayed)

        found = memory.of(None if edits else memory.key(Diagnosis, step.path), run, Diagnosis.lasts)
    incident = replace(found.incident, snapshot=step.shown)
    if others is not None:
        incident = replace(incident, rows=(*incident.rows, *(outcome.row for outcome in others.outcomes)))
    told = {"rows": tried_json(incident), **Verdict((incident,), steps=1, bad_steps=1).to_json()}
    if others is not None:
        told |= {"alternatives": [outcome.to_json() for outcome in others.outcomes]}

    def show() -> None:
        print_replay(incident, found.failing, "repro" if is_verb("repro") else "", file=sys.stdout)
        if others is not None:
            print_others(others, file=sys.stdout)
        say_before(memory.at)

    return Reply(FOUND if found.failing or not found.ran else HEALTHY, told, show)


def _sweep(file: Path, what: str, under: list[str], png: Path | None) -> Reply:
    """Sweep a clamp or a correction and show it; the status is that of a step that failed, or that only was looked at."""
    from nanscope.report import replay as objectives
    from nanscope.report.console import progress

    if what not in ("clamp", "tis") or len(under) > 1:
        raise typer.BadParameter("takes clamp or tis, with at most one --as", param_hint="--sweep")
    if png is not None and png.suffix.lower() not in objectives.SUFFIXES:
        raise NanscopeError(f"a sweep is drawn as {', '.join(objectives.SUFFIXES)}, not {png.suffix or png.name!r}", slug="unknown-format")
    with progress(f"sweeping {file.name}", file=sys.stderr):
        told, print_it, draw_it = _swept(file, what, under)

    def show() -> bool:
        print_it()
        if png is None:
            return True
        drawn = attempt(str(png), lambda: draw_it(png))
        if drawn:
            print(clean(str(png)))
        return drawn

    return Reply(FOUND if what == "clamp" else HEALTHY, told, show)


def _swept(file: Path, what: str, under: list[str]) -> tuple[dict[str, Any], Callable[[], None], Callable[[Path], None]]:
    """Return a sweep as JSON, what prints it, and what draws it."""
    load_torch()
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


@app.command(rich_help_panel=ASK)
def check(
    context: typer.Context,
    whats: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|MODULE:FUNCTION...",
            help="Saved steps or runs, healthy or not, or losses of your own; without one, the latest run.",
            autocompletion=snapshots_near,
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", metavar="DTYPE", help="Also in this one: bfloat16, float16.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", metavar="FILE", help="Whose batch the loss is given; without one, ours.")] = None,
    bits: Annotated[bool, typer.Option("--precision", help="Instead, where the step loses its bits, against float64.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it: .html, .txt, .json or .sarif.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the hazards as JSON.")] = None,
    sarif: Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="Write them for a code host, at their lines.")] = None,
) -> None:
    """Say what would kill a loss that has not failed yet.

    Every hazard is executed: which tensor, at which token, from which number on, what it spoils, and which fix helps. Status 3 if training
    can reach one with nothing broken, 4 if none was found and the search was cut off.

    Example: nanscope check step-000004.rank0.safetensors -o hazards.html

    Example: nanscope check mymodule:my_loss

    Example: nanscope check --precision step-000004.rank0.safetensors
    """
    given = or_latest(whats)
    no_page(output, given, "--output")
    no_page(sarif, given, "--sarif")
    if bits:
        if dtype or batch or sarif:
            raise typer.BadParameter("compares a step with float64: leave --dtype, --batch and --sarif out", param_hint="--precision")
        ask_each(given, partial(_precision, context, output), json_file)
    unknown = [name for name in dtype or [] if name not in ("bfloat16", "float16", "float32", "float64")]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is none of bfloat16, float16, float32, float64", param_hint="--dtype")
    ask_each(given, partial(_check, context, dtype or [], batch, output, sarif), json_file)


def _check(context: typer.Context, dtype: list[str], batch: str | None, output: Path | None, sarif: Path | None, given: str) -> Reply:
    """Check one step, or one function, and show what was found."""
    load_torch()
    import torch

    from nanscope.report.check import print_check
    from nanscope.report.check_page import RENDERERS, write_check
    from nanscope.report.console import progress
    from nanscope.report.render import choose
    from nanscope.report.sarif import sarif_of
    from nanscope.snapshot.file import load
    from nanscope.watching.checking import check as search
    from nanscope.watching.checking import check_own

    if output is not None:
        choose(RENDERERS, output)
    dtypes = [cast("torch.dtype", getattr(torch, name)) for name in dtype]
    shown = None  # a file that can be replayed
    if ":" in given and not Path(given).exists() and "://" not in given:
        with progress(f"checking {given}", file=sys.stderr):
            found = check_own(given, load(step_of(context, batch).path) if batch else None, dtypes)
    else:
        step = step_of(context, given)
        with progress(f"reading {step.path.name}", file=sys.stderr) as now:
            snapshot = load(step.path)
            now(f"checking {step.path.name}: what would kill this loss")
            found = search(snapshot, dtypes=dtypes)
        shown = step.shown

    def show() -> bool:
        whole = sarif is None or wrote_json(sarif, sarif_of(found))
        if output is None:
            print_check(found, shown, file=sys.stdout)
        elif attempt(str(output), lambda: write_check(found, output)):
            print(clean(str(output)))
        else:
            return False
        return whole

    return Reply(FOUND if found.reachable else HEALTHY if found.complete else UNSEEN, found.to_json(), show)


@app.command(hidden=True)
def precision(
    context: typer.Context,
    files: Files = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it: .html, .png, .txt or .json.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON.")] = None,
) -> None:
    """Show where a saved step loses its bits: `nanscope check --precision`.

    Call by call against float64, and what a wider dtype at one place gives back. Log-probs in half precision, the tokens that the clip
    decides differently for it, the order of sums, cancellation: all executed. Status 3 if rounding changes the gradient by more than 1 %.

    Example: nanscope precision step-000004.rank0.safetensors -o precision.html
    """
    no_page(output, files or (), "--output")
    ask_each(or_latest(files), partial(_precision, context, output), json_file)


def _precision(context: typer.Context, output: Path | None, given: str) -> Reply:
    """Measure one step, and show what rounding does to it."""
    load_torch()
    from nanscope.foresight.precision import precision as measured
    from nanscope.report import precision as shown
    from nanscope.report.console import progress
    from nanscope.report.precision_text import print_precision
    from nanscope.report.render import choose
    from nanscope.snapshot.file import load

    if output is not None:
        choose(shown.RENDERERS, output)
    step = step_of(context, given)
    with progress(f"reading {step.path.name}", file=sys.stderr) as now:
        snapshot = load(step.path)
        now(f"measuring {step.path.name}, call by call against float64")
        found = measured(snapshot)

    def show() -> bool:
        if output is None:
            print_precision(found, file=sys.stdout)
            return True
        drawn = attempt(str(output), lambda: shown.render_precision(found, output))
        if drawn:
            print(clean(str(output)))
        return drawn

    return Reply(FOUND if found.harmful else HEALTHY, found.to_json(), show)


@app.command(rich_help_panel=ASK)
def audit(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Snapshots of one step: its ranks, or its micro-batches.", autocompletion=snapshots_near),
    ],
    group_size: Annotated[int | None, typer.Option("--group-size", metavar="N", help="Completions of one prompt, if known.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON.")] = None,
) -> None:
    """Say what a loss is a mean of, and which tokens weigh more.

    Means of means over rows, micro-batches and ranks, denominators without a floor, empty rows, advantages normalised twice. Status 3 if a
    finding changes the loss.

    Example: nanscope audit step-000412.rank0.safetensors step-000412.rank1.safetensors
    """
    load_torch()
    from nanscope.audit import audit_snapshots
    from nanscope.report.audit import print_audit
    from nanscope.report.console import progress, track
    from nanscope.snapshot.fetched import fetched
    from nanscope.snapshot.file import load

    for file in files:
        refuse_missing(file)
    snapshots = [load(context.with_resource(fetched(file)).path) for file in track(files, "reading", file=sys.stderr)]
    with progress("weighing every token", file=sys.stderr):
        found = audit_snapshots(snapshots, files, group_size=group_size)
    whole = wrote_json(json_file, found.to_json())
    print_audit(found, file=sys.stdout)
    leave(found.changes_loss, whole)


@app.command(rich_help_panel=ASK)
def repro(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="A snapshot or a run, by path or address; without one, the latest run.", autocompletion=snapshots_near
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it there; without, it is printed.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="With the fix that was seen to work: nothing fails any more.")] = False,
    pytest: Annotated[bool, typer.Option("--pytest", help="As a test, which is red while the fault is there.")] = False,
) -> None:
    """Shrink a saved step to a small script that fails alike.

    On nothing but torch: what a bug report needs. Rows, tokens, calls and numbers go as long as the cause, the place and the harm stay what
    they are; each try is run. Names are those of your code; numbers and operators are all else that is in it.

    Example: nanscope repro step-000412.rank0.safetensors -o repro.py

    Example: nanscope repro nanscope-runs/latest --pytest -o test_loss.py
    """
    from nanscope.report.console import progress

    (given,) = or_latest([file] if file is not None else None)
    step = step_of(context, given)
    load_torch()
    from nanscope.reproduce.reproducer import reproducer
    from nanscope.snapshot.file import load

    with progress(f"shrinking {step.path.name}", file=sys.stderr):
        made = reproducer(load(step.path))
    text = made.text(fix=fix, pytest=pytest)
    if output is None:
        print(text, end="")
        print(made.kept, file=sys.stderr)
    else:
        with writing(output):
            output.write_text(text, encoding="utf-8")
        print(f"{clean(str(output))}: {made.kept}")


@app.command(rich_help_panel=ASK)
def diff(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="A snapshot, or a run.", autocompletion=snapshots_near)],
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="Another; without: A as recorded against as it comes out here.", autocompletion=snapshots_near),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON.")] = None,
) -> None:
    """Lay two steps or runs side by side: where do they part?

    What came in, the first call whose result differs and by how much, the first that differs on the same operands, settings, versions, and
    the histories. Status 3 if anything differs.

    Example: nanscope diff step-000412.rank0.safetensors step-000412.rank1.safetensors

    Example: nanscope diff runs/good runs/bad
    """
    load_torch()
    from nanscope.compare.steps import compare, compare_runs, replayed
    from nanscope.report.compare import print_comparison
    from nanscope.report.console import progress
    from nanscope.snapshot.fetched import fetched
    from nanscope.snapshot.file import load
    from nanscope.snapshot.runs import find_run

    given = [a] if b is None else [a, b]
    for one in given:
        if not is_remote(one):
            refuse_missing(one)
    paths = [context.with_resource(fetched(one)).path for one in given]
    with progress(f"comparing {', '.join(path.name for path in paths)}", file=sys.stderr):
        if len(paths) == 2 and all(path.is_dir() for path in paths):
            found = compare_runs(find_run(paths[0])[0], find_run(paths[1])[0], _names(*paths))
        elif len(paths) == 2:
            steps = [step_of(context, one).path for one in given]
            found = compare(load(steps[0]), load(steps[1]), _names(*steps))
        else:
            found = replayed(load(step_of(context, a).path))
    whole = wrote_json(json_file, found.to_json())
    print_comparison(found, file=sys.stdout)
    leave(not found.same, whole)


def _names(a: Path, b: Path) -> tuple[str, str]:
    """What tells two paths apart, as short as it can be."""
    one, other = (path.name.removesuffix(SNAPSHOT) for path in (a, b))
    if one == other:
        one, other = (f"{path.parent.name}/{path.name.removesuffix(SNAPSHOT)}" for path in (a, b))
    return ("A", "B") if one == other else (one, other)


@app.command(rich_help_panel=ASK)
def inspect(
    context: typer.Context,
    files: Files = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything that is in it as JSON.")] = None,
    program: Annotated[bool, typer.Option("--program", help="Also list the recorded calls.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Also read the tensors: their extremes, and what is NaN or Inf.")] = False,
) -> None:
    """Show what is in a snapshot, before you give it away.

    Reads the file's head, and compares its checksum; neither torch (but for --values) nor the training code is needed.

    Example: nanscope inspect step-000412.rank0.safetensors
    """
    ask_each(or_latest(files), partial(_inspect, context, program, values), json_file)


def _inspect(context: typer.Context, program: bool, values: bool, given: str) -> Reply:
    """Show one snapshot; what is damaged is shown all the same."""
    from nanscope.report.console import progress
    from nanscope.report.inspect import print_header
    from nanscope.snapshot.header import read_header, verify

    step = step_of(context, given)
    header, snapshot = read_header(step.path), None
    if values:
        from nanscope.snapshot.file import load

        with progress(f"reading {step.path.name}", file=sys.stderr):
            snapshot = load(step.path)

    def show() -> None:
        print_header(header, step.shown, program, snapshot, file=sys.stdout)
        if damage:
            failed(damage)

    damage = ""
    try:
        with progress(f"comparing {step.path.name} with its checksum", file=sys.stderr):
            verify(step.path, header)
    except NanscopeError as error:
        damage = str(error)
    tensors = [[tensor.name, tensor.dtype, list(tensor.shape), tensor.bytes] for tensor in header.tensors]
    return Reply(FAILED if damage else HEALTHY, {"tensors": tensors, "nanscope": header.about}, show)
