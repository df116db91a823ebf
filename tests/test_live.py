"""What is read of a running loss function: paths into its variables, the options that its config holds, and never a tensor."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import nanscope
from nanscope.frameworks.live import Glimpse, follow, glimpse, objective_of, objective_words
from nanscope.frameworks.rows import roles
from nanscope.frameworks.table import FRAMEWORKS, site_in
from nanscope.snapshot.header import SCHEMA_VERSION, read_header

VARIABLES: dict[str, object] = {
    "self": SimpleNamespace(args=SimpleNamespace(beta=0.1), kind=SimpleNamespace(value="token_level")),
    "inputs": {"count": torch.tensor(12), "weights": torch.ones(3)},
    "weights": None,
    "given": torch.ones(2),
}
NOWHERE = follow("nothing", VARIABLES)
PATHS: list[tuple[str, object]] = [
    ("self.args.beta", 0.1),
    ("self.args.gamma", NOWHERE),
    ("nobody.args", NOWHERE),
    ("inputs.missing", NOWHERE),
    ("self.kind.value==token_level", True),
    ("self.kind.value==sequence_level", False),
    ("nobody.kind==token_level", NOWHERE),
    ("weights?self.args.beta", None),
    ("nobody.weights?self.args.beta", None),
    ("given?self.args.beta", 0.1),
]


@pytest.mark.parametrize(("path", "found"), PATHS, ids=[path for path, _ in PATHS])
def test_a_path_leads_into_attributes_and_mappings(path: str, found: object) -> None:
    """A path steps through attributes and keys; `==` asks, `?` depends on something else being there."""
    assert follow(path, VARIABLES) is found or follow(path, VARIABLES) == found


def test_numbers_are_held_and_tensors_are_not() -> None:
    """A count may be a tensor of one element; anything larger is not held."""
    trl = next(site for framework in FRAMEWORKS for site in framework.sites if site.function == "GRPOTrainer._compute_loss")
    args = SimpleNamespace(loss_type="dapo", beta=torch.ones(5), epsilon=0.3)
    inputs = {"num_items_in_batch": torch.tensor(31)}
    seen = glimpse(trl, {"self": SimpleNamespace(args=args), "inputs": inputs})
    assert objective_of([seen])["settings"]["num_items_in_batch"] == 31
    assert "inputs.num_items_in_batch" in seen.held
    seen = glimpse(trl, {"self": SimpleNamespace(args=args), "inputs": {"num_items_in_batch": torch.ones(7)}})
    assert "inputs.num_items_in_batch" not in seen.held


def test_the_outermost_function_decides_and_helpers_say_nothing() -> None:
    """Where a worker calls a registered loss, the objective is the worker's, KL and all; a function without a key has none."""
    inner = site_in("/x/verl/trainer/ppo/core_algos.py", "compute_policy_loss_vanilla")
    outer = site_in("/x/verl/workers/utils/losses.py", "ppo_loss")
    helper = site_in("/x/verl/trainer/ppo/core_algos.py", "agg_loss")
    assert inner is not None and outer is not None and helper is not None
    config = {"config": {"clip_ratio": 0.4, "use_kl_loss": True}}
    seen = [Glimpse(inner, config), Glimpse(outer, config), Glimpse(helper, {})]
    assert objective_of(seen)["key"] == "verl.ppo_loss" and objective_of(seen)["settings"] == {"clip_ratio": 0.4, "use_kl_loss": True}
    assert objective_of(seen[::2])["key"] == "verl.vanilla"
    assert objective_of([seen[2]]) == {} and objective_of([]) == {}


def test_a_loss_that_is_not_in_the_tables_keeps_its_name() -> None:
    """A user's own loss_type is told as it is, without settings that nobody can check."""
    trl = site_in("/x/trl/trainer/grpo_trainer.py", "GRPOTrainer._compute_loss")
    assert trl is not None
    seen = Glimpse(trl, {"self.args": SimpleNamespace(loss_type="mine", beta=0.2)})
    assert objective_of([seen]) == {
        "key": "trl.mine", "site": "trl/trainer/grpo_trainer.py: GRPOTrainer._compute_loss", "settings": {},
    }  # fmt: skip
    assert objective_words(objective_of([seen])) == "trl.mine, its settings at their defaults"


WORDS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"key": "trl.dapo", "settings": {"beta": 0.0, "epsilon": 0.2}}, "trl.dapo, its settings at their defaults"),
    ({"key": "trl.dapo", "settings": {"beta": 0.04, "epsilon": 0.2}}, "trl.dapo, beta 0.04"),
    ({"key": "openrlhf.ppo", "settings": {"is_correction_threshold": [0.5, 5.0]}}, "openrlhf.ppo, its settings at their defaults"),
    (
        {"key": "verl.vanilla", "settings": {str(n): n for n in range(10)}},
        "verl.vanilla, " + ", ".join(f"{n} {n}" for n in range(8)) + ", … 2 more",
    ),
    ({"key": "trl.dapo", "settings": "all"}, "trl.dapo"),
    ({"key": "x" * 100, "settings": {"y" * 100: "z" * 100}}, f"{'x' * 60}, {'y' * 60} {'z' * 60}"),
]


