"""Our own failure never stops a training run: it becomes one logged warning, and the observation is missing.

Whatever torch calls back of ours is a `door`, made here, so that nothing of ours is entered from the trainer's thread in any other way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from nanscope.capture.unseen import is_traced
from nanscope.errors import Deliberate, words_of

log = logging.getLogger("nanscope")

PATIENCE = 16  # failures in a row after which an instrument is not tried again


class Failsafe:
    """Calls functions of ours. failures: slugs of what has failed so far, each logged once. missed: is told slug and words every time."""

    def __init__(self, missed: Callable[[str, str], None] = lambda slug, text: None) -> None:
        self.failures: list[str] = []
        self._missed = missed
        self._in_a_row: dict[str, int] = {}

    def __call__(self, what: str, function: Callable[..., object], *args: Any) -> None:
        """Call `function`; an error that was asked for passes, and what has failed again and again is not called any more."""
        if self._in_a_row and self._in_a_row.get(what, 0) >= PATIENCE:
            return
        try:
            function(*args)
        except Deliberate:
            raise
        except Exception as error:  # noqa: BLE001 - the training run must go on whatever fails in here
            self.caught(what, error)
        else:
            if self._in_a_row:
                self._in_a_row.pop(what, None)

    def door(self, what: str, function: Callable[..., object]) -> Callable[..., None]:
        """Return `function` as what torch may call back: it never raises, answers nothing, and does nothing in a trace."""

        def entered(*args: Any) -> None:
            if not torch.compiler.is_compiling():
                self(what, _unless_traced, function, args)

        return entered

    def caught(self, what: str, error: Exception) -> None:
        """Note a failure, and log the first of its kind. Never raises, although a handler of the trainer's logging may."""
        slug = f"{what}-failed"
        known = slug in self.failures
        self._in_a_row[what] = self._in_a_row.get(what, 0) + 1
        self.failures += [] if known else [slug]
        try:
            if not known:
                log.warning("nanscope [%s]: %s; training goes on, this was not observed", slug, _said(error))
            self._missed(slug, f"an observation of ours failed ({what}: {type(error).__name__})")
        except Exception:  # noqa: BLE001 - it is on the list, and there is no other way to say it
            return


def _unless_traced(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    if not is_traced():
        function(*args)


def _said(error: Exception) -> str:
    """What an error says, or of what class it is, where even asking fails: that something has failed is said in any case."""
    try:
        return words_of(error)
    except Exception:  # noqa: BLE001 - as above
        return type(error).__name__
