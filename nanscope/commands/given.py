"""What FILE and RUN_DIR mean on the command line: a snapshot, all that a run saved, an address; and several of them in turn.

nanscope: step-000060.rank0.safetensors, the first of 3 bad steps saved in nanscope-runs/latest; also: step-000071.rank0, step-000090.rank0
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from nanscope.commands.application import RUNS
from nanscope.errors import NanscopeError
from nanscope.report.clean import clean
from nanscope.report.exit import FAILED, FOUND, HEALTHY, UNSEEN, say, status_of, wrote_json
from nanscope.snapshot.fetched import SNAPSHOT, fetched
from nanscope.snapshot.remote import is_remote
from nanscope.snapshot.runs import find_run, in_order, is_bad_step, runs_in, step_and_rank
from nanscope.text import ago, count, meant

Fresh = Annotated[bool, typer.Option("--fresh", help="Use no earlier diagnosis.")]

LISTED = 4  # further files that are named
WORSE = (HEALTHY, UNSEEN, FOUND, FAILED)  # from the best status to the worst


@dataclass(frozen=True, slots=True)
class SavedStep:
    """One saved step. path: on this machine. shown: as somebody else would call it."""

    path: Path
    shown: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What a verb found in one step: the status it would leave with, all of it as JSON data, and what shows it, which returns False where
    a file that was asked for could not be written."""

    status: int
    data: dict[str, Any]
    show: Callable[[], bool | None]


def load_torch() -> None:
    """Load torch with a word about it: it takes seconds."""
    from nanscope.report.console import progress

    if "torch" not in sys.modules:
        with progress("loading torch", file=sys.stderr):
            import torch  # noqa: F401


def say_before(at: float | None) -> None:
    """Say that what is shown was diagnosed before. at: when, in seconds since 1970; None if it was done now."""
    if at is None:
        return
    from rich.text import Text

    from nanscope.report.console import QUIET, show

    with suppress(OSError):  # nobody listens
        show(Text(f"  diagnosed before, {ago(time.time() - at)}: --fresh computes it again", QUIET), file=sys.stderr)


def step_of(context: typer.Context, given: str) -> SavedStep:
    """Return the step that is meant: a snapshot, or of a run the first bad one, or else the last that was saved healthy.

    Raises NanscopeError with the slug "no-run" if nothing is there, "no-step" if a run saved none.
    """
    here = context.with_resource(fetched(given))
    if not is_remote(given):
        refuse_missing(given)
    if not here.path.is_dir():
        return SavedStep(here.path, given)
    run_dir, runs = find_run(here.path)
    bad, healthy = _saved(run_dir)
    if not bad and not healthy:
        raise NanscopeError(f"no step is saved in {here.address(run_dir)}: nothing went bad, and none was asked for", slug="no-step")
    chosen, *more = _by_cause(bad) or healthy[::-1]
    kind = "bad step" if bad else "healthy step"
    which = f"the {'first' if bad else 'last'} of {count(len(more) + 1, kind)} saved" if more else f"the one {kind} saved"
    also = ", ".join(path.name.removesuffix(SNAPSHOT) for path in more[:LISTED]) + (", ..." if len(more) > LISTED else "")
    latest = f", the latest of {here.runs or len(runs)} runs" if len(runs) > 1 or here.runs > 1 else ""
    say(f"nanscope: {chosen.name}, {which} in {here.address(run_dir)}{latest}" + (f"; also: {also}" if also else ""))
    return SavedStep(chosen, here.address(chosen))


def or_latest(given: Sequence[str] | None) -> list[str]:
    """Return what a person has named, or else the latest run here, if there is one."""
    if not given and not Path(RUNS).is_dir():
        raise typer.BadParameter(f"name a snapshot or a run: there is no {RUNS} here", param_hint="FILE")
    return list(given or [RUNS])


