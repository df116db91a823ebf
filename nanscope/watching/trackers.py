"""What is known of a run, for experiment trackers: the numbers of each step, and each hit with its page.

    class Tracker:  # three methods, whatever it is
        def log(self, step, scalars): ...       # {"nanscope/headroom_nats": 61.2, …}
        def alert(self, title, text): ...       # "nanscope: step 412", "ratio = torch.exp(log_ratio) overflowed to +inf …"
        def artifact(self, path): ...           # nanscope-runs/…/step-000412.rank0.html

    nanscope.watch(trainer, trackers=[nanscope.integrations.WandB()])

Notable: training only puts the line of a step on a queue. A thread of its own reads it, so that a tracker may be slow, wait for a network,
or fail: that is said once, and after a few failures in a row it is not called any more. Pages are made in a process of their own: to
diagnose a step is to run it, and random numbers and memory are the trainer's.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nanscope.capture.unseen import unseen
from nanscope.errors import visible, words_of
from nanscope.given import refused, several
from nanscope.snapshot.history import Entry
from nanscope.snapshot.processes import called
from nanscope.snapshot.scalars import Scalars
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.forecast import Forecast
from nanscope.verdict.sentence import what
from nanscope.watching.draft import Draft
from nanscope.watching.telling import NOT_SEEN

log = logging.getLogger("nanscope")

PERIOD = 0.1  # seconds between two looks at the queue
WAITING = 10_000  # lines that wait for trackers that are slower than training
PATIENCE = 20.0  # seconds for what is left when the run ends, pages too
METHODS = ("log", "alert", "artifact")  # of a tracker
FAILURES = 5  # in a row, after which a tracker is not called any more


class Tracker(Protocol):
    """Where the numbers of a run go. All three are called from one thread, which is not that of the training."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """A step is over. scalars: by name, "nanscope/headroom_nats" and so on; not all of them are finite."""

    def alert(self, title: str, text: str) -> None:
        """Something was found. title: a few words; text: one line."""

    def artifact(self, path: Path) -> None:
        """The page of a bad step was written."""


def trackers_in(given: Any) -> list[Tracker]:
    """Return what was given as trackers. Raises NanscopeError where it is anything else."""
    takes = f"trackers, each with the methods {', '.join(METHODS[:-1])} and {METHODS[-1]}"
    found: list[Tracker] = several("trackers", given, takes)
    for one in found:
        if isinstance(one, type) or not all(callable(getattr(one, name, None)) for name in METHODS):
            raise refused("trackers", takes, one)
    return found


class Tracking:
    """Tells the trackers of a run what happens in it."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)
        self._failures = [0] * len(self._trackers)
        self._queue: deque[Callable[[], None]] = deque(maxlen=WAITING)
        self._scalars = Scalars()
        self._lost = 0  # lines that went out of the queue at its other end
        self._pages: list[Draft] = []  # that are being made
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._pid = os.getpid()

    def line(self, entry: Entry) -> None:
        """The line of a step was written."""
        self._put(lambda: self._line(entry))

    def found(self, snapshot: Snapshot, shown: str | None, file: Path | None) -> None:
        """A bad step was kept. shown: where, as a person would write it; file: itself. None if it could not be written."""
        self._put(lambda: self._found(snapshot, shown, file))

    def foretold(self, forecast: Forecast) -> None:
        """Something is about to happen."""
        self._put(
            lambda: self._tell(lambda tracker: tracker.alert(f"nanscope: forecast, step {forecast.step}", visible(forecast.sentence)))
        )

    def end(self) -> None:
        """The run is over: tell what is left, and wait for that, though not for ever."""
        if self._thread is None or self._pid != os.getpid():
            return
        self._over.set()
        self._thread.join(PATIENCE)
        if self._thread.is_alive() or self._lost:
            log.warning("nanscope [trackers-late]: the trackers were too slow for all of the run; its folder has it")

    def _put(self, event: Callable[[], None]) -> None:
        if self._pid != os.getpid():
            return  # a forked process: connections and writers are its parent's
        self._lost += len(self._queue) == WAITING
        self._queue.append(event)
        if self._thread is None:
            within = contextvars.copy_context()  # some trackers keep their run there
            self._thread = threading.Thread(target=within.run, args=(self._go_on,), name="nanscope-trackers", daemon=True)
            self._thread.start()

    def _go_on(self) -> None:
        with unseen():
            while not self._over.wait(PERIOD):
                self._empty()
                self._deliver()
            self._empty()
            while self._pages:
                time.sleep(PERIOD)
                self._deliver()

    def _empty(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _line(self, entry: Entry) -> None:
        scalars = self._scalars.of(entry)
        self._tell(lambda tracker: tracker.log(entry.step, scalars))

    def _found(self, snapshot: Snapshot, shown: str | None, file: Path | None) -> None:
        seen = snapshot.found
        process = f" on {called(snapshot.rank, snapshot.worker)}" if snapshot.rank or snapshot.worker else ""
        next_ = f"; next: nanscope replay {shown}" if shown is not None else ""
        text = visible(f"{what(seen) if seen.phase is not None else NOT_SEEN}{next_}")
        self._tell(lambda tracker: tracker.alert(f"nanscope: {snapshot.place}{process}", text))
        if file is not None:
            self._pages += [page] if (page := Draft.begin(file)) is not None else []

    def _deliver(self) -> None:
        """Hand over the pages that are ready."""
        ready = [page for page in self._pages if page.is_over]
        self._pages = [page for page in self._pages if page not in ready]
        for path in (page.path for page in ready if page.is_there):
            self._tell(partial(_give, path))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for index, tracker in enumerate(self._trackers):
            if self._failures[index] >= FAILURES:
                continue
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - a tracker may fail in any way, and nobody is to notice
                self._failures[index] += 1
                if self._failures[index] in (1, FAILURES):
                    so = "it gets no more of this run" if self._failures[index] == FAILURES else "training goes on"
                    log.warning("nanscope [tracker-failed]: %s: %s; %s", type(tracker).__name__, words_of(error), so)
            else:
                self._failures[index] = 0


def _give(path: Path, tracker: Tracker) -> None:
    tracker.artifact(path)
