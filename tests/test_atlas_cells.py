"""The cells of the atlas are what the frameworks' own functions were seen to do, whatever else is computed."""

from __future__ import annotations

import json
from functools import reduce
from itertools import combinations
from operator import or_

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanscope.atlas import atlas, cells
from nanscope.atlas.cells import Atlas
from nanscope.atlas.faults import FAULTS, Where
from nanscope.atlas.harm import LETTERS, Harm
from nanscope.errors import NanscopeError
from nanscope.frameworks.paths import PATHS


@pytest.fixture(scope="module")
def whole() -> Atlas:
    return atlas()


# What was seen in the frameworks themselves, and what a clamp does that they do not have: path, fault, code.
SEEN = (
    # the same finite loss, and NaN in the gradient only where the ratio is not clamped before exp
    ("trl.grpo", "old +200 masked A>0", "M"),
    ("trl.grpo", "old +200 masked A<0", "LM"),
    ("trl.dapo", "old +200 valid A>0", "V"),
    ("trl.dapo", "old +200 valid A<0", "LV"),
    ("liger.dapo · beta=0.0", "old +200 masked A>0", "M"),
    ("nemo_rl.clipped_pg · reference_policy_kl_penalty=0.0", "old +200 masked A>0", "M"),
    ("nemo_rl.clipped_pg · reference_policy_kl_penalty=0.0", "old +200 masked A<0", "LM"),
    ("areal.ppo_actor", "old +200 masked A<0", "M"),
    ("slime.policy", "old +200 masked A>0", "M"),
    ("prime_rl.default", "old +200 masked A>0", "LM"),
    ("verl.vanilla", "old +200 masked A>0", "·"),
    ("skyrl.regular", "old +200 masked A<0", "·"),
    ("openrlhf.ppo", "old +200 masked A<0", "·"),
    ("torchtitan.dapo", "old +200 masked A<0", "·"),
    ("unsloth.grpo", "old +200 masked A<0", "·"),
    # an advantage of exactly 0 does not protect: inf · 0
    ("trl.dapo", "old +200 valid A=0", "LV"),
    ("trl.grpo", "old +200 masked A=0", "LM"),
    ("trl.sapo", "old +200 valid A=0", "V"),
    ("trl.cispo", "old +200 valid A=0", "·"),
    # a clamp has no gradient at NaN
    ("verl.vanilla", "old NaN valid A>0", "L"),
    ("verl.vanilla", "old NaN masked A>0", "·"),
    ("verl.vanilla · loss_agg_mode=seq-mean-token-mean", "old NaN masked A>0", "L"),
    ("skyrl.regular", "old NaN masked A>0", "L"),
    ("openrlhf.ppo", "old NaN masked A>0", "L"),
    ("verl.cispo", "old NaN masked A>0", "M"),
    ("verl.dppo_tv", "old NaN masked A>0", "M"),
    ("verl.dro · dro_beta=0.1", "old NaN masked A>0", "M"),
    ("verl.kl_loss · kl_loss_type=k2+", "ref NaN masked A>0", "M"),
    # −inf in ℓ at a masked token
    ("trl.grpo", "policy −inf masked A>0", "·"),
    ("trl.grpo · beta=0.04", "policy −inf masked A>0", "LM"),
    ("liger.dapo", "policy −inf masked A>0", "LM"),
    ("nemo_rl.clipped_pg", "policy −inf masked A>0", "M"),
    ("openrlhf.ppo · through_actor=True", "policy −inf masked A>0", "L"),
    # one bad masked token takes the row with it where the ratio is the row's
    ("trl.grpo · importance_sampling_level=sequence", "old NaN masked A>0", "LVM"),
    ("openrlhf.gspo", "old −inf masked A>0", "LVM"),
    ("verl.gspo · loss_agg_mode=seq-mean-token-mean", "old NaN masked A>0", "L"),
    ("areal.ppo_actor · importance_sampling_level=sequence", "old NaN masked A>0", "·"),
    ("unsloth.grpo · importance_sampling_level=sequence", "old NaN masked A>0", "·"),
    # the KL
    ("slime.kl_loss · kl_loss_type=low_var_kl", "ref +200 valid A>0", "V"),
    ("slime.kl_loss · kl_loss_type=k3", "ref +200 valid A>0", "LV"),
    ("openrlhf.kl_loss · kl_estimator=k2 · unbiased_gradient=False", "policy −inf valid A>0", "V"),
    ("verl.kl_loss", "ref +200 valid A>0", "·"),
    # what is swallowed
    ("trl.vespo", "old NaN valid A>0", "≠"),
    ("torchtitan.dapo", "old NaN valid A>0", "≠"),
    ("torchtitan.dapo", "old −inf valid A>0", "≠"),
    ("nemo_rl.clipped_pg · use_importance_sampling_correction=True · reference_policy_kl_penalty=0.0", "rollout NaN valid A>0", "≠"),
    ("trl.grpo · use_vllm=True · vllm_importance_sampling_mode=token_truncate", "rollout NaN valid A>0", "≠"),
    # padding counts
    ("liger.luspo · beta=0.0", "old −200 masked A>0", "≠"),
    ("trl.luspo", "old −200 masked A>0", "·"),
    # what a clamp would do, before exp and after it
    ("trl.grpo · log_ratio_clamp_value=20.0", "old +200 masked A<0", "·"),
    ("trl.grpo · log_ratio_clamp_value=20.0", "old NaN masked A<0", "L"),
    ("trl.grpo · log_ratio_clamp_value=20.0 · clamp_after_exp=True", "old +200 masked A<0", "M"),
    ("trl.grpo · log_ratio_clamp_value=20.0 · clamp_after_exp=True", "old +200 valid A<0", "V"),
    # no valid token
    ("verl.vanilla", "empty batch", "L"),
    ("verl.vanilla · loss_agg_mode=token-sum", "empty batch", "·"),
    ("openrlhf.ppo", "empty batch", "LM"),
    ("trl.grpo", "empty batch", "·"),
    ("skyrl.regular", "empty batch", "·"),
    ("torchtitan.dapo", "empty batch", "·"),
    ("trl.rloo", "empty batch", "≠"),
    ("trl.grpo", "empty row", "≠"),
    ("trl.dapo", "empty row", "·"),
    ("verl.vanilla · loss_agg_mode=seq-mean-token-mean", "empty row", "·"),
    ("openrlhf.ppo · token_level_loss=False", "empty row", "·"),
    ("unsloth.grpo", "empty row", "≠"),
    # 0 · NaN from an entropy whose coefficient is 0
    ("verl.ppo_loss", "entropy NaN valid A>0", "L"),
    ("verl.ppo_loss", "entropy NaN masked A>0", "·"),
    ("verl.ppo_loss · use_kl_loss=True · loss_agg_mode=seq-mean-token-mean", "entropy NaN masked A>0", "L"),
    ("slime.policy", "entropy NaN valid A>0", "L"),
    ("trl.grpo", "entropy NaN valid A>0", "·"),
)