@pytest.mark.parametrize(("objective", "words"), WORDS, ids=[words[:30] for _, words in WORDS])
def test_an_objective_is_one_line(objective: dict[str, Any], words: str) -> None:
    """Only what is not the framework's default is said, at most eight settings, and nothing at length that a file claims."""
    assert objective_words(objective) == words


# -- in a run: a trainer whose file and function have the names of a known one ------------------------------------------------------

TRAINER = """
import torch

class GRPOTrainer:
    def __init__(self, args):
        self.args = args

    def _compute_loss(self, model, inputs):
        big = inputs.pop("big", None)
        start = inputs["advantages"] * 1.0
        gone = None if big is None else self.watch(big)
        big = None
        alive = gone() is not None if gone is not None else None
        per_token_logps = model(inputs["ids"])[..., 0]
        coef_1 = torch.exp(per_token_logps - inputs["old_per_token_logps"])
        self.alive = alive
        return -(coef_1 * start * inputs["mask"]).sum()
"""


@dataclass
class Args:
    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon: float = 0.25
    asked: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:  # only for what is not there
        raise AttributeError(name)


def compiled(source: str, folder: Path) -> Any:
    path = folder / "site-packages" / "trl" / "trainer" / "grpo_trainer.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    space: dict[str, Any] = {"__name__": "grpo_trainer"}
    exec(compile(source, str(path), "exec"), space)
    return space["GRPOTrainer"]


@pytest.fixture
def trainer_class(tmp_path: Path) -> Any:
    return compiled(TRAINER, tmp_path)


def batch(bad: bool = False) -> dict[str, Any]:
    old = torch.zeros(2, 3)
    old[1, 2] = -200.0 if bad else 0.0
    return {"ids": torch.ones(2, 3, 4), "old_per_token_logps": old, "advantages": torch.ones(2, 1), "mask": torch.ones(2, 3)}


def test_the_settings_of_a_step_are_in_its_file(tmp_path: Path, trainer_class: Any) -> None:
    """The settings are those of the moment at which the loss ran; `inspect` reads them without torch, an older file has none."""
    model, args = nn.Linear(4, 1), Args()
    trainer = trainer_class(args)
    with nanscope.watch(model, out=tmp_path / "run") as scope:
        for step in range(2):
            args.epsilon = 0.25 + step
            loss = trainer._compute_loss(model, batch(bad=step == 1))
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.0).step()
        args.epsilon = 99.0
    (incident,) = scope.verdict.incidents
    assert incident.objective["key"] == "trl.dapo" and incident.objective["settings"]["epsilon"] == 1.25
    assert incident.loss_words == "trl.dapo, epsilon 1.25" and incident.origin.role == "ratio"
    about = read_header(str(incident.snapshot)).about
    assert about["schema"] == SCHEMA_VERSION and about["objective"] == json.loads(json.dumps(incident.objective))


def test_watching_a_loss_function_keeps_nothing_alive(tmp_path: Path, trainer_class: Any) -> None:
    """What a loss function lets go of is gone, although its variables were looked at, and its config is looked at once a step."""
    model, args = nn.Linear(4, 1), Args()
    trainer = trainer_class(args)
    trainer.watch = weakref.ref
    first = {**batch(), "big": torch.ones(64, 64)}
    with nanscope.watch(model, out=tmp_path / "run") as scope:
        trainer._compute_loss(model, first).backward()
        gc.collect()
        assert trainer.alive is False
        assert not scope._tape.glimpses, "a finished step is forgotten"
        trainer._compute_loss(model, batch())
        trainer._compute_loss(model, batch())
        assert len(scope._tape.glimpses) == 1


def test_a_function_that_reads_its_own_variables_is_left_alone(tmp_path: Path) -> None:
    """`locals()` is one mapping for the function and for whoever looks at its frame: what the trainer took from it stays as it was."""
    source = TRAINER.replace("        start =", "        taken = locals()\n        start =").replace(
        "self.alive = alive", "self.taken = dict(taken)"
    )
    trainers = []
    for watched in (False, True):
        trainer = compiled(source, tmp_path)(Args())
        with nanscope.watch(nn.Linear(4, 1), out=tmp_path / "run") if watched else contextlib.nullcontext():
            trainer._compute_loss(nn.Linear(4, 1), batch()).backward()
        trainers.append(trainer)
    assert set(trainers[0].taken) == set(trainers[1].taken) >= {"self", "model", "inputs"}


def test_a_config_that_fails_costs_a_warning(tmp_path: Path, trainer_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a config object does when it is asked, the step is recorded and the run goes on."""

    class Hostile:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("do not ask")

    model = nn.Linear(4, 1)
    trainer = trainer_class(None)
    type(trainer).args = property(lambda self: Hostile().args)
    with caplog.at_level(logging.WARNING, "nanscope"), nanscope.watch(model, out=tmp_path / "run") as scope:
        trainer._compute_loss(model, batch(bad=True)).backward()
    assert [record.message.split("]")[0] for record in caplog.records] == ["nanscope [settings-unread", "nanscope [bad-step"]
    (incident,) = scope.verdict.incidents
    assert incident.origin.variable == "coef_1" and incident.origin.role == "ratio"


def test_roles_are_pairs_of_words_and_meanings() -> None:
    """The shorthand of the tables: role, then names."""
    assert [(name, str(role)) for name, role in roles(mask="a b", kl="c")] == [("a", "mask"), ("b", "mask"), ("c", "kl")]
