"""A framework is one file and one line of the table: with that it is named, listed, replayed, and in the atlas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nanscope
from nanscope.frameworks.table import FRAMEWORKS, recognise

# The one file: `nanscope/frameworks/madeup.py`.
ROWS = '''
from dataclasses import dataclass

from nanscope.frameworks.rows import CLAMPED, TOKEN_MEAN, Framework, Loss, LossSite, Remedy, clip, pick, roles
from nanscope.objective.reduction import Masking
from nanscope.objective.settings import LossSettings, Ratio
from nanscope.objective.surrogates import Ppo

_FILE = "madeup/loss.py"


@dataclass(frozen=True, slots=True)
class Made:
    """`surrogate`."""

    width: float = 0.2
    safely: bool = False

    def settings(self) -> LossSettings:
        masking = Masking.WHERE if self.safely else Masking.NONE
        return LossSettings(Ppo(clip(self.width)), Ratio(mask_log_ratio=masking), reduction=TOKEN_MEAN)


FRAMEWORK = Framework(
    name="Made-Up",
    package="madeup",
    version="3.1",
    files=("madeup/",),
    options=("madeup/loss.py",),
    remedies=(Remedy(("exp_overflow", "inf_times_zero_mask"), "masks the log-ratio before exp", "safely=True"),),
    sites=(
        LossSite(
            _FILE,
            "surrogate",
            roles(log_probs="fresh", old_log_probs="stale", advantages="gain", mask="live", log_ratio="drift", ratio="factor", loss="worth"),
            "madeup.loss",
            (),
            (("width", "width"), ("safely", "safely")),
        ),
    ),
    losses=(Loss("madeup.loss", Made, f"{_FILE}:9", "3.1", flaws=("the mask comes after exp",), walked=({"safely": True}, *CLAMPED)),),
)
'''

# The framework itself: nothing that nanscope knows by its names.
LOSS = """
import torch

def surrogate(fresh, stale, gain, live, width=0.2, safely=False):
    drift = fresh - stale
    factor = torch.exp(torch.where(live > 0, drift, 0.0) if safely else drift)
    worth = -torch.minimum(factor * gain, factor.clamp(1 - width, 1 + width) * gain) * live
    return worth.sum() / live.sum().clamp(min=1)
"""

# Its own function, for `nanscope atlas --verify`: found by the prefix of the key, `nanscope/native/madeup.py`.
NATIVE = """
from madeup.loss import surrogate
from nanscope.native.adapter import Adapter, old_log_probs, only, per_token

def call(kind, inputs, settings):
    said = only(settings, ("width", "safely"))
    return surrogate(inputs.log_probs, old_log_probs(inputs), per_token(inputs.advantages, inputs.mask), inputs.mask, **said)

ADAPTER = Adapter("madeup", lambda: None, call)
"""

RUN = """
import json, sys
import torch
from typer.testing import CliRunner
import nanscope
from madeup.loss import surrogate
from nanscope.__main__ import app

def said(*words):
    return CliRunner().invoke(app, list(words)).output

torch.manual_seed(0)
model, stale = torch.nn.Linear(4, 1), torch.zeros(2, 3)
stale[1, 2] = -200.0
gain, live = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
with nanscope.watch(model, out="run") as scope:
    surrogate(torch.nn.functional.logsigmoid(model(torch.ones(2, 3, 4))[..., 0]), stale, gain, live, width=0.3).backward()
(incident,) = scope.verdict.incidents
file = str(incident.snapshot)
replayed = {}
for settings in ("", ":safely=True"):
    said("replay", file, "--as", "madeup.loss" + settings, "--json", "replay.json")
    replayed[settings] = json.loads(open("replay.json").read())["alternatives"][0]