@pytest.mark.parametrize(("path", "fault", "code"), SEEN)
def test_a_cell_is_what_was_seen_in_the_framework(whole: Atlas, path: str, fault: str, code: str) -> None:
    """The contrasts between frameworks that matter, one by one."""
    assert whole.cell(path, fault).code == code


def test_every_cell_is_there(whole: Atlas) -> None:
    """A row for each path, an entry for each fault, and names that tell them apart."""
    assert whole.paths == PATHS and whole.faults == FAULTS
    assert len(whole.cells) == len(PATHS) and {len(row) for row in whole.cells} == {len(FAULTS)}
    assert len({fault.name for fault in FAULTS}) == len({(fault.sets, fault.where, fault.advantage) for fault in FAULTS}) == len(FAULTS)


def test_codes_have_their_letters_in_one_order() -> None:
    """Every combination of harms has a code of its own, and the silent ones are those with a bad gradient and a finite loss."""
    harms = [reduce(or_, some, Harm.CLEAN) for count in range(len(LETTERS) + 1) for some in combinations(LETTERS, count)]
    assert len({harm.code for harm in harms}) == 2 ** len(LETTERS)
    assert Harm.CLEAN.code == "·" and (Harm.MASKED | Harm.LOSS | Harm.VALID).code == "LVM"
    assert {harm.code for harm in harms if harm.silent} == {"V", "M", "VM", "≠V", "≠M", "≠VM"}


