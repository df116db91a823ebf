"""What can be measured, by name, and the measuring of it: one chapter after the other.

for chapter in measured(chosen(["small", "call"], quick=False), quick=True):
    print(chapter.name, chapter.rows[0].seconds)
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanscope.bench import asked, calls, growth, others, ranks, turns
from nanscope.bench.measure import Figures, nothing_kept
from nanscope.bench.tools import OURS
from nanscope.errors import NanscopeError, words_of
from nanscope.text import listed, meant
from nanscope.version import __version__
from nanscope.watching.invoked import commit

Result = tuple[list[Figures], list[str]]


class Subject(NamedTuple):
    """Something that can be measured.

    words:    what it is, and what its seconds are of.
    measure:  by rounds, and whether it is to be quick.
    rounds:   how many are made, quick and not.
    usual:    is it measured where nobody names anything, quick and not?
    packages: what has to be installed.
    """

    words: str
    measure: Callable[[int, bool], Result]
    rounds: tuple[int, int]
    usual: tuple[bool, bool] = (False, False)
    packages: tuple[str, ...] = ()


def _agent(name: str, words: str) -> Subject:
    """Return one of Stable-Baselines3, by its name among `AGENTS`."""

    def measure(rounds: int, quick: bool) -> Result:
        agent = others.AGENTS[name]
        return turns.by_turns(others.StableBaselines(agent), OURS, rounds, 1, per=agent.updates)

    return Subject(words, measure, rounds=(2, 6), packages=("stable_baselines3", "gymnasium"))


def _trl(rounds: int, quick: bool) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return turns.by_turns(others.Trl(Path(folder)), OURS, rounds, 1, per=others.GRPO_STEPS)


SMALL, LARGE = (64, 1024), (512, 8192)  # batches, rows and tokens
HUGE = (LARGE, (1024, 16384), (4096, 16384))

SUBJECTS: dict[str, Subject] = {
    "call": Subject(
        "what is added to a call, a backward pass, an optimizer's step, where tensors cost next to nothing",
        lambda rounds, quick: calls.calls(rounds),
        rounds=(3, 10),
        usual=(True, True),
    ),
    "small": Subject(
        "a PPO step of a robot's policy: actor and critic of two hidden layers, 256 samples",
        lambda rounds, quick: turns.trained("small", rounds, 5, False),
        rounds=(4, 10),
        usual=(True, True),
    ),
    "24m": Subject(
        "a GRPO step of a transformer of 24 M parameters, 8 completions of 64 tokens",
        lambda rounds, quick: turns.trained("24m", rounds, 1, not quick),
        rounds=(1, 3),
        usual=(False, True),
    ),
    "150m": Subject(
        "the same step of 150 M parameters",
        lambda rounds, quick: turns.trained("150m", rounds, 1, not quick),
        rounds=(1, 4),
    ),
    "generation": Subject(
        "sampling, a token of each of 8 prompts: temperature, top-k, top-p; a model of 24 M, one of 1 M",
        lambda rounds, quick: calls.generation(rounds, 8 if quick else 16),
        rounds=(2, 4),
        usual=(False, True),
    ),
    "sac": _agent("sac", "an update of Stable-Baselines3's SAC on Pendulum: critics, actor, temperature, and a step of the environment"),
    "ppo": _agent("ppo", "an update of Stable-Baselines3's PPO on CartPole: 64 samples, and 6.4 steps of the environment"),
    "dqn": _agent("dqn", "an update of Stable-Baselines3's DQN on CartPole: 32 samples, and 4 steps of the environment"),
    "trl": Subject(
        "a step of TRL's GRPOTrainer on a random two-layer Qwen2, sampling included",
        _trl,
        rounds=(2, 6),
        packages=("trl", "transformers", "datasets", "tokenizers"),
    ),
    "ddp": Subject(
        "the step of `small` on two ranks with DistributedDataParallel and gloo",
        lambda rounds, quick: ranks.ddp(rounds),
        rounds=(2, 8),
    ),
    "verdict": Subject(
        "from a bad loss to its verdict; verbs on its file, each a process of its own, beside `import torch`",
        lambda rounds, quick: asked.asked([SMALL] if quick else [SMALL, LARGE], rounds),
        rounds=(1, 1),
        usual=(True, True),
    ),
    "tokens": Subject(
        "bad steps of 4, 16 and 64 million tokens and their verdicts, each in a process that may hold them; takes 8 GB",
        lambda rounds, quick: asked.tokens(HUGE[:2] if quick else HUGE, rounds),
        rounds=(1, 2),
    ),
    "growth": Subject(
        "does it grow in step with the work? What a call, token, layer, step, rank takes as there are more",
        lambda rounds, quick: growth.growth(rounds, 3 if quick else 4),
        rounds=(1, 2),
        usual=(False, True),
    ),
}


@dataclass(frozen=True, slots=True)
class Chapter:
    """What was measured of one subject. said: lines below. left_out, failed: why nothing was, or not all; "" if it was."""

    name: str
    words: str
    rows: tuple[Figures, ...] = ()
    said: tuple[str, ...] = ()
    left_out: str = ""
    failed: str = ""

    def row(self, name: str) -> Figures | None:
        """Return one of its rows."""
        return next((row for row in self.rows if row.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Return as JSON data."""
        rows = [row.to_json() for row in self.rows]
        return {
            "name": self.name,
            "words": self.words,
            "rows": rows,
            "said": list(self.said),
            "left_out": self.left_out,
            "failed": self.failed,
        }


