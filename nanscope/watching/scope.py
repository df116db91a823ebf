"""`nanscope.watch`: installs the instruments, wires them together, and takes everything down again.

    with nanscope.watch(trainer) as scope:
        trainer.train()
    print(scope.verdict.sentence)

The gates tell a `Step`, the step asks `examine`, what that returns is kept by the `Logbook`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from nanscope.capture import compiled, modules, swaps
from nanscope.capture.awake import Awake
from nanscope.capture.failsafe import Failsafe
from nanscope.capture.gates import Gates
from nanscope.capture.mode import TapeMode
from nanscope.capture.modules import ModuleWatch
from nanscope.capture.tape import BUDGET, Tape
from nanscope.capture.threads import Instruments, Threads
from nanscope.capture.unseen import unseen
from nanscope.errors import NanscopeError, one_line
from nanscope.foresight.hazard import Check
from nanscope.given import a_call, a_flag, a_path, an, one_of, refused, several, spelled, told, whole
from nanscope.roles import Role
from nanscope.shown import Shown
from nanscope.snapshot.history import History
from nanscope.snapshot.record import RunRecord
from nanscope.snapshot.runs import DEEP_EVERY, MAX_BYTES, Folder
from nanscope.snapshot.step import Snapshot
from nanscope.text import count
from nanscope.verdict.diagnose import diagnose
from nanscope.verdict.forecast import Forecast
from nanscope.verdict.incident import Incident, Note, Verdict
from nanscope.watching.acting import ACTIONS, MAX_REPAIRS, OnNonFinite
from nanscope.watching.ambience import AMBIENCE
from nanscope.watching.counts import Tally
from nanscope.watching.examine import Examiner
from nanscope.watching.invitation import Invitation, is_reaped
from nanscope.watching.logbook import Logbook
from nanscope.watching.oddities import repeated_tokens
from nanscope.watching.optimizers import Optimizers
from nanscope.watching.place import Place, name_of, settle_somewhere
from nanscope.watching.step import Step
from nanscope.watching.surroundings import find_trainer
from nanscope.watching.telling import tell_lacks
from nanscope.watching.trackers import Tracker, Tracking, trackers_in

LIMIT = 3  # steps saved per run; once the weights are NaN every step is bad


_OPEN: WeakSet[Scope] = WeakSet()  # of this process


def _forked() -> None:
    for scope in list(_OPEN):
        scope.forked()


def abandon(why: str) -> None:
    """Close the books of all that watches in this process, which is about to be killed."""
    for scope in list(_OPEN):
        scope.abandon(why)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Scope(Shown):
    """One watched run. Made by `watch`; use it as a context manager."""

    def __init__(
        self,
        targets: tuple[Any, ...] = (),
        *,
        out: str | os.PathLike[str] = "nanscope-runs",
        on_nonfinite: OnNonFinite = "record",
        max_repairs: int = MAX_REPAIRS,
        budget: int = BUDGET,
        save_tokens: bool = False,
        limit: int = LIMIT,
        save_steps: Iterable[int] = (),
        max_bytes: int = MAX_BYTES,
        name: str | None = None,
        on_incident: Callable[[Incident], None] | None = None,
        on_warning: Callable[[Forecast], None] | None = None,
        deep_every: int = DEEP_EVERY,
        check: bool = False,
        trackers: Sequence[Tracker] = (),
        place: Place | None = None,
        invitation: Invitation | None = None,
    ) -> None:
        one_of("on_nonfinite", on_nonfinite, ACTIONS)
        budget = whole("budget", budget, "a number of bytes above 0", 1)
        max_bytes = whole("max_bytes", max_bytes, "a number of bytes above 0", 1)
        limit = whole("limit", limit, "a number of steps")
        steps = [whole("save_steps", step, "numbers of steps") for step in several("save_steps", save_steps, "numbers of steps")]
        self.on_nonfinite, self._max_repairs = on_nonfinite, whole("max_repairs", max_repairs, "a whole number of backward passes")
        self._targets, self._place, self._invitation = tuple(map(_target, targets)), place, invitation
        self._name = name_of([an("name", name, str, "text")] if name is not None and name != "" else sys.argv, targets)
        self._on_incident, self._on_warning = (
            a_call("on_incident", on_incident, "an Incident"),
            a_call("on_warning", on_warning, "a Forecast"),
        )
        told = trackers_in(trackers)
        self._tracking = Tracking(told) if told else None
        line = None if self._tracking is None else self._tracking.line
        announce = self._announce if on_incident is not None or line is not None else None
        warn = self._warn if on_warning is not None or line is not None else None
        folder = Folder.of(a_path("out", out, "the path or address of a folder"))
        self._logbook = Logbook(folder, limit, max_bytes, announce, self.leave, warn, line)
        self._failsafe = Failsafe(self._logbook.gap)
        self._budget, self._save_tokens, self._asked = budget, a_flag("save_tokens", save_tokens), frozenset(steps)
        self._deep_every = whole("deep_every", deep_every, "a whole number of steps, 0 for no deep looks")
        self._check = a_flag("check", check)
        self._tally, self._optimizers = Tally(), Optimizers()
        self._own = self._instruments()
        self._mode, self._modules, self._step = self._own.mode, self._own.modules, self._own.observer
        self._tape = self._mode.tape
        self._threads = Threads(partial(self._instruments, late=True), self._failsafe, self._logbook.gap)
        self._gates = Gates(self._threads, self._failsafe)
        self._undo = contextlib.ExitStack()
        self._entered = self._took_over = False

    def __str__(self) -> str:
        saved = count(len(self.snapshots), "bad step")
        return one_line(f"{count(self.steps, 'step')} watched, {saved} saved, in {self.shown(self.out)}")

    def __enter__(self) -> Scope:
        if self._entered:
            raise NanscopeError("a scope can be entered once; call nanscope.watch again", slug="scope-reused")
        self._entered = True
        self._failsafe("open-run", self._take_over)
        _OPEN.add(self)
        self._failsafe("open-run", self._unseen, self._open)
        with contextlib.ExitStack() as undo:  # half of the instruments are as good as none
            try:
                self._install(undo)
                self._undo = undo.pop_all()
            except Exception as error:  # noqa: BLE001 - training goes on unwatched
                self._failsafe.caught("watch", error)
        self._failsafe("open-run", tell_lacks)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._failsafe("leave", self._undo.close)  # before all else: whatever of ours fails then, nothing stays installed
        try:
            self._failsafe("leave", self.leave, "" if kind is None else kind.__name__, error)
        finally:
            if self._took_over:
                self._failsafe("leave", AMBIENCE.resume)

    def leave(self, raised: str = "", error: BaseException | None = None) -> None:
        """Take everything down and close the book. raised: class of what ended the block, or the signal that is about to. error: that."""
        if self not in _OPEN:
            return
        _OPEN.discard(self)
        with contextlib.ExitStack() as rest:  # whatever finishing a step raises that was asked for
            if (tracking := self._tracking) is not None:
                rest.callback(lambda: self._failsafe("trackers", tracking.end))  # last: the book is closed by then
            rest.callback(lambda: self._failsafe("forget", self._unseen, self._threads.forget))
            rest.callback(lambda: self._failsafe("close-run", self._unseen, partial(self._close, raised)))
            self._failsafe("leave", self._undo.close)
            last = getattr(sys, "last_value", None)  # what has ended a script, or the interpreter
            error = last if error is None and raised == type(last).__name__ else error
            self._failsafe("finish", self._unseen, partial(self._threads.finish, raised, error))

    def _take_over(self) -> None:
        self._took_over = AMBIENCE.rest()

    def _install(self, undo: contextlib.ExitStack) -> None:
        """Install the instruments. undo: takes them off in reverse order, each whatever becomes of the others."""
        for target in self._targets:
            for module in _modules_of(target):
                self._modules.seen.add(module)
        modules.install(self._threads.here, self._threads.begin, self._failsafe, undo)
        self._failsafe("compiled", compiled.install, self._threads.here, self._failsafe, undo)
        self._gates.install(undo)
        swaps.install(self._threads, self._failsafe, undo)
        self._threads.enter(self._own, undo)

    def _instruments(self, late: bool = False) -> Instruments:
        """Return what a thread is watched with. late: it may have computed something already."""
        # The tape of a running step holds nothing that would double the peak: logits over the vocabulary are the largest tensor there is.
        tape = Tape(self._budget, wide=self._budget // 32)
        mode = TapeMode(tape, self._failsafe)
        awake = Awake(mode, self._deep_every)
        watch = ModuleWatch(awake.begin, awake.end, self._failsafe)
        tape.leaves.module_outputs, tape.leaves.is_parameter = watch.output_of, watch.parameter_name
        tape.known.gradients, tape.trailing.weights = watch.gradients, watch.untrained
        tape.rows.of_models = watch.memory
        watch.caller, watch.account, watch.still_read, watch.came_out = tape.callers.place, tape.account, tape.still_read, tape.came_out
        examiner = Examiner(tape, watch, self._targets, self._save_tokens, self._optimizers)
        shared = self._logbook, self.on_nonfinite, self._max_repairs, self._asked, self._tally, self._optimizers
        return Instruments(mode, watch, Step(tape, watch, self._failsafe, examiner, *shared, late, awake, self._check))

    def _mine(self) -> Instruments:
        """Return what this thread is watched with."""
        self._failsafe("thread", self._threads.begin)
        return self._threads.here.strand.eyes or self._own

    def _unseen(self, function: Callable[[], object]) -> None:
        with unseen():
            function()

    def _open(self) -> None:
        targets = tuple(type(target).__qualname__ for target in self._targets)
        about = RunRecord(script=self._name, on_nonfinite=self.on_nonfinite, targets=targets, budget=self._budget)
        invitation = self._invitation or (AMBIENCE.invitation if self._place is None else None)
        if invitation is None or self._place is not None:
            self._logbook.open(self._place or settle_somewhere(self._logbook.runs, self._name), about)
        if invitation is not None:
            join = partial(invitation.join, lead=self.leads or AMBIENCE.leads) if self._place is None or self.leads else None
            about = replace(about, reaped=is_reaped())
            self._logbook.take_part(join, invitation.join, about if self._place is None else None)

    @property
    def leads(self) -> bool:
        """Has this process begun a run in which others take part?"""
        return self._place is not None and not self._place.named

    def forked(self) -> None:
        """In a forked process: the running step is the parent's, what comes is its own."""
        self._tally.restart()
        self._failsafe("forget", self._unseen, self._threads.forked)
        self._failsafe("fork", self._unseen, self._logbook.forked)

    def _announce(self, snapshot: Snapshot, path: str | None) -> None:
        if self._tracking is not None:
            self._tracking.found(snapshot, path, self._logbook.folder.absolute() / Path(path).name if path is not None else None)
        if self._on_incident is not None:
            self._failsafe("on-incident", lambda call: call(diagnose(snapshot, path)), self._on_incident)

    def _warn(self, forecast: Forecast) -> None:
        if self._tracking is not None:
            self._tracking.foretold(forecast)
        if self._on_warning is not None:
            self._failsafe("on-warning", self._on_warning, forecast)

    def _close(self, raised: str) -> None:
        logged = getattr(getattr(find_trainer(self._targets), "state", None), "log_history", None)
        self._logbook.compare(logged if isinstance(logged, list) else [])
        self._logbook.close(raised)

    def tag(self, **tensors: Tensor) -> None:
        """Name tensors where the code's own names do not tell: `scope.tag(log_probs=lp, mask=m)`.

        The names are those of `nanscope.roles.Role`. Raises NanscopeError for another name or for something that is not a tensor.
        """
        for name, tensor in tensors.items():
            if name not in set(Role):
                raise NanscopeError(f"no role is called {name!r}{spelled(name, Role)}; known are {', '.join(Role)}", slug="unknown-role")
            an(f"tag({name}=…)", tensor, Tensor, "a tensor")
            self._failsafe("tag", self._tag, name, tensor)
        if "response_ids" in tensors:
            self._failsafe("tag", self._look_at_tokens, tensors["response_ids"], tensors.get("mask"))

    def step(self, number: int) -> None:
        """Say which step the loop is in, where it has a count of its own: `scope.step(n)` as the first thing of each step.

        From here on every line, file and sentence says this number. Raises NanscopeError for something that is no whole number.
        """
        self._tally.tell(whole("step(…)", number, "a whole number", least=-sys.maxsize))

    def _tag(self, name: str, tensor: Tensor) -> None:
        tape = self._mine().mode.tape
        with unseen():
            tape.tag(name, tensor)

    def _look_at_tokens(self, ids: Tensor, mask: Tensor | None) -> None:
        number = self._mine().observer.number
        with self._threads.aside():
            words = repeated_tokens(ids, mask)
        if words:
            self._logbook.note("repeated_tokens", f"step {number}: {words}", number)

    def missed(self, slug: str, text: str) -> None:
        """Say that training did something here that nobody looked at: what and why, in words that follow "not seen: "."""
        self._failsafe("finish", self._logbook.gap, slug, text)

    def abandon(self, why: str) -> None:
        """Close the book of a run that is about to be killed, from whatever thread; what comes later is not looked at."""
        self._threads.resting = True
        self._failsafe("finish", self._logbook.close, why)

    def gather(self) -> None:
        """Fetch what other processes of the run have written, where `out` is an address."""
        self._failsafe("finish", self._logbook.gather)

    def conclude(self) -> None:
        """Fetch what other processes wrote, where `out` is an address, and say in the record how the run ended in view of it."""
        self._failsafe("finish", self._logbook.conclude)

    @property
    def verdict(self) -> Verdict:
        """What was found so far; complete after the block. Diagnosing runs when it is first asked for."""
        with self._threads.aside():
            return self._logbook.verdict()

    @property
    def out(self) -> Path:
        """The directory of this run, once it has begun; the folder of runs before."""
        return self._logbook.folder

    def shown(self, path: Path) -> str:
        """Return a path of this run as a person would write it: relative where `out` was, whatever the current directory is now."""
        return self._logbook.shown(path)

    @property
    def is_remote(self) -> bool:
        """Does the run go to an address?"""
        return self._logbook.runs.remote

    @property
    def steps(self) -> int:
        """Optimizer steps seen."""
        return self._logbook.steps

    @property
    def backwards(self) -> int:
        """Backward passes seen."""
        return self._logbook.backwards

    @property
    def skipped(self) -> int:
        """Steps that were skipped to protect the weights."""
        return self._logbook.skipped

    @property
    def repaired(self) -> int:
        """Backward passes whose bad gradients were replaced by those of a proven fix."""
        return self._logbook.repaired

    @property
    def bad_steps(self) -> int:
        """Steps in which something was wrong, saved or not."""
        return self._logbook.bad_steps

    @property
    def snapshots(self) -> list[Snapshot]:
        """The bad steps that were saved."""
        return self._logbook.snapshots

    @property
    def paths(self) -> list[Path | None]:
        """Their files, None for one that could not be written."""
        return self._logbook.paths

    @property
    def saved(self) -> list[Path]:
        """The files of healthy steps that were asked for, or show what was said to be about to happen."""
        return self._logbook.saved

    @property
    def warnings(self) -> list[Forecast]:
        """What was said to be about to happen, in the order in which it was."""
        return self._logbook.warnings

    @property
    def checks(self) -> list[Check]:
        """What would kill the losses of the run, where that was asked for."""
        return self._logbook.checks

    @property
    def notes(self) -> list[Note]:
        """What is worth a word and is no incident."""
        return self._logbook.notes

    @property
    def history(self) -> History:
        """The line of every step."""
        return self._logbook.history


