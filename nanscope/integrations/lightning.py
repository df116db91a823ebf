"""The callback of Lightning: it watches the run, and the loggers of the trainer get the headroom of the loss.

lightning.Trainer(callbacks=[nanscope.integrations.LightningCallback()], logger=…)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback as LightningsCallback

from nanscope.integrations.stretch import Stretch
from nanscope.watching.scope import Scope, watch


class LightningCallback(LightningsCallback):  # type: ignore[misc,unused-ignore]  # where it is not installed it is of no known type
    """Watches each `fit` of its trainer. scope: of the last one, None before the first.

    options: as those of `nanscope.watch`. Raises NanscopeError for one that it does not take.
    """

    def __init__(self, **options: Any) -> None:
        watch(**options)  # so that a wrong option is told now, and not when training begins
        self.scope: Scope | None = None
        self._options = options
        self._stretch: Stretch | None = None  # while it watches

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self._leave()
        self.scope = watch(trainer, pl_module, **self._options)
        self._stretch = Stretch(self.scope)
        self.scope.__enter__()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Tell the loggers what the steps came to, as often as Lightning does."""
        step = trainer.global_step
        if self._stretch is not None and step % trainer.log_every_n_steps == 0 and (scalars := self._stretch.scalars()):
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=step - 1)  # as Lightning counts them there

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training raised: stop watching."""
        self._leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The run is over: stop watching."""
        self._leave()

    def _leave(self, raised: BaseException | None = None) -> None:
        if self._stretch is not None and self.scope is not None:
            self._stretch = None
            self.scope.__exit__(None if raised is None else type(raised), raised, None if raised is None else raised.__traceback__)
