"""Watch a run: the verbs that train, and those that show what a run came to."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanscope.commands.application import RUNS, WATCH, app, leave, leave_with, no_option
from nanscope.commands.given import Fresh, load_torch, refuse_missing, say_before
from nanscope.errors import NanscopeError
from nanscope.report.clean import clean
from nanscope.report.exit import FAILED, FOUND, HEALTHY, attempt, finish, say, settled, write_json, writing, wrote_json
from nanscope.report.streams import legible
from nanscope.snapshot.coverage import Status
from nanscope.snapshot.runs import DEEP_EVERY, MAX_BYTES
from nanscope.watching.acting import ACTIONS, MAX_REPAIRS

if TYPE_CHECKING:
    from nanscope.foresight.precision_model import Precision
    from nanscope.snapshot.fetched import Fetched
    from nanscope.verdict.incident import Verdict
    from nanscope.verdict.remembered import Memory
    from nanscope.watching.leading import Leading


@app.command(
    rich_help_panel=WATCH, context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
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
    """Run a training script and watch it, with all it starts.

    Everything after the script's name belongs to it. Ends with the verdict: status 3 if something harmful was found, 4 if nothing was
    and not all seen.

    Example: nanscope run --check train.py --lr 1e-6

    Example: nanscope run -- torchrun --nproc-per-node 8 train.py

    Example: nanscope run --ray --out s3://bucket/runs -- python ppo.py
    """
    if target.startswith("-") and not Path(target).exists():
        raise typer.BadParameter(no_option(context, target), param_hint="SCRIPT")
    if on_nonfinite not in ACTIONS:
        raise typer.BadParameter("must be record, skip, stop or repair", param_hint="--on-nonfinite")
    from nanscope.integrations.ray import by_environment
    from nanscope.report.console import progress
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
        with progress("replaying what was saved", file=sys.stderr):
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
    leave_with(verdict)


def _last_words(leading: Leading, json_file: Path | None) -> None:
    """Tell what was found when the process is about to be ended."""
    with legible():
        _tell(leading, json_file, busy=False)


def _tell(leading: Leading, json_file: Path | None, busy: bool = True) -> None:
    """Show the verdict of a run and leave its pages; of several nodes one does, and the others have a line. busy: say what is drawn."""
    verdict, where = leading.verdict, leading.scope.shown(leading.scope.out)
    if leading.reports:
        finish(verdict, leading.scope.out, leading.scope.shown, json_file, busy)
    else:
        say(f"nanscope: {leading.invitation.node}: {verdict.sentence.rstrip('.')}; next: nanscope report {where}")
        write_json(json_file, verdict.to_json())


@app.command(rich_help_panel=WATCH)
def report(
    context: typer.Context,
    path: Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run, a folder of runs (the latest is taken), or one snapshot.")] = RUNS,
    output: Annotated[
        list[Path],
        typer.Option("-o", "--output", metavar="FILE", help="report.html, .md, .png, .txt or .json; may be given several times."),
    ] = [Path("report.html")],  # noqa: B006
    fresh: Fresh = False,
) -> None:
    """Draw the report of a run, also of one that was killed.

    The suffix of the output chooses its form: a page, Markdown for an issue, a picture, text or data. Several cost one diagnosis, and
    what this user diagnosed before on this machine costs none.

    Example: nanscope report nanscope-runs -o report.html -o report.md
    """
    from nanscope.report.render import PLAIN, RENDERERS, choose, render
    from nanscope.snapshot.remote import is_remote

    for file in output:
        choose(RENDERERS, file)
    if not is_remote(path):
        refuse_missing(path)
    load_torch()
    from nanscope.report.console import progress
    from nanscope.report.terminal import print_next
    from nanscope.snapshot.fetched import fetched
    from nanscope.verdict.remembered import Memory

    here = context.with_resource(fetched(path))
    memory = Memory(fresh)
    verdict = _read(here, path, memory)
    with progress("measuring the precision of the step", file=sys.stderr) as now:
        precision = _precision_of(here.path, memory) if any(file.suffix.lower() not in PLAIN for file in output) else None
        written = []
        for file in output:
            now(f"drawing {file.name}")
            if attempt(str(file), lambda file=file: render(verdict, file, precision, memory)):  # type: ignore[misc]
                written.append(file)
    say_before(memory.at)
    for file in written:  # only now: a pipe that is closed keeps no file back
        print(clean(str(file)), flush=True)
    if written:
        print_next(verdict, written[0], file=sys.stderr)
    if len(written) < len(output):
        raise typer.Exit(FAILED)
    leave_with(verdict)


def _precision_of(path: Path, memory: Memory) -> Precision | None:
    """Measure where the step of a snapshot loses its bits; None for a run, for a large step, and for one that has no such measure."""
    from nanscope.foresight.precision import precision as measured
    from nanscope.foresight.precision_model import Precision
    from nanscope.program.by_rows import LARGE
    from nanscope.snapshot.file import load

    if not path.is_file() or path.stat().st_size >= LARGE:
        return None
    try:
        return memory.of(memory.key(Precision, path), lambda: measured(load(path)))
    except NanscopeError:
        return None


def _read(here: Fetched, given: str, memory: Memory) -> Verdict:
    """Return the verdict on a run directory or a snapshot. given: how a person called it. memory: of what was explained before."""
    from nanscope.report.console import progress, track
    from nanscope.snapshot.runs import find_run
    from nanscope.verdict.diagnose import Question, explained, verdict
    from nanscope.verdict.run import verdict_of

    if here.path.is_file():
        with progress(f"reading and replaying {here.path.name}", file=sys.stderr):
            return verdict((), incidents=explained([Question(file=here.path, shown=given)], memory))
    run_dir, runs = find_run(here.path)
    if runs:
        say(f"nanscope: {run_dir.name}, the latest of {here.runs or len(runs)} in {given}")
    return verdict_of(run_dir, lambda files: track(files, "replaying what was saved", file=sys.stderr), shown=here.address, memory=memory)


@app.command("open", rich_help_panel=WATCH)
def open_page(
    context: typer.Context,
    path: Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run, a folder of runs (the latest is taken), or a page.")] = RUNS,
) -> None:
    """Show the page of a run in the browser.

    It is drawn first where there is none, or where the run has gone on since. Over ssh, and where there is no display, you are told
    where it lies and how to fetch it.

    Example: nanscope open nanscope-runs
    """
    from nanscope.report.browse import PAGE, far, how_to_fetch, is_stale, opened
    from nanscope.report.console import progress
    from nanscope.report.render import render
    from nanscope.snapshot.fetched import fetched
    from nanscope.snapshot.remote import is_remote
    from nanscope.snapshot.runs import find_run

    if is_remote(path):
        raise NanscopeError(f"{path} is an address: nanscope report {path} -o {PAGE}, then nanscope open {PAGE}", slug="no-page")
    refuse_missing(path)
    page = Path(path)
    if page.suffix != ".html":
        run_dir = find_run(page if page.is_dir() else page.parent)[0]
        page = run_dir / PAGE
        if is_stale(run_dir):
            load_torch()
            from nanscope.verdict.remembered import Memory

            verdict = _read(context.with_resource(fetched(path)), path, Memory())
            with writing(page), progress(f"drawing {page}", file=sys.stderr):
                render(verdict, page)
    print(clean(str(page)), flush=True)
    why = far() or ("" if opened(page) else "no browser could be started")
    if why:
        say(f"nanscope: {why}: on your own machine, {how_to_fetch(page)}")


@app.command(rich_help_panel=WATCH)
def runs(
    context: typer.Context,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of runs.")] = RUNS,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the list as JSON.")] = None,
) -> None:
    """List the runs of a folder, and how they ended.

    When, what, how far, and the command that goes on from there.

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
    whole = wrote_json(json_file, {"schema": 1, "runs": [asdict(run) for run in found]})
    print_runs(found, folder, file=sys.stdout)
    leave(False, whole)


@app.command(rich_help_panel=WATCH)
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of runs; this one gets a directory in it.")] = Path("nanscope-demo"),
    seed: Annotated[int | None, typer.Option("--seed", help="Another run.")] = None,
) -> None:
    """Watch a tiny policy learn until it dies of NaN by itself.

    It learns with GRPO. Nothing is staged: log-ratios at padding positions, which the loss does not count, drift until exp overflows.
    Takes seconds.

    Example: nanscope demo --out nanscope-demo
    """
    from nanscope import demo as training
    from nanscope.report.console import progress, steps_bar
    from nanscope.report.terminal import print_demo_end
    from nanscope.watching.scope import watch

    settings = training.DemoSettings() if seed is None else training.DemoSettings(seed=seed)
    with watch(out=out, name="demo") as scope, steps_bar("training a tiny policy with GRPO", settings.steps, file=sys.stderr) as advance:
        for record in training.train(settings):
            advance(f"reward {record.mean_reward:.2f}  loss {record.loss:+.4f}")
            if scope.snapshots:
                break
    with progress("replaying what was saved", file=sys.stderr):
        verdict = scope.verdict
    finish(verdict, scope.out, scope.shown)
    print_demo_end(verdict, scope.out, file=sys.stderr)
