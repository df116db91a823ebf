"""Does the forecast speak where something is about to go wrong, and hold its tongue elsewhere? Long runs, of which the tests have a few steps.

    python tests/benchmarks/forecast.py [demo] [corpus] [trl] [ppo]        # by default all of them; ends with status 1 if one is not so

    demo seed 9: died at step 60, warned 40 steps before
    corpus: 148 scripts, 0 warnings
    trl: 500 steps, nearest 86.1 nats left, 0 warnings
    ppo: 2000 updates, episodes of 20 to 400 steps, nearest 87.4 nats left, 0 warnings

demo: the run of `nanscope demo`, from several seeds. corpus: every script of `tests/healthy`. trl: a GRPOTrainer of TRL on a random
two-layer model, with KL, that learns. ppo: `tests/ppo.py`, which learns to balance a pole.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import nanscope
from nanscope import demo
from nanscope.watching.scope import Scope

TESTS = Path(__file__).parents[1]
SEEDS = (9, 1, 2, 3, 4)
AHEAD = 15  # steps


def said(scope: Scope) -> list[str]:
    """The warnings of a run."""
    return [forecast.sentence for forecast in scope.warnings]


def nearest(scope: Scope) -> str:
    """How near an exponent came to its end, of the steps that are remembered."""
    left = [entry.headroom for entry in scope.history.entries if entry.headroom is not None]
    return f"nearest {min(left):.1f} nats left" if left else "no exponent"


def of_demo() -> bool:
    """Each seed that dies is told of in time."""
    fine = True
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder, nanscope.watch(out=folder) as scope:
            for _ in demo.train(demo.DemoSettings(seed=seed)):
                if scope.snapshots:
                    break
        step = scope.snapshots[0].step if scope.snapshots else None
        first = scope.warnings[0].step if scope.warnings else None
        ahead = None if step is None or first is None else step - first
        fine = fine and (step is None or (ahead is not None and ahead >= AHEAD))
        died = "stayed healthy" if step is None else f"died at step {step}"
        told = "no warning" if first is None else f"warned at step {first}" if ahead is None else f"warned {ahead} steps before"
        print(f"demo seed {seed}: {died}, {told}", flush=True)
    return fine


def of_corpus() -> bool:
    """No script of the healthy corpus is warned of."""
    import new

    scripts, found = sorted((TESTS / "healthy").glob("*.py")), 0
    for path in scripts:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            notes = [note.text for note in new.watched(new.load(path), Path(folder)).notes if note.slug == "said_before"]
        found += len(notes)
        for text in notes:
            print(f"  {path.stem}: {text}", flush=True)
    print(f"corpus: {len(scripts)} scripts, {found} warnings", flush=True)
    return not found


def of_trl(steps: int = 500) -> bool:
    """A healthy GRPO run."""
    from trl_runs import make_trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), max_steps=steps, beta=0.04, logging_steps=steps, learning_rate=1e-4)
        with nanscope.watch(trainer, out=Path(folder) / "runs") as scope:
            trainer.train()
    print(f"trl: {scope.steps} steps, {nearest(scope)}, {len(said(scope))} warnings {said(scope) or ''}", flush=True)
    return scope.steps >= steps and not said(scope) and scope.verdict.healthy


def of_ppo(updates: int = 2000) -> bool:
    """A healthy PPO run."""
    from ppo import train

    with tempfile.TemporaryDirectory() as folder, nanscope.watch(out=folder) as scope:
        lengths = [length for _, length in train(updates)]
    learned = f"episodes of {lengths[0]:.0f} to {max(lengths):.0f} steps"
    print(f"ppo: {scope.steps} updates, {learned}, {nearest(scope)}, {len(said(scope))} warnings {said(scope) or ''}", flush=True)
    return scope.steps >= updates and not said(scope) and scope.verdict.healthy


RUNS: dict[str, Callable[[], bool]] = {"demo": of_demo, "corpus": of_corpus, "trl": of_trl, "ppo": of_ppo}


def main() -> int:
    warnings.simplefilter("ignore")
    logging.getLogger("nanscope").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    sys.path[:0] = [str(TESTS), str(TESTS / "incidents")]
    silent = [RUNS[name]() for name in sys.argv[1:] or RUNS]
    return 0 if all(silent) else 1


if __name__ == "__main__":
    sys.exit(main())
