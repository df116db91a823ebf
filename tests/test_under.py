"""A recorded batch under the losses of frameworks and one's own: which of them would have survived it, and at which token not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recorded import record

from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES, framework_loss
from nanscope.objective.settings import on_leaf
from nanscope.replay.batch import loss_inputs
from nanscope.replay.own_loss import Objective, own_objective
from nanscope.replay.under import Outcome, distortion, own_gradient, parse_objective, replay_under
from nanscope.snapshot.step import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore")

LP = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.5]])
OLD = LP - torch.tensor([[0.1, -0.2, 0.0], [0.3, 0.2, 200.0]])  # the last token of row 1 is stale, and masked
REF = LP + 0.25
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
ADV = torch.tensor([0.5, 1.5])


def trap(logps, old_logps, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    per_token_loss = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return (per_token_loss * mask).sum() / mask.sum()


def trap_with_reference(logps, old_logps, ref_logps, advantages, mask):
    d = ref_logps - logps
    ratio = torch.exp(logps - old_logps)
    return ((-ratio * advantages[:, None] + 0.1 * (torch.exp(d) - d - 1)) * mask).sum() / mask.sum()


@pytest.fixture
def snapshot() -> Snapshot:
    return record(trap, LP.clone().requires_grad_(), OLD, ADV, MASK).snapshot()


@pytest.fixture
def with_reference() -> Snapshot:
    return record(trap_with_reference, LP.clone().requires_grad_(), OLD, REF, ADV, MASK).snapshot()


# By their own code: who bounds Δ before exp, who masks before exp, who keeps the ratio out of the graph.
SURVIVES = {
    "verl.vanilla": True, "verl.clip_cov": False, "trl.dapo": False, "trl.cispo": True, "nemo_rl.clipped_pg": False,
    "openrlhf.ppo": True, "skyrl.regular": True, "torchtitan.dapo": True, "areal.ppo_actor": False, "slime.policy": False,
    "unsloth.grpo": True, "liger.grpo": False,
}  # fmt: skip


@pytest.mark.parametrize("key", SURVIVES)
def test_who_would_have_survived(key: str, snapshot: Snapshot) -> None:
    """One stale masked token: those that guard exp answer with finite numbers, the others with a NaN gradient there."""
    (outcome,) = replay_under(snapshot, [key]).outcomes
    assert outcome.works is SURVIVES[key]
    assert (outcome.counted, outcome.masked) == (4, 2)
    assert (outcome.bad_counted, outcome.bad_masked) == (0, 0 if SURVIVES[key] else 1)
    assert ("would have survived" in outcome.sentence) is SURVIVES[key]
    assert ("1 masked token" in outcome.sentence) is not SURVIVES[key]


@pytest.mark.parametrize("key", [key for key in LOSSES if key not in ("verl.dro", "tinker.dro")])
def test_an_outcome_is_what_the_loss_gives_on_the_batch(key: str, with_reference: Snapshot) -> None:
    """Loss and bad gradients are those of `framework_loss` on `loss_inputs`, counted by the mask."""
    torch.manual_seed(0)
    (outcome,) = replay_under(with_reference, [key]).outcomes
    torch.manual_seed(0)
    batch = on_leaf(loss_inputs(with_reference))
    try:
        loss = framework_loss(key, batch).loss
    except NanscopeError as error:
        assert outcome.loss is None and str(error).startswith(outcome.note)
        return
    grad = torch.autograd.grad(loss, batch.log_probs)[0]
    assert outcome.loss is not None
    assert torch.equal(torch.tensor(outcome.loss), loss.detach()) or (math.isnan(outcome.loss) and bool(loss.isnan()))
    bad = ~grad.isfinite()
    assert (outcome.bad_counted, outcome.bad_masked) == (int(bad[MASK > 0].sum()), int(bad[MASK == 0].sum()))


def test_settings_are_those_of_the_framework(snapshot: Snapshot) -> None:
    """name=value pairs reach the loss, numbers, words and None alike."""
    text = "verl.vanilla:loss_agg_mode=seq-mean-token-mean,clip_ratio=0.05,clip_ratio_high=none"
    (outcome,) = replay_under(snapshot, [text]).outcomes
    wanted = framework_loss(
        "verl.vanilla", loss_inputs(snapshot), loss_agg_mode="seq-mean-token-mean", clip_ratio=0.05, clip_ratio_high=None
    ).loss
    assert outcome.loss == wanted.item()
    assert outcome.row.id == "verl.vanilla" and "clip_ratio=0.05" in outcome.row.label


def test_a_framework_alone_is_all_its_losses(snapshot: Snapshot) -> None:
    """And one of them that cannot be run says why, without losing the others."""
    found = replay_under(snapshot, "tinker").outcomes
    assert [outcome.id for outcome in replay_under(snapshot, ["tinker"]).outcomes] == [outcome.id for outcome in found]
    assert [outcome.id for outcome in found] == [key for key in LOSSES if key.startswith("tinker.")]
    lost = next(outcome for outcome in found if outcome.id == "tinker.dro")
    assert lost.loss is None and "needs beta" in lost.sentence and not lost.works


def test_a_batch_without_reference_is_run_without_the_kl(snapshot: Snapshot, with_reference: Snapshot) -> None:
    """And that is said; a loss that is nothing but the KL is not run at all."""
    left_out, alone = replay_under(snapshot, ["trl.grpo:beta=0.04,log_ratio_clamp_value=20", "verl.kl_loss"]).outcomes
    assert left_out.works and "without its KL" in left_out.sentence
    assert alone.loss is None and "ref_log_probs" in alone.sentence
    (whole,) = replay_under(with_reference, ["trl.grpo:beta=0.04,log_ratio_clamp_value=20"]).outcomes
    assert whole.works and "without" not in whole.sentence and whole.loss != left_out.loss


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("verl.vanila", "unknown-loss"),
        ("grpo", "unknown-loss"),
        ("verl.vanilla:epsilon=0.2", "unknown-setting"),
        ("verl.vanilla:clip_ratio", "bad-setting"),
        ("verl.vanilla:clip_ratio=", "bad-setting"),
        ("verl.vanilla:loss_agg_mode=mean", "unknown-setting-value"),
    ],
)
def test_what_is_not_known_is_one_clear_error(text: str, slug: str) -> None:
    """Before anything is run."""
    with pytest.raises(NanscopeError) as caught:
        parse_objective(text)
    assert caught.value.slug == slug


# -- one's own function --------------------------------------------------------------------------------------------------------


MINE = """
import torch