def refuse_missing(given: str) -> None:
    """Raise NanscopeError, with the file that was perhaps meant, where there is none of this name."""
    path = Path(given)
    try:
        if path.exists() or path.is_symlink():
            return
        near = [str(path.parent / other.name) for other in _beside(path)]
    except (OSError, ValueError):  # the latter for a name that no path can have
        near = []
    raise NanscopeError(f"there is no file or run {given!r}{meant(given, near)}", slug="no-run")


def _beside(path: Path) -> Iterator[Path]:
    """Yield what a person can have meant that lies in the same folder."""
    if path.parent.is_dir():
        yield from (other for other in path.parent.iterdir() if other.suffix == path.suffix or other.is_dir())


def _saved(run_dir: Path) -> tuple[list[Path], list[Path]]:
    """Return the snapshots of a run, those of bad steps and those that were asked for, in their order."""
    found = sorted(run_dir.glob(f"*{SNAPSHOT}"), key=lambda path: in_order(path.name))
    return [path for path in found if is_bad_step(path.name)], [path for path in found if path.name.startswith("batch-")]


def _by_cause(bad: list[Path]) -> list[Path]:
    """Return the files of bad steps, of the first step that of the rank which made the harm before those of ranks that it reached."""
    named = [step_and_rank(path) for path in bad]
    first = [path for path, name in zip(bad, named, strict=True) if name and named[0] and name[0] == named[0][0]]
    if len(first) < 2:
        return bad
    load_torch()
    from nanscope.snapshot.bad_step import BadStep
    from nanscope.verdict.standing import in_order as by_cause

    found: list[tuple[BadStep, Path]] = []
    for path in first:
        with suppress(NanscopeError):  # one that cannot be read is told of when it is asked
            found.append((BadStep.read(path), path))
    read = [path for _, path in sorted(found, key=lambda one: by_cause(one[0]))]
    return [*read, *(path for path in bad if path not in read)]


def ask_each(given: Sequence[str], ask: Callable[[str], Reply], json_file: Path | None = None) -> NoReturn:
    """Ask the same of each, with a heading where there are several, and leave with the worst status; one that fails keeps no other back."""
    if len(given) == 1:
        answer = ask(given[0])
        whole = wrote_json(json_file, answer.data)
        whole = answer.show() is not False and whole
        raise typer.Exit(answer.status if whole else FAILED)
    told: list[dict[str, Any]] = []
    statuses = [status_of(lambda one=one: _ask(one, one is given[0], ask, told)) for one in given]  # type: ignore[misc]
    whole = wrote_json(json_file, {"schema": 1, "files": told})
    raise typer.Exit(max(statuses, key=_badness) if whole else FAILED)


def _ask(one: str, first: bool, ask: Callable[[str], Reply], told: list[dict[str, Any]]) -> NoReturn:
    print(f"{'' if first else chr(10)}== {clean(one)}", flush=True)
    answer = ask(one)
    told.append({"file": one, "status": answer.status, **answer.data})
    raise SystemExit(FAILED if answer.show() is False else answer.status)


def _badness(status: int) -> int:
    return WORSE.index(status) if status in WORSE else len(WORSE)  # nobody reads any more


def snapshots_near(incomplete: str) -> list[str]:
    """Return the snapshots that a person could be about to name, those of the latest run of `nanscope-runs` among them: for a shell."""
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    places = [folder, *runs_in(folder), *(Path(RUNS, "latest"),) * (not incomplete)]
    found = [str(path) for place in places for path in sorted(place.glob(f"*{SNAPSHOT}"))]
    return [path for path in dict.fromkeys(found) if path.startswith(incomplete)] or _folders(folder, incomplete)


def _folders(folder: Path, incomplete: str) -> list[str]:
    try:
        found = [f"{path}/" for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []
    return [path for path in found if path.startswith(incomplete)]


def no_page(output: Path | None, given: Sequence[str], option: str) -> None:
    """Refuse one output for several files."""
    if output is not None and len(given) > 1:
        raise typer.BadParameter("takes one FILE at a time", param_hint=option)
