"""The tracker of accelerate: it watches the run, and what the loop logs gets the headroom of the loss.

accelerator = Accelerator(log_with=[nanscope.integrations.AccelerateTracker(), "tensorboard"])   # first: who comes before it gets nothing
accelerator.init_trackers("run")      # begins to watch
accelerator.log({"loss": loss}, step)
accelerator.end_training()
"""

from __future__ import annotations

import atexit
from typing import Any

from accelerate.tracking import GeneralTracker

from nanscope.integrations.stretch import Stretch
from nanscope.watching.scope import Scope, watch


class AccelerateTracker(GeneralTracker):  # type: ignore[misc,unused-ignore]  # where it is not installed it is of no known type
    """Watches from `init_trackers` to `end_training`, or the end of the process. scope: of the run, None before it begins.

    targets, options: as those of `nanscope.watch`. Raises NanscopeError for an option that it does not take.
    """

    name = "nanscope"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, *targets: Any, **options: Any) -> None:
        super().__init__()
        watch(**options)  # so that a wrong option is told now, and not when training begins
        self.scope: Scope | None = None
        self._targets, self._options = targets, options
        self._stretch: Stretch | None = None

    @property
    def tracker(self) -> Scope | None:
        """The scope."""
        return self.scope

    def start(self) -> None:
        """Begin to watch."""
        self.finish()
        self.scope = watch(*self._targets, **self._options)
        self._stretch = Stretch(self.scope)
        self.scope.__enter__()
        atexit.register(self.finish)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Nothing: the settings are the loop's."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add what the steps since the last log came to; the trackers after this one see it."""
        if self._stretch is not None:
            values.update(self._stretch.scalars())

    def finish(self) -> None:
        """Stop watching."""
        if self._stretch is not None and self.scope is not None:
            self._stretch = None
            atexit.unregister(self.finish)
            self.scope.__exit__(None, None, None)
