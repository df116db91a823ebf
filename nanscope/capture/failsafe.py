"""Our own failure never stops a training run: it becomes one logged warning, and the observation is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nanscope.errors import Deliberate

log = logging.getLogger("nanscope")


class Failsafe:
    """Calls functions of ours. failures: slugs of what has failed so far, each logged once. missed: is told slug and words every time."""

    def __init__(self, missed: Callable[[str, str], None] = lambda slug, text: None) -> None:
        self.failures: list[str] = []
        self._missed = missed

    def __call__(self, what: str, function: Callable[..., None], *args: Any) -> None:
        """Call `function`; an error that was asked for passes."""
        try:
            function(*args)
        except Deliberate:
            raise
        except Exception as error:  # noqa: BLE001 - the training run must go on whatever fails in here
            slug = f"{what}-failed"
            self._missed(slug, f"an observation of ours failed ({what}: {type(error).__name__})")
            if slug not in self.failures:
                self.failures.append(slug)
                log.warning("nanscope [%s]: %s: %s; training goes on, this was not observed", slug, type(error).__name__, error)
