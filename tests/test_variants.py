"""The list of variants says of every loss and edit what it is, where it stands, what it can be given, and what is wrong with it."""

from __future__ import annotations

import json

import pytest

from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES, framework_settings
from nanscope.replay.edits import CONTROLS, EDITS, parse_edit
from nanscope.replay.variants import variants


def test_everything_that_is_known_is_listed() -> None:
    """Every key and every edit, once, in the order of the tables."""
    found = variants()
    assert [loss.key for loss in found.losses] == list(LOSSES)
    assert [edit.id for edit in found.edits] == [*EDITS, *CONTROLS]
    assert [edit.control for edit in found.edits] == [False] * len(EDITS) + [True] * len(CONTROLS)
    for edit in found.edits:
        assert edit.what and parse_edit(edit.id) is parse_edit(edit.short or edit.id)


@pytest.mark.parametrize("key", [key for key in LOSSES if not LOSSES[key].needs])
def test_the_settings_listed_are_those_that_give_the_default_loss(key: str) -> None:
    """Handing every listed default to the loss changes nothing: neither names nor values are made up."""
    (loss,) = (loss for loss in variants(key).losses if loss.key == key)
    given = {knob.name: knob.default for knob in loss.settings if not knob.by_key}
    assert framework_settings(key, **given) == framework_settings(key)
    assert {knob.name: knob.default for knob in loss.settings if knob.by_key} == dict(LOSSES[key].fixed)
    assert (loss.version, loss.site, loss.flaws) == (LOSSES[key].version, LOSSES[key].site, LOSSES[key].flaws)
    for clamp in loss.clamps:
        framework_settings(key, **{clamp.name: True if clamp.name == "clamp_after_exp" else 20.0})


OWN = {
    ("verl.vanilla", "log_ratio_clamp_value"): "±20",
    ("verl.gspo", "log_ratio_clamp_value"): "at most 10",
    ("trl.grpo", "log_ratio_clamp_value"): "none",
}


@pytest.mark.parametrize(("key", "name"), OWN, ids=str)
def test_a_clamp_is_shown_with_what_the_framework_has(key: str, name: str) -> None:
    """In words that a reader can check against the source."""
    (loss,) = (loss for loss in variants(key).losses if loss.key == key)
    assert {clamp.name: clamp.own for clamp in loss.clamps}[name] == OWN[key, name]


def test_known_flaws_are_told() -> None:
    """Liger's luspo does not apply the mask, verl forms an entropy term with coefficient 0."""
    flaws = {loss.key: " ".join(loss.flaws) for loss in variants().losses}
    assert "mask is not applied" in flaws["liger.luspo"] and "0 · NaN" in flaws["verl.ppo_loss"]


def test_a_prefix_selects_and_a_wrong_one_is_an_error() -> None:
    """With a prefix the edits are left out; a wrong one names the frameworks."""
    assert [loss.key for loss in variants("trl.gr").losses] == ["trl.grpo"]
    assert variants("trl.gr").edits == ()
    with pytest.raises(NanscopeError, match="verl") as caught:
        variants("vrl")
    assert caught.value.slug == "unknown-loss"


def test_it_is_json() -> None:
    """Lossless for what JSON has."""
    data = json.loads(json.dumps(variants("verl.vanilla").to_json()))
    assert data["losses"][0]["key"] == "verl.vanilla"
    assert {"name": "clip_ratio", "default": 0.2, "by_key": False} in data["losses"][0]["settings"]