said("variants", "--json", "variants.json")
said("atlas", "madeup", "--verify", "-o", "atlas.json")
print(json.dumps({
    "framework": incident.framework, "objective": incident.objective, "role": incident.origin.role, "variable": incident.origin.variable,
    "remedies": incident.remedies, "replayed": replayed, "variants": json.loads(open("variants.json").read())["losses"],
    "shown": said("variants"), "atlas": json.loads(open("atlas.json").read()),
}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a nanscope says that has one file and one line more; the adapter of the framework is a second file, as for every one."""
    home = tmp_path_factory.mktemp("home")
    package = home / "nanscope"
    shutil.copytree(Path(nanscope.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "frameworks" / "madeup.py").write_text(ROWS, encoding="utf-8")
    (package / "native" / "madeup.py").write_text(NATIVE, encoding="utf-8")
    table = package / "frameworks" / "table.py"
    before = table.read_text(encoding="utf-8")
    assert before.count('        "tinker",\n') == 1
    table.write_text(before.replace('        "tinker",\n', '        "tinker",\n        "madeup",\n'), encoding="utf-8")
    (home / "madeup").mkdir()
    (home / "madeup" / "loss.py").write_text(LOSS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, cwd=home, env={**os.environ, "PYTHONPATH": str(home)}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_is_named(seen: dict[str, Any]) -> None:
    """A watched step knows framework, loss and live settings, what its variables mean, and what helps in its own words."""
    assert (seen["framework"], seen["variable"], seen["role"]) == ("Made-Up", "factor", "ratio")
    assert seen["objective"]["key"] == "madeup.loss" and seen["objective"]["settings"] == {"width": 0.3, "safely": False}
    assert seen["remedies"] == ["safely=True: masks the log-ratio before exp"]


def test_it_is_listed(seen: dict[str, Any]) -> None:
    """`nanscope variants` has its loss, with settings, flaw and version, after all others."""
    loss = seen["variants"][-1]
    assert (loss["key"], loss["version"], loss["flaws"]) == ("madeup.loss", "3.1", ["the mask comes after exp"])
    assert [(knob["name"], knob["default"]) for knob in loss["settings"]] == [("width", 0.2), ("safely", False)]
    assert "madeup.loss" in seen["shown"] and "the mask comes after exp" in seen["shown"]


def test_it_is_replayed(seen: dict[str, Any]) -> None:
    """`nanscope replay --as` runs the saved batch under its loss, with its settings."""
    plain, safe = seen["replayed"][""], seen["replayed"][":safely=True"]
    assert not plain["works"] and plain["bad_masked"] == 1 and safe["works"]


def test_it_is_in_the_atlas(seen: dict[str, Any]) -> None:
    """Its paths are walked, and its own function, found by the prefix, answers as its rows say."""
    atlas = seen["atlas"]
    assert [path["name"] for path in atlas["paths"]] == [
        "madeup.loss",
        "madeup.loss · safely=True",
        "madeup.loss · log_ratio_clamp_value=20.0",
        "madeup.loss · log_ratio_clamp_value=20.0 · clamp_after_exp=True",
    ]
    fault = [fault["name"] for fault in atlas["faults"]].index("old +200 masked A<0")
    assert [path["cells"][fault] for path in atlas["paths"]] == ["LM", "·", "·", "M"]
    (compared,) = atlas["verification"]["compared"]
    assert (compared["framework"], compared["known"], compared["paths"]) == ("madeup", "3.1", 2)
    assert atlas["verification"]["disagreements"] == []


def test_a_framework_is_recognised_before_the_one_that_calls_it() -> None:
    """Liger's loss runs inside TRL's trainer: the run is Liger's."""
    trl, liger = "/x/trl/trainer/grpo_trainer.py", "/x/liger_kernel/chunked_loss/grpo_loss.py"
    assert [getattr(recognise(files), "name", None) for files in ([trl, liger], [liger, trl], [trl], ["/x/mine.py"])] == [
        "Liger-Kernel", "Liger-Kernel", "TRL", None,
    ]  # fmt: skip
    assert {framework.host for framework in FRAMEWORKS} - {None} <= {framework.name for framework in FRAMEWORKS}
