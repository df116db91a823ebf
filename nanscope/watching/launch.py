"""`nanscope run`: runs a script, a module or a command inside a watched block, and with it all the processes that it starts.

The script is not touched. What it raises is passed on after the report; what it does with `sys.exit` is kept. The processes that it starts
find in their environment which run they belong to, see `member`; who began the run tells one verdict, of all that they wrote.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from nanscope.snapshot.coverage import Status
from nanscope.snapshot.runs import DEEP_EVERY, MAX_BYTES
from nanscope.verdict.incident import NonFiniteError
from nanscope.watching.acting import MAX_REPAIRS, OnNonFinite
from nanscope.watching.ambience import AMBIENCE
from nanscope.watching.dying import last_words
from nanscope.watching.execs import leaves, stays
from nanscope.watching.invitation import CHILDREN, MEMBER, Invitation
from nanscope.watching.job import Job
from nanscope.watching.leading import Leading
from nanscope.watching.outlasting import show, wait
from nanscope.watching.place import name_of
from nanscope.watching.scope import Scope, abandon
from nanscope.watching.target import Target, run_command

log = logging.getLogger("nanscope")

GO_ON = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from nanscope.__main__ import main; main()"

OURS = frozenset((__file__, run_command.__code__.co_filename))  # files through which a script is called


@dataclass(frozen=True, slots=True)
class Ended:
    """How a watched script ended. leading: the run that this process has begun, and so tells of; None where another one has.
    exit_code: its own, 0 if it did not say; said: its last word, "" if it had none. stopped: at a bad step, as it was asked for.
    interrupted: by Ctrl-C.
    """

    leading: Leading | None
    exit_code: int
    said: str = ""
    stopped: bool = False
    interrupted: bool = False


def run(
    target: str,
    args: Sequence[str],
    *,
    module: bool,
    out: str | os.PathLike[str],
    on_nonfinite: OnNonFinite,
    save_steps: Sequence[int] = (),
    max_bytes: int = MAX_BYTES,
    deep_every: int = DEEP_EVERY,
    max_repairs: int = MAX_REPAIRS,
    check: bool = False,
    run_id: str = "",
    at_death: Callable[[Leading], None] = lambda leading: None,
    options: Sequence[str] = (),
) -> Ended:
    """Run `target`, a script's path, a command or, with module=True, a module's name, and watch it.

    run_id: the same on all nodes of a job, where nothing else tells. at_death: called when the process is about to be ended by a signal,
    or by a program that takes its place. options: of `nanscope run`, for the command line that calls `go_on` then.
    Raises NanscopeError if there is no such script, command or module, or if nothing can be written to `out`.
    """
    what = Target.of(target, args, module)
    start = what.ready()
    if AMBIENCE.invitation is not None:  # within another `nanscope run`, which tells
        return _ended(start, None)
    job = Job.of(os.environ, what.argv, run_id)
    leading = Leading(out, what.name, on_nonfinite, save_steps, max_bytes, job, deep_every=deep_every, max_repairs=max_repairs, check=check)

    def die(why: str) -> None:
        leading.hurried = True
        abandon(why)
        at_death(leading)

    def go() -> None:
        leading.scope.missed("child-processes", "what the program did that took the place of this process")
        die("")

    def line(program: str) -> Sequence[str] | None:
        if leading.invitation.node or leading.scope.is_remote:
            return None
        AMBIENCE.rest()
        abandon("")
        places = [place for place in sys.path if place != str(CHILDREN)]
        after = json.dumps([leading.invitation.to_text(), program])
        return [sys.executable, "-I", "-c", GO_ON, json.dumps(places), "run", *options, "--after", after, "--"]

    AMBIENCE.begin(leading.invitation, leading.enter, leads=True)
    try:
        with leading.at_work(), nullcontext() if what.command else last_words(die), stays(go, line):
            return _ended(start, leading)
    finally:
        AMBIENCE.over()


def go_on(after: str, argv: Sequence[str]) -> Ended:
    """Go on with a run whose script has become another program by `os.exec…`: run that, and tell the verdict. after: as `run` wrote it."""
    text, program = json.loads(after)
    invitation = Invitation.of({MEMBER: text})
    assert invitation is not None
    leading = Leading.again(invitation)
    AMBIENCE.begin(leading.invitation, leading.enter, leads=True)
    try:
        with leading.at_work():
            return _ended(partial(run_command, argv, program), leading)
    finally:
        AMBIENCE.over()


def lead(
    *,
    out: str | os.PathLike[str],
    on_nonfinite: OnNonFinite = "record",
    save_steps: Sequence[int] = (),
    max_bytes: int = MAX_BYTES,
    deep_every: int = DEEP_EVERY,
    max_repairs: int = MAX_REPAIRS,
    check: bool = False,
) -> Invitation:
    """Begin a run in this process that ends with it, and return the invitation to it; at the end the log tells the verdict on all of it.

    Raises NanscopeError for an argument that `watch` does not take, before anything is written, and if nothing can be written to `out`.
    """
    name, act, steps, most, deep = name_of(sys.argv, ()), on_nonfinite, save_steps, max_repairs, deep_every
    Scope(out=out, on_nonfinite=act, save_steps=steps, max_bytes=max_bytes, deep_every=deep, max_repairs=most, check=check)  # or raises
    leading = Leading(out, name, act, steps, int(max_bytes), deep_every=deep, max_repairs=most, check=check)

    def tell() -> None:
        if leading.tells:
            AMBIENCE.rest()
            verdict = leading.verdict
            level = logging.INFO if verdict.status is Status.HEALTHY else logging.WARNING
            log.log(level, "nanscope [verdict]: %s; next: nanscope report %s", verdict.sentence, leading.scope.shown(leading.scope.out))

    AMBIENCE.begin(leading.invitation, leading.enter, leads=True)
    atexit.register(tell)
    leaves(tell)
    return leading.invitation


def _ended(start: Callable[[], None], leading: Leading | None) -> Ended:
    """Run it, and return how it ended. A process that is forked from this one comes to this end, too, and has nothing to tell."""
    ended = Ended(None, 0)
    raised = ""
    try:
        start()
    except SystemExit as stop:
        raised, ended = SystemExit.__name__, _left(stop)
    except BaseException as error:  # noqa: BLE001 - the script's own failure: shown as without us
        raised = type(error).__name__
        try:
            if isinstance(error, NonFiniteError):
                ended = replace(ended, stopped=True)  # asked for, and the report tells it better
            else:
                ended = Ended(None, 1, interrupted=isinstance(error, KeyboardInterrupt))
                show(error, OURS)
        except SystemExit as stop:  # a hook of the script's
            ended = _left(stop)
    wait()
    try:
        AMBIENCE.rest(raised)
    except NonFiniteError:  # of the last step
        ended = replace(ended, stopped=True)
    return replace(ended, leading=leading if leading is not None and leading.tells else None)


def _left(stop: SystemExit) -> Ended:
    """How Python takes a `sys.exit`."""
    if stop.code is None or isinstance(stop.code, int):
        return Ended(None, stop.code or 0)
    return Ended(None, 1, str(stop.code))
