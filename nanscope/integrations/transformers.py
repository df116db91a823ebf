"""The callback of transformers and TRL trainers: it watches the run, and the trainer's own log has the headroom of the loss.

trainer = GRPOTrainer(…, callbacks=[nanscope.integrations.Callback()])
trainer.train()   # {'loss': 0.0132, …, 'nanscope/headroom_nats': 61.2, 'nanscope/log_ratio_max': 27.5, 'nanscope/bad_steps': 0.0}

Notable: whatever the trainer reports to gets these numbers, since they are in the log before anybody else reads it: the callback goes to
the front. transformers calls nothing when training raises, so that the `train` of this one trainer is wrapped, to take the instruments
down. A callback that comes later, by `add_callback`, is told of no trainer: its next run takes them down, or the end of the process.
"""

from __future__ import annotations

import atexit
import functools
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from nanscope.integrations.stretch import Stretch
from nanscope.watching.scope import Scope, watch
from nanscope.watching.surroundings import find_trainer


class Callback(TrainerCallback):
    """Watches each training run of its trainer. scope: of the last one, None before the first; `callback.scope.verdict` says how it went.

    options: as those of `nanscope.watch`. Raises NanscopeError for one that it does not take.
    """

    def __init__(self, **options: Any) -> None:
        watch(**options)  # so that a wrong option is told now, and not when training begins
        self.scope: Scope | None = None
        self._options = options
        self._stretch: Stretch | None = None  # while it watches

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The trainer is there: be told when its `train` ends, however that is."""
        trainer = find_trainer(())
        if trainer is not None:
            self._wrap(trainer)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin to watch, before the others that are called back."""
        self.leave()
        trainer = find_trainer(())
        if trainer is not None:
            self._to_the_front(trainer)
        self.scope = watch(*([trainer] if trainer is not None else [kwargs["model"]]), **self._options)
        self._stretch = Stretch(self.scope)
        self.scope.__enter__()
        atexit.register(self.leave)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add what the steps since the last log came to; an evaluation has a log of its own."""
        if self._stretch is None or logs is None or any(name.startswith("eval_") for name in logs):
            return
        scalars = self._stretch.scalars()
        logs.update(scalars)
        if scalars and state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(scalars)  # a copy of the log that was made before

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop watching."""
        self.leave()

    def leave(self, raised: BaseException | None = None) -> None:
        """Take the instruments down, if they are there. raised: what ended the training."""
        if self._stretch is not None and self.scope is not None:
            self._stretch = None
            atexit.unregister(self.leave)
            self.scope.__exit__(None if raised is None else type(raised), raised, None if raised is None else raised.__traceback__)

    def _wrap(self, trainer: Any) -> None:
        train = trainer.train

        @functools.wraps(train)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                done = train(*args, **kwargs)
            except BaseException as error:
                self.leave(error)
                raise
            self.leave()
            return done

        trainer.train = watched

    def _to_the_front(self, trainer: Any) -> None:
        callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)