def chosen(names: Sequence[str], quick: bool) -> list[str]:
    """Return the subjects that are meant, the usual ones where none is named. Raises NanscopeError if there is none of a name."""
    for name in names:
        if name not in SUBJECTS:
            near = meant(name, SUBJECTS) or f"; there are {listed(list(SUBJECTS))}"
            raise NanscopeError(f"nothing that can be measured is called {name!r}{near}", slug="unknown-subject")
    return list(dict.fromkeys(names)) or [name for name, subject in SUBJECTS.items() if subject.usual[0 if quick else 1]]


def measured(names: Sequence[str], quick: bool, rounds: int | None = None) -> Iterator[Chapter]:
    """Measure subjects, one after the other. rounds: of each, instead of what is usual. What fails keeps no other back."""
    for name in names:
        subject = SUBJECTS[name]
        why = _impossible(name, subject)
        if why:
            yield Chapter(name, subject.words, left_out=why)
            continue
        try:
            with nothing_kept():
                rows, said = subject.measure(rounds or subject.rounds[0 if quick else 1], quick)
        except NanscopeError as error:
            yield Chapter(name, subject.words, failed=str(error))
        except Exception as error:  # noqa: BLE001 - a trainer of somebody else may raise anything, and the other subjects are there still
            yield Chapter(name, subject.words, failed=words_of(error))
        else:
            yield Chapter(name, subject.words, tuple(rows), tuple(said))


def _impossible(name: str, subject: Subject) -> str:
    """Why something cannot be measured here, "" if it can."""
    missing = [package for package in subject.packages if util.find_spec(package) is None]
    if missing:
        return f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    return "this torch has no gloo" if name == "ddp" and not ranks.is_possible() else ""


# -- where -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and when something was measured. load: processes that wanted to run, before it began; None where the system does not tell."""

    date: str
    cpu: str
    cores: int
    threads: int
    load: float | None
    gpu: str
    system: str
    python: str
    torch: str
    nanscope: str
    commit: str

    @staticmethod
    def here() -> Setting:
        """Return that of this process."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        package = Path(__file__).parents[1]
        return Setting(
            date=datetime.now(UTC).date().isoformat(),
            cpu=_cpu(),
            cores=cores,
            threads=torch.get_num_threads(),
            load=round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            torch=str(torch.__version__),
            nanscope=__version__,
            commit=(commit(str(package)) or "") if (package.parent / ".git").exists() else "",
        )

    @property
    def is_loaded(self) -> bool:
        """Did other work want the cores?"""
        return self.load is not None and self.load > self.cores / 2


def _cpu() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