def guarded(log_probs, old_log_probs, advantages, mask, entropy=None):
    delta = torch.where(mask > 0, log_probs - old_log_probs, 0.0)
    return -(delta.exp() * advantages * mask).sum() / mask.sum()

def whole(inputs):
    return -((inputs.log_probs - inputs.old_log_probs).exp() * inputs.advantages * inputs.mask).sum() / inputs.mask.sum()

def needs_reference(log_probs, ref_log_probs): return (log_probs - ref_log_probs).sum()
def asks_for_more(log_probs, temperature): return log_probs.sum()
def asks_for_nothing(): return torch.zeros(())
def per_token(log_probs): return log_probs
def a_number(log_probs): return 1.0
def detached(log_probs): return log_probs.detach().sum()
def raises(log_probs): return log_probs @ log_probs
def leaves(log_probs): raise SystemExit(0)
def spoils(log_probs, mask): return log_probs.sum() + mask.zero_().sum()
nothing = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory, of a name of its own: modules stay loaded."""
    name = f"losses_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MINE)
    (tmp_path / f"{name}_broken.py").write_text("import torch\nraise RuntimeError('half written')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return name


def test_a_function_of_ones_own_runs_beside_the_others(mine: str, snapshot: Snapshot) -> None:
    """By the names of its parameters, or with the whole batch; the gradient is counted like any other."""
    framework, guarded, whole = replay_under(snapshot, ["verl.vanilla"], [f"{mine}:guarded", f"{mine}:whole"]).outcomes
    assert framework.id == "verl.vanilla"
    batch = loss_inputs(snapshot)
    wanted = -((batch.log_probs - OLD).exp() * batch.advantages)[MASK > 0].sum() / MASK.sum()
    assert guarded.works and guarded.loss == pytest.approx(wanted.item(), rel=1e-6)
    assert guarded.distortion == 0 and guarded.row.kind == "objective"
    assert not whole.works and (whole.bad_counted, whole.bad_masked) == (0, 1) and math.isnan(whole.loss)


def test_a_function_that_writes_to_its_batch_spoils_it_for_nobody(mine: str, snapshot: Snapshot) -> None:
    """Each function has a copy."""
    alone = replay_under(snapshot, [], [f"{mine}:guarded"]).outcomes[0]
    _, after = replay_under(snapshot, [], [f"{mine}:spoils", f"{mine}:guarded"]).outcomes
    assert after == alone


def test_a_reference_that_is_not_there_is_an_outcome(mine: str, snapshot: Snapshot) -> None:
    """The function is sound, the batch lacks what it reads."""
    (outcome,) = replay_under(snapshot, [], [f"{mine}:needs_reference"]).outcomes
    assert outcome.loss is None and "no ref_log_probs" in outcome.note


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("asks_for_more", "'temperature'"), ("asks_for_nothing", "takes none"), ("per_token", "shape [2, 3]"), ("a_number", "float"),
        ("detached", "does not depend"), ("raises", "RuntimeError"), ("leaves", "SystemExit"), ("absent", "no function"), ("nothing", "no function"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_ones_own_function_is_one_clear_error(name: str, word: str, mine: str, snapshot: Snapshot) -> None:
    """It names the function, what it did, and for an exception the line."""
    with pytest.raises(NanscopeError) as caught:
        replay_under(snapshot, [], [f"{mine}:{name}"])
    assert caught.value.slug == "bad-loss" and word in str(caught.value) and mine in str(caught.value)
    if name == "raises":
        assert f"{mine}.py:" in str(caught.value)


@pytest.mark.parametrize("spec", ["my_loss", "", "mod:", "a b:c", "../x:f"])
def test_a_function_is_written_as_module_and_name(spec: str) -> None:
    """Anything else is told how."""
    with pytest.raises(NanscopeError, match="module:function"):
        own_objective(spec)


def test_a_module_that_cannot_be_imported_says_why(mine: str) -> None:
    """Absent, or raising on import."""
    with pytest.raises(NanscopeError, match="ModuleNotFoundError"):
        own_objective("no_such_module_of_mine:f")
    with pytest.raises(NanscopeError, match=r"half written \(.*_broken.py:2\)"):
        own_objective(f"{mine}_broken:f")


# -- words ---------------------------------------------------------------------------------------------------------------------

SAID = Outcome("x.y", "label", 0.5, 0, 4, 0, 2, 0.0)
SENTENCES = [
    ({}, True, "x.y would have survived this batch: loss 0.5, and a finite gradient at every token."),
    ({"loss": -0.25}, True, "loss −0.25"),
    ({"bad_masked": 1}, False, "the loss looks fine (0.5), the gradient is non-finite at 1 masked token."),
    ({"bad_counted": 2, "bad_masked": 1}, False, "at 2 counted tokens and 1 masked token."),
    ({"loss": math.nan, "bad_counted": 4}, False, "loss NaN, and a non-finite gradient at 4 counted tokens."),
    ({"loss": math.inf}, False, "loss inf, though every gradient is finite."),
    ({"loss": None, "note": "it reads ref_log_probs"}, False, "x.y was not run: it reads ref_log_probs."),
]


@pytest.mark.parametrize(("change", "works", "words"), SENTENCES, ids=range(len(SENTENCES)))
def test_the_sentence_says_what_the_numbers_say(change: dict[str, object], works: bool, words: str) -> None:
    """A finite loss with a bad gradient is never called survival."""
    outcome = replace(SAID, **change)  # type: ignore[arg-type]
    assert outcome.works is works and outcome.row.works is works and words in outcome.sentence
    assert outcome.to_json()["works"] is works


def test_distortion_sees_what_a_tight_clamp_does(snapshot: Snapshot) -> None:
    """A clamp below a counted token's exponent takes its whole gradient; one above all of them takes none."""
    batch = loss_inputs(snapshot)
    free, cut = (
        Objective("", "", lambda inputs, v=value: framework_loss("trl.dapo", inputs, epsilon=10.0, log_ratio_clamp_value=v).loss)
        for value in (20.0, 0.15)
    )
    assert distortion(own_gradient(free, batch), free, batch) == 0
    change = distortion(own_gradient(cut, batch), free, batch)
    assert change is not None and change == pytest.approx(1.0)