def test_no_cell_is_finite_and_not(whole: Atlas) -> None:
    """A loss that is not finite is not also a wrong number, and a fault that a loss does not look at is never found in a counted token alone."""
    for row in whole.cells:
        for fault, harm in zip(whole.faults, row, strict=True):
            assert not (Harm.LOSS in harm and Harm.CHANGED in harm)
            assert not (fault.where is Where.BATCH and Harm.VALID in harm), "no token is counted"


@given(data=st.data())
@settings(max_examples=15)
def test_a_part_of_the_atlas_is_a_part_of_it(whole: Atlas, data: st.DataObject) -> None:
    """A cell depends on its path and its fault, not on what else is computed, in which order, or on random numbers drawn before."""
    chosen = data.draw(st.lists(st.sampled_from(FAULTS), min_size=1, max_size=6, unique=True))
    prefixes = data.draw(
        st.lists(st.sampled_from(["verl.clip_cov", "verl.kl_cov", "skyrl.clip", "trl.rloo", "areal", "openrlhf.kl"]), min_size=1)
    )
    torch.rand(data.draw(st.integers(0, 3)))
    part = atlas(prefixes, chosen)
    for path, row in zip(part.paths, part.cells, strict=True):
        assert row == tuple(whole.cell(path.name, fault.name) for fault in chosen)


def test_what_a_loss_does_not_read_does_nothing(whole: Atlas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults in tensors that a loss does without are not run; running them gives the same."""
    unread = [fault for fault in FAULTS if fault.tensor in ("ref_log_probs", "rollout_log_probs")]
    assert sum(len(cells.unread(path)) for path in PATHS) > len(PATHS), "most losses read neither ref nor rollout"
    monkeypatch.setattr(cells, "unread", lambda path: frozenset())
    everything = atlas(faults=unread)
    for path, row in zip(everything.paths, everything.cells, strict=True):
        assert row == tuple(whole.cell(path.name, fault.name) for fault in unread), path.name


def test_random_numbers_are_left_as_they_were() -> None:
    """clip_cov draws tokens; nobody else's numbers change for it."""
    before = torch.get_rng_state()
    atlas(["verl.clip_cov"])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_prefix_that_nothing_has_is_one_clear_error() -> None:
    """As for `paths`."""
    with pytest.raises(NanscopeError, match="'verl.vanila'") as caught:
        atlas(["verl.vanila"])
    assert caught.value.slug == "unknown-loss"


def test_the_data_are_plain(whole: Atlas) -> None:
    """JSON holds every cell in the order of the faults, what each fault sets, and which codes there are."""
    data = json.loads(json.dumps(whole.to_json(), allow_nan=False))
    names = [fault["name"] for fault in data["faults"]]
    assert [len(path["cells"]) for path in data["paths"]] == [len(names)] * len(PATHS)
    row = next(path for path in data["paths"] if path["name"] == "trl.grpo · beta=0.04")
    assert (row["key"], row["settings"], row["version"]) == ("trl.grpo", {"beta": 0.04}, "1.16.0")
    assert row["cells"][names.index("policy −inf masked A>0")] == "LM"
    assert {code for path in data["paths"] for cell in path["cells"] for code in cell} == set(data["codes"])
    fault = data["faults"][names.index("ref −200 masked A<0")]
    assert fault["sets"] == "ref_log_probs := log_probs − 200, so that ref − policy = −200"


def test_the_atlas_is_a_frame_in_long_form() -> None:
    """One row per path and fault, with the letters of its cell."""
    found = atlas(["torchtitan", "areal.sapo"])
    frame = found.frame()
    assert len(frame) == len(found.paths) * len(FAULTS)
    one = frame[(frame["path"] == "areal.sapo") & (frame["fault"] == "policy NaN valid A>0")]
    assert one["harm"].tolist() == [found.cell("areal.sapo", "policy NaN valid A>0").code]
    assert set(one["framework"]) == {"areal"}
