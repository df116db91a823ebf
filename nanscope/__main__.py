"""The command line: one verb, one function, one renderer, one exit status.

Notable: each verb imports what it needs when it runs, so that `--help` and `inspect` answer without torch, and a package that is missing
is one line that says what to install.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

from nanscope.errors import NanscopeError
from nanscope.report.clean import clean
from nanscope.report.exit import FOUND, HEALTHY, STATUSES, UNSEEN, finish, say, settled, status_of, write_json, writing
from nanscope.report.streams import legible, silence
from nanscope.snapshot.coverage import Status
from nanscope.snapshot.runs import DEEP_EVERY, MAX_BYTES
from nanscope.watching.acting import ACTIONS, MAX_REPAIRS

if TYPE_CHECKING:
    from nanscope.foresight.precision_model import Precision
    from nanscope.snapshot.fetched import Fetched
    from nanscope.verdict.incident import Verdict
    from nanscope.watching.leading import Leading

try:
    import rich  # noqa: F401 - each verb shows its result with it: it is missed now, and not after a night of training
    import typer
except ModuleNotFoundError:
    sys.exit("nanscope: the command line needs typer and rich: pip install typer rich")


RUNS = "nanscope-runs"  # a path, or an address: Path would take s3://bucket apart

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the first harmful NaN of a training run, replay its step, prove the fix.\n\n"
    "Start with `nanscope demo`, then put `nanscope run` before your own script.",
)


def main() -> None:
    """Run the command line."""
    with legible() as given:
        status = settled(status_of(lambda: app(prog_name="nanscope", obj=given)))
        silence()
    silence()
    sys.exit(status)


def _leave(found: bool) -> NoReturn:
    """End a verb that looked for something."""
    raise typer.Exit(FOUND if found else HEALTHY)


def _leave_with(verdict: Verdict) -> NoReturn:
    """End a verb that shows a verdict."""
    raise typer.Exit(STATUSES[verdict.status.tone])


def _version(wanted: bool) -> None:
    if wanted:
        from nanscope.version import __version__

        print(f"nanscope {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script; with -m a module, after -- a command.")],
    out: Annotated[str, typer.Option("--out", help="Folder of runs, or an address: s3://bucket/runs.")] = RUNS,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the verdict as JSON.")] = None,
    on_nonfinite: Annotated[str, typer.Option("--on-nonfinite", metavar="ACTION", help="record, skip, stop or repair.")] = "record",
    max_repairs: Annotated[int, typer.Option("--max-repairs", metavar="COUNT", min=0, help="At one more, repair stops.")] = MAX_REPAIRS,
    save_step: Annotated[
        list[int] | None, typer.Option("--save-step", metavar="STEP", help="Also save this step, healthy as it is.")
    ] = None,
    max_bytes: Annotated[int, typer.Option("--max-bytes", metavar="BYTES", min=1, help="Of all snapshots.")] = MAX_BYTES,
    deep_every: Annotated[int, typer.Option("--deep-every", metavar="STEPS", min=0, help="Of deep looks; 0: none.")] = DEEP_EVERY,
    check: Annotated[bool, typer.Option("--check", help="Say what would kill each loss, too.")] = False,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    run_id: Annotated[str, typer.Option("--run-id", metavar="NAME", help="Of the job, the same on all its nodes.")] = "",
    on_ray: Annotated[bool, typer.Option("--ray", help="Watch the workers of a Ray cluster, too.")] = False,
    after: Annotated[str, typer.Option("--after", hidden=True)] = "",
) -> None:
    """Run a training script and watch it, with all the processes that it starts.

    Everything after the script's name belongs to it. Ends with the verdict: status 3 if something harmful was found, 4 if nothing was
    and not all seen.

    Example: nanscope run --check train.py --lr 1e-6

    Example: nanscope run -- torchrun --nproc-per-node 8 train.py

    Example: nanscope run --ray --out s3://bucket/runs -- python ppo.py
    """
    if on_nonfinite not in ACTIONS:
        raise typer.BadParameter("must be record, skip, stop or repair", param_hint="--on-nonfinite")
    from nanscope.integrations.ray import by_environment
    from nanscope.watching import launch
    from nanscope.watching.dying import die

    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir() or not os.access(json_file.parent, os.W_OK)):
        raise NanscopeError(f"{json_file} cannot be written", slug="not-writable")
    json_file = json_file and json_file.absolute()  # whatever directory the script goes to
    with context.obj.back() if context.obj is not None else nullcontext(), by_environment() if on_ray else nullcontext():
        if after:
            outcome = launch.go_on(after, [target, *context.args])
        else:
            outcome = launch.run(
                target,
                context.args,
                module=module,
                out=out,
                on_nonfinite=on_nonfinite,
                save_steps=save_step or (),
                max_bytes=max_bytes,
                deep_every=deep_every,
                max_repairs=max_repairs,
                check=check,
                run_id=run_id,
                at_death=lambda leading: _last_words(leading, json_file),
                options=["--on-nonfinite", on_nonfinite, *(["--json", str(json_file)] if json_file is not None else [])],
            )
    if outcome.said:
        say(outcome.said)
    if outcome.leading is not None:
        verdict = outcome.leading.verdict
        _tell(outcome.leading, json_file)
    if outcome.interrupted:  # a shell that runs one training after another ends its loop only where one dies of it
        settled(HEALTHY)
        die(signal.SIGINT)
    if outcome.leading is None:  # somebody else tells
        raise typer.Exit(outcome.exit_code or (FOUND if outcome.stopped else HEALTHY))
    if outcome.exit_code and not (
        on_nonfinite in ("stop", "repair") and verdict.status is Status.NONFINITE
    ):  # a process that stops fails its launcher
        raise typer.Exit(outcome.exit_code)
    _leave_with(verdict)


def _last_words(leading: Leading, json_file: Path | None) -> None:
    """Tell what was found when the process is about to be ended."""
    with legible():
        _tell(leading, json_file)


def _tell(leading: Leading, json_file: Path | None) -> None:
    """Show the verdict of a run and leave its pages; of several nodes one does, and the others have a line."""
    verdict, where = leading.verdict, leading.scope.shown(leading.scope.out)
    if leading.reports:
        finish(verdict, leading.scope.out, leading.scope.shown, json_file)
    else:
        say(f"nanscope: {leading.invitation.node}: {verdict.sentence.rstrip('.')}; next: nanscope report {where}")
        write_json(json_file, verdict.to_json())


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
    _leave(failing or not replayed.rows)


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
    _leave(what == "clamp")


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
def variants(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="verl, trl.gr, ...; without one, everything.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it as JSON, with all settings.")] = None,
) -> None:
    """List what a saved step can be replayed under: the losses of the frameworks, with settings and flaws, and the edits.

    Example: nanscope variants verl.vanilla
    """
    from nanscope.replay.variants import variants as listed
    from nanscope.report.variants import print_variants

    found = listed(prefix)
    write_json(json_file, found.to_json())
    print_variants(found, bool(prefix), file=sys.stdout)


@app.command()
def report(
    context: typer.Context,
    path: Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run, a folder of runs (the latest is taken), or one snapshot.")] = RUNS,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="report.html, .png, .txt or .json.")] = Path("report.html"),
) -> None:
    """Draw the report of a run, also of one that was killed; the suffix of the output chooses its form.

    Example: nanscope report nanscope-runs -o report.html
    """
    from nanscope.report.console import progress
    from nanscope.report.render import RENDERERS, choose, render
    from nanscope.snapshot.fetched import fetched

    choose(RENDERERS, output)
    here = context.with_resource(fetched(path))
    verdict = _read(here, path)
    with writing(output), progress(f"drawing {output.name}", file=sys.stderr):
        render(verdict, output, _precision_of(here.path))
    print(clean(str(output)))
    _leave_with(verdict)


def _precision_of(path: Path) -> Precision | None:
    """Measure where the step of a snapshot loses its bits; None for a run, for a large step, and for one that has no such measure."""
    from nanscope.foresight.precision import precision as measured
    from nanscope.program.by_rows import LARGE
    from nanscope.snapshot.file import load

    try:
        return measured(load(path)) if path.is_file() and path.stat().st_size < LARGE else None
    except NanscopeError:
        return None


def _read(here: Fetched, given: str) -> Verdict:
    """Return the verdict on a run directory or a snapshot. given: how a person called it."""
    from nanscope.report.console import track
    from nanscope.snapshot.file import load
    from nanscope.snapshot.runs import find_run
    from nanscope.verdict.diagnose import verdict
    from nanscope.verdict.run import verdict_of

    if here.path.is_file():
        return verdict([load(here.path)], [given])
    run_dir, runs = find_run(here.path)
    if runs:
        print(f"nanscope: {run_dir.name}, the latest of {here.runs or len(runs)} in {given}", file=sys.stderr)
    return verdict_of(run_dir, lambda files: track(files, "reading", file=sys.stderr), shown=here.address)


@app.command()
def runs(
    context: typer.Context,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of runs.")] = RUNS,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the list as JSON.")] = None,
) -> None:
    """List the runs of a folder: when, what, how they ended, and the command that goes on from there.

    Example: nanscope runs nanscope-runs
    """
    from dataclasses import asdict

    from nanscope.report.runs import print_runs
    from nanscope.snapshot.fetched import SNAPSHOT, fetched
    from nanscope.snapshot.record import listed
    from nanscope.snapshot.runs import is_run, runs_in

    here = context.with_resource(fetched(folder, lambda name: not name.endswith(SNAPSHOT), every=True))
    if not here.path.is_dir():
        raise NanscopeError(f"there is no folder of runs {folder!r}", slug="no-run")
    run_dirs = runs_in(here.path) or ([here.path] if is_run(here.path) else [])
    found = [listed(run_dir, here.address(run_dir), here.sizes(run_dir)) for run_dir in run_dirs]
    write_json(json_file, {"schema": 1, "runs": [asdict(run) for run in found]})
    print_runs(found, folder, file=sys.stdout)


@app.command()
def explain(
    slug: Annotated[str | None, typer.Argument(metavar="CAUSE", help="A cause as a verdict names it; without one, all of them.")] = None,
) -> None:
    """Explain a cause: the mechanism, the smallest example, the right fix, the wrong ones, and where it was met.

    Example: nanscope explain where_grad_trap
    """
    from nanscope.causes import Cause
    from nanscope.report.explain import print_causes, print_explanation

    if slug is None:
        print_causes(file=sys.stdout)
    elif slug in set(Cause) - {Cause.UNKNOWN}:
        print_explanation(Cause(slug), file=sys.stdout)
    else:
        raise NanscopeError(f"no cause is called {slug!r}; `nanscope explain` lists them", slug="unknown-cause")


@app.command()
def atlas(
    prefixes: Annotated[list[str] | None, typer.Argument(metavar="PREFIX", help="verl, trl.grpo, ...; without one, everything.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it: atlas.html, .json or .txt.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with the functions of the installed frameworks.")] = False,
) -> None:
    """Show which fault reaches the loss or the gradient, for every loss of every framework.

    Computed while you wait: -inf, NaN or an overflow in each tensor, at a masked or a counted token. With --verify the status is 3 if an
    installed framework's own function answers otherwise.

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
    _leave(verification is not None and bool(verification.disagreements))


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
    _leave(found.changes_loss)


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
    _leave(found.harmful)


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


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of runs; this one gets a directory in it.")] = Path("nanscope-demo"),
    seed: Annotated[int | None, typer.Option("--seed", help="Another run.")] = None,
) -> None:
    """Watch a tiny policy learn with GRPO until it dies of NaN by itself.

    Nothing is staged: log-ratios at padding positions, which the loss does not count, drift until exp overflows. Takes seconds.

    Example: nanscope demo --out nanscope-demo
    """
    from nanscope import demo as training
    from nanscope.report.console import steps_bar
    from nanscope.report.terminal import print_demo_end
    from nanscope.watching.scope import watch

    settings = training.DemoSettings() if seed is None else training.DemoSettings(seed=seed)
    with watch(out=out, name="demo") as scope, steps_bar("training a tiny policy with GRPO", settings.steps, file=sys.stderr) as advance:
        for record in training.train(settings):
            advance(f"reward {record.mean_reward:.2f}  loss {record.loss:+.4f}")
            if scope.snapshots:
                break
    verdict = scope.verdict
    finish(verdict, scope.out, scope.shown)
    print_demo_end(verdict, scope.out, file=sys.stderr)


if __name__ == "__main__":
    main()
