"""`nanscope run`: runs a script, a module or a command inside a watched block, and with it all the processes that it starts.

The script is not touched. What it raises is passed on after the report; what it does with `sys.exit` is kept. The processes that it starts
find in their environment which run they belong to, see `member`; who began the run tells one verdict, of all that they wrote.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from nanscope.errors import NanscopeError
from nanscope.snapshot.coverage import Status
from nanscope.snapshot.record import others, unwatched
from nanscope.snapshot.runs import MAX_BYTES, Folder
from nanscope.verdict.incident import NonFiniteError, Verdict
from nanscope.verdict.run import verdict_of
from nanscope.watching.ambience import AMBIENCE
from nanscope.watching.dying import last_words
from nanscope.watching.invitation import Invitation
from nanscope.watching.member import scope_of
from nanscope.watching.place import name_of, settle
from nanscope.watching.scope import Scope
from nanscope.watching.step import OnNonFinite
from nanscope.watching.target import Target

log = logging.getLogger("nanscope")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a watched script ended. exit_code: its own, 0 if it did not say; error: what it raised, None if nothing. tells: this process has
    begun the run, and so tells its verdict. stopped: at a bad step, as it was asked for.
    """

    scope: Scope
    exit_code: int
    error: BaseException | None
    tells: bool = True
    stopped: bool = False

    @property
    def verdict(self) -> Verdict:
        """On the whole run."""
        return verdict_on(self.scope)


def verdict_on(scope: Scope) -> Verdict:
    """Return the verdict on a run, of all processes that took part in it. scope: of the one that began it; it has ended."""
    scope.gather()
    if scope.leads and (others(scope.out) or unwatched(scope.out)):
        return verdict_of(scope.out, shown=scope.shown)
    return scope.verdict


def run(
    target: str,
    args: Sequence[str],
    *,
    module: bool,
    out: str | os.PathLike[str],
    on_nonfinite: OnNonFinite,
    save_steps: Sequence[int] = (),
    max_bytes: int = MAX_BYTES,
    at_death: Callable[[Scope, str], None] = lambda scope, why: None,
) -> Ended:
    """Run `target`, a script's path, a command or, with module=True, a module's name, and watch it.

    at_death: called with the name of a signal that is about to end the process.
    Raises NanscopeError if there is no such script, command or module, or if nothing can be written to `out`.
    """
    what = Target.of(target, args, module)
    start = what.ready()
    if AMBIENCE.invitation is not None:  # within another `nanscope run`, which tells
        return _ended(start, scope_of(AMBIENCE.invitation), tells=False)
    scope, invitation = _begun(out, what.name, on_nonfinite, save_steps, max_bytes)
    dying = nullcontext() if what.command else last_words(lambda why: at_death(scope, why))
    with invitation.given_out(), dying:
        return _ended(start, scope, tells=True)


def lead(
    *, out: str | os.PathLike[str], on_nonfinite: OnNonFinite = "record", save_steps: Sequence[int] = (), max_bytes: int = MAX_BYTES
) -> Invitation:
    """Begin a run in this process that ends with it, and return the invitation to it; at the end the log tells the verdict on all of it.

    Raises NanscopeError if nothing can be written to `out`.
    """
    scope, invitation = _begun(out, name_of(sys.argv, ()), on_nonfinite, save_steps, max_bytes)

    def enter() -> Callable[[], None]:
        scope.__enter__()
        return scope.leave

    def tell(began: int = os.getpid()) -> None:
        if os.getpid() == began:
            AMBIENCE.rest()
            verdict = verdict_on(scope)
            level = logging.INFO if verdict.status is Status.HEALTHY else logging.WARNING
            log.log(level, "nanscope [verdict]: %s; next: nanscope report %s", verdict.sentence, scope.shown(scope.out))

    AMBIENCE.begin(invitation, enter)
    atexit.register(tell)
    return invitation


def _begun(
    out: str | os.PathLike[str], name: str, on_nonfinite: OnNonFinite, save_steps: Sequence[int], max_bytes: int
) -> tuple[Scope, Invitation]:
    try:
        place = settle(Folder.of(out), name, lead=True)
    except OSError as problem:
        raise NanscopeError(f"{out} cannot be written ({problem.strerror or problem}): choose another --out", slug="not-writable") from None
    invitation = Invitation(str(place.path), str(out), place.run, on_nonfinite, tuple(save_steps), max_bytes)
    scope = Scope(
        out=out, on_nonfinite=on_nonfinite, save_steps=save_steps, max_bytes=max_bytes, name=name, place=place, invitation=invitation
    )
    return scope, invitation


def _ended(start: Callable[[], None], scope: Scope, tells: bool) -> Ended:
    """Run it, and return how it ended. A process that is forked from this one comes to this end, too, and has nothing to tell."""
    exit_code, began, stopped = 0, os.getpid(), False
    error: BaseException | None = None
    try:
        with scope, _children(scope) if tells else nullcontext():
            start()
    except NonFiniteError:
        stopped = True  # asked for, and the report tells it better
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else (0 if stop.code is None else 1)
        error = stop if stop.code is not None and not isinstance(stop.code, int) else None
    except BaseException as raised:  # noqa: BLE001 - the script's own failure: reported after the verdict, then passed on
        exit_code, error = (130 if isinstance(raised, KeyboardInterrupt) else 1), raised
    return Ended(scope, exit_code, error, tells and os.getpid() == began, stopped)


@contextmanager
def _children(scope: Scope) -> Iterator[None]:
    """Where nobody watched anything, say that other processes ran: what trains there is not seen from here."""
    before, began = _work_of_children(), os.getpid()
    try:
        yield
    finally:
        scope.gather()
        nothing = not (scope.steps or scope.backwards or others(scope.out))
        if os.getpid() == began and nothing and (_work_of_children() != before or _living_children()):
            scope.missed(
                "child-processes",
                "what the processes did that the script started: none of them reported anything. A Python that cannot import nanscope, "
                "or that runs with -I or -E, is not watched",
            )


def _work_of_children() -> float:
    """What processes that have ended took, in page faults: every one takes some."""
    try:
        import resource  # not on Windows
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _living_children() -> bool:
    return any(path.read_text().strip() for path in Path("/proc/self/task").glob("*/children"))
