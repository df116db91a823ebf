"""The loss paths: all that were ever recorded from a framework, each once, each of them one that the framework has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanscope.atlas.batch import healthy
from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES, framework_loss, framework_settings
from nanscope.frameworks.paths import PATHS, LossPath, paths

RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "parity" / "paths.json").read_text(encoding="utf-8"))
# One factor on the loss, or on a term of it that is there.
ONLY_SCALE = {"max_completion_length", "max_seq_len", "kl_loss_coef", "reference_policy_kl_penalty"}


def meaning(key: str, settings: dict[str, Any]) -> object:
    return key, framework_settings(key, **{name: value for name, value in settings.items() if name not in ONLY_SCALE or not value})


@pytest.mark.parametrize("title", RECORDED)
def test_every_recorded_path_is_among_them(title: str) -> None:
    """What the parity figures know is in the atlas: the same key, and settings that mean the same."""
    recorded = RECORDED[title]
    known = [meaning(path.key, dict(path.settings)) for path in PATHS if path.key == recorded["loss"]]
    assert meaning(recorded["loss"], recorded["settings"]) in known


def test_every_loss_is_there_and_no_path_twice() -> None:
    """Each key with its defaults comes first, and two paths never mean the same."""
    assert [path.key for path in PATHS if path.settings == LOSSES[path.key].needs] == list(LOSSES)
    assert len({path.name for path in PATHS}) == len(PATHS) >= 125
    seen: list[object] = []
    for path in PATHS:
        same = meaning(path.key, dict(path.settings))
        assert same not in seen, path.name
        seen.append(same)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_every_path_is_finite_on_the_healthy_batch(path: LossPath) -> None:
    """Nothing is wrong with a path before a fault is put in."""
    inputs = healthy()
    loss = framework_loss(path.key, inputs, **dict(path.settings)).loss
    loss.backward()
    assert loss.isfinite() and inputs.log_probs.grad is not None and inputs.log_probs.grad.isfinite().all()
    assert inputs.log_probs.grad.any()


def test_prefixes_choose() -> None:
    """A framework, a loss with its variants, or one path; in the order of the table, and none twice."""
    assert paths() == paths([]) == PATHS
    assert {path.framework for path in paths(["verl"])} == {"verl"}
    assert {path.key for path in paths(["trl.grpo"])} == {"trl.grpo"} and len(paths(["trl.grpo"])) > 5
    assert [path.name for path in paths(["trl.grpo · beta=0.04 · use"])] == ["trl.grpo · beta=0.04 · use_bias_correction_kl=False"]
    assert paths(["verl", "trl", "verl.gspo"]) == tuple(path for path in PATHS if path.framework in ("trl", "verl"))


def test_a_prefix_that_nothing_has_is_one_clear_error() -> None:
    """It says what there is, also when another prefix is right."""
    with pytest.raises(NanscopeError, match="'verl.vanila'.*trl, liger") as caught:
        paths(["trl", "verl.vanila"])
    assert caught.value.slug == "unknown-loss"


def test_a_clamp_that_the_framework_lacks_is_told_from_its_own() -> None:
    """NeMo-RL has the clamps of the KL and none of the ratio."""
    supposed = {path.name for path in PATHS if path.supposed}
    assert "trl.grpo · log_ratio_clamp_value=20.0" in supposed and "nemo_rl.clipped_pg · log_ratio_clamp_value=20.0" in supposed
    assert "nemo_rl.clipped_pg · kl_input_clamp_value=None" not in supposed
    assert all("clamp" in name for name in supposed)
