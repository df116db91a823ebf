"""Every cause, on training scripts that know nothing of nanscope: phase, op, element, mask, role, cause and fix come out right.

Each file of `incidents/` fails in its own way and states, by its mechanism, what must be said about it; each file of `healthy/` looks
frightening and is not, and nothing may be said.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nanscope
from nanscope.causes import Cause
from nanscope.locate.observe import Case, Story
from nanscope.program.program import Program
from nanscope.snapshot.file import load
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.diagnose import examine
from nanscope.verdict.rules import RULES, Rule, cause_of
from nanscope.watching.logbook import arrived

pytestmark = pytest.mark.filterwarnings("ignore")  # the scripts do what torch warns of

FOLDER = Path(__file__).parent
INCIDENTS = sorted((FOLDER / "incidents").glob("*.py"))
HEALTHY = sorted((FOLDER / "healthy").glob("*.py"))
ROLES = {  # other fair names for a role
    "is_weight": "ratio", "attention": "hidden", "router": "hidden", "rewards": "advantages",
}  # fmt: skip


def script(path: Path) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watched(module: ModuleType, folder: Path) -> nanscope.Verdict:
    """What nanscope says of a run of the script."""
    try:
        with nanscope.watch(out=folder) as scope:
            module.run()
    finally:
        torch.use_deterministic_algorithms(False)  # some scripts ask for it, so that fresh memory has a fixed content
    return scope.verdict


def missed(expected: dict[str, Any], verdict: nanscope.Verdict) -> dict[str, Any]:
    """What a verdict got wrong, with what it said."""
    if not verdict.incidents:
        return {"detected": False}
    first = verdict.incidents[0]
    origin = first.origin
    said = {
        "phase": first.phase,
        "cause": str(first.cause),
        "op": origin.op,
        "index": origin.index,
        "masked": origin.masked,
        "role": origin.role,
        "fix": first.fixes[0].id if first.fixes else None,
        "variable": origin.variable,
    }
    right = {
        "phase": said["phase"] in expected["phase"],
        "cause": said["cause"] in expected["cause"],
        "op": first.phase in ("input", "weights") or origin.op.strip("_") in [name.strip("_") for name in expected["op"]],
        "index": expected["index"] is None or first.phase == "weights" or origin.index == tuple(expected["index"]),
        "masked": expected["masked"] is None or origin.masked == expected["masked"],
        "role": any(ROLES.get(role, role) == ROLES.get(origin.role or "", origin.role) for role in expected["role"]),
        "fix": said["fix"] in expected["fix"],
    }
    return {name: said[name] for name, ok in right.items() if not ok}


@pytest.mark.parametrize("path", INCIDENTS, ids=lambda path: path.stem)
def test_an_incident_is_explained(path: Path, tmp_path: Path) -> None:
    """What the script states is what the verdict says, and its best fix was executed or cannot be."""
    module = script(path)
    verdict = watched(module, tmp_path)
    assert missed(module.EXPECTED, verdict) == {}, verdict.sentence


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_run_has_no_incident(path: Path, tmp_path: Path) -> None:
    """Nothing is said that would wake anybody."""
    verdict = watched(script(path), tmp_path)
    assert verdict.healthy, verdict.sentence
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], Case]]:
    """The incidents of every script, as the rules see them."""
    found = []
    for path in INCIDENTS:
        module, folder = script(path), tmp_path_factory.mktemp(path.stem)
        watched(module, folder)
        first, *later = [load(file) for file in sorted(folder.glob("*.safetensors"))]
        found.append((module.EXPECTED, examine(first)[0]))
        if later and "after" in path.stem:  # a step that poisoned the weights, and what the next one looks like
            found.append(({"cause": ("poisoned_weights",)}, examine(later[0], story=Story(first.step))[0]))
    came = Snapshot(1, 0, Program((), (), -1), {}, None, {}, Reached(0.5, 1, 1), observed=arrived("w", torch.tensor([math.nan])))
    found.append(({"cause": ("allreduce_nan",)}, examine(came)[0]))  # what real ranks say is shown in test_ranks.py
    return found


def named(cases: list[tuple[dict[str, Any], Case]], rules: tuple[Rule, ...]) -> set[int]:
    """Which incidents get the cause that describes them best."""
    return {number for number, (expected, case) in enumerate(cases) if str(cause_of(case, rules)) == expected["cause"][0]}


def test_no_rule_is_idle(cases: list[tuple[dict[str, Any], Case]]) -> None:
    """Without any one of the rules some incident is no longer explained in the best way."""
    best = named(cases, RULES)
    assert len(best) > 0.8 * len(cases)
    idle = [(index, RULES[index].cause) for index in range(len(RULES)) if named(cases, RULES[:index] + RULES[index + 1 :]) >= best]
    assert idle == []


def test_every_cause_has_two_incidents_and_health_thirty_settings() -> None:
    """No cause is known from one example only."""
    found = [script(path).EXPECTED["cause"][0] for path in INCIDENTS]
    short = {str(cause): found.count(str(cause)) for cause in Cause if cause is not Cause.UNKNOWN and found.count(str(cause)) < 2}
    assert short == {}
    assert len(HEALTHY) >= 30


def test_the_scripts_know_nothing_of_the_watcher() -> None:
    """They would fail in the same way without it."""
    assert [path.name for path in (*INCIDENTS, *HEALTHY) if "nanscope" in path.read_text(encoding="utf-8")] == []
    assert "NANSCOPE" not in os.environ