def watch(
    *targets: Any,
    out: str | os.PathLike[str] = "nanscope-runs",
    on_nonfinite: OnNonFinite = "record",
    max_repairs: int = MAX_REPAIRS,
    budget: int = BUDGET,
    save_tokens: bool = False,
    limit: int = LIMIT,
    save_steps: Iterable[int] = (),
    max_bytes: int = MAX_BYTES,
    name: str | None = None,
    on_incident: Callable[[Incident], None] | None = None,
    on_warning: Callable[[Forecast], None] | None = None,
    deep_every: int = DEEP_EVERY,
    check: bool = False,
    trackers: Sequence[Tracker] = (),
) -> Scope:
    """Return a scope that watches a training run.

    targets:      a TRL or transformers trainer, an nn.Module, an optimizer, or nothing at all: everything in the block is seen anyway.
    out:          the folder of runs. Each run has a directory of its own in it, `scope.out`, with run.json, history.rank0.jsonl, and a
                  snapshot of each bad step; all ranks of a job share one. What cannot be written there goes to a temporary folder.
    on_nonfinite: "record" changes nothing; "skip" keeps a step with bad gradients from the weights; "stop" raises NonFiniteError, after
                  the snapshot is on disk; "repair" gives a model the gradient of the fix that is proven on the running step in the place of
                  a bad one, and skips the step where none is.
    max_repairs:  backward passes of the run, on this rank, that "repair" mends; at one more it ends training, as "stop" does.
    budget:       bytes of tensors that may be held by reference, in all; the oldest backward passes of a step make room.
    save_tokens:  put integer tensors that look like token ids into snapshots, and the text of these tokens into those of bad steps, where
                  the trainer has a tokenizer.
    limit:        bad steps saved per run; later ones are counted. Steps that are bad because an earlier one spoilt the weights take no
                  place: of these the first is saved.
    save_steps:   numbers of steps to save although nothing is wrong with them, one file a backward pass, to be audited or replayed.
    max_bytes:    of all snapshots of the run. Consequences make room for causes, and the first cause is written however large it is.
    name:         what the run is called; without it, as the script, or the trainer.
    on_incident:  called with the `Incident` of each bad step that has a cause of its own, after its file was written.
    on_warning:   called with a `Forecast` once for each number that runs to where it will do harm, some steps before it gets there.
    deep_every:   the inside of models is listened to in the first steps and in one of so many, for damage that stays finite: an overflow
                  that a later call makes a finite and wrong number of. 0: never.
    check:        each loss is checked when it is first seen healthy, as `nanscope.check` does, while training waits: what would kill it is
                  told on the log, and that step is saved.
    trackers:     get the numbers of each step, a word and a page of each bad one: `nanscope.integrations.WandB()` and others, or anything
                  with the methods of `nanscope.watching.trackers.Tracker`. A thread calls them: training waits for none.
    Raises NanscopeError for an argument that is not one of these.
    """
    return Scope(
        targets,
        out=out,
        on_nonfinite=on_nonfinite,
        max_repairs=max_repairs,
        budget=budget,
        save_tokens=save_tokens,
        limit=limit,
        save_steps=save_steps,
        max_bytes=max_bytes,
        name=name,
        on_incident=on_incident,
        on_warning=on_warning,
        deep_every=deep_every,
        check=check,
        trackers=trackers,
    )


def _target(given: Any) -> Any:
    """What is to be watched. Raises NanscopeError for what surely is no part of a training run."""
    if given is None or isinstance(given, (str, bytes, os.PathLike, int, float, Tensor, type)):
        hint = f"a folder is out={told(given)}" if isinstance(given, str) else ""
        raise refused("watch(…)", "a trainer, an nn.Module, an optimizer, or nothing at all", given, hint)
    return given


def _modules_of(target: Any) -> Iterator[nn.Module]:
    if isinstance(target, nn.Module):
        yield target
    elif isinstance(getattr(target, "model", None), nn.Module):
        yield target.model
