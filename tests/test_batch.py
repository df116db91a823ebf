"""The batch of a recorded step by role: what every loss was given, whatever its code calls it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recorded import leaf, record
from torch import Tensor

import nanscope
from nanscope import demo
from nanscope.errors import NanscopeError
from nanscope.objective.settings import LossInputs, on_leaf
from nanscope.replay.batch import RecordedBatch, loss_inputs, recorded_batch
from nanscope.snapshot.file import load
from nanscope.snapshot.step import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = Path(__file__).parent

LP = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.5]])
OLD = LP - torch.tensor([[0.1, -0.2, 0.0], [0.3, 0.2, 90.0]])
REF = LP + 0.25
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
ADV = torch.tensor([0.5, -1.5])


def wanting() -> Tensor:
    return LP.clone().requires_grad_()


def grpo(logps, old_logps, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    per_token_loss = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return (per_token_loss * mask).sum() / mask.sum()


def grpo_where(logps, old_logps, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    per_token_loss = torch.where(mask > 0, -ratio * advantages[:, None], 0.0)
    return per_token_loss.sum() / mask.sum()


def grpo_filled(logps, old_logps, advantages, mask):
    padding = mask == 0
    per_token_loss = (-torch.exp(logps - old_logps) * advantages[:, None]).masked_fill(padding, 0.0)
    return per_token_loss.sum() / mask.sum()


def cispo(logps, old_logps, advantages, mask):
    log_ratio = torch.clamp(logps - old_logps, min=-20.0, max=20.0)
    clipped_ratio = torch.exp(log_ratio).clamp(0.8, 1.2).detach()
    per_token_loss = -clipped_ratio * advantages[:, None] * logps
    return (torch.where(mask.bool(), per_token_loss, 0.0) * mask).sum() / mask.sum()


def grpo_picked(logps, old_logps, advantages, mask):
    kept = mask.bool()
    ratio = torch.exp(logps[kept] - old_logps[kept])
    return -(ratio * advantages[:, None].expand(2, 3)[kept]).mean()


def grpo_masked_first(logps, old_logps, advantages, mask):
    new, old_logps = logps * mask, old_logps * mask
    ratio = torch.exp(new - old_logps)
    return -(ratio * advantages[:, None] * mask).sum() / mask.sum()


def grpo_clamped_first(logps, old_logps, advantages, mask):
    logps = torch.clamp(logps, min=-1.2)
    ratio = torch.exp(logps - old_logps)
    return -(ratio * advantages[:, None] * mask).sum() / mask.sum()


def grpo_negated(logps, old_logps, advantages, mask):
    weighted = -advantages[:, None] * torch.exp(logps - old_logps)
    return (weighted * mask).sum() / mask.sum()


def grpo_in_chunks(logps, old_logps, advantages, mask):
    total = torch.zeros(())
    for row_logps, row_old_logps, advantage, row_mask in zip(
        logps.split(1), old_logps.split(1), advantages.split(1), mask.split(1), strict=True
    ):
        ratio = torch.exp(row_logps - row_old_logps)
        total = total + (-ratio * advantage * row_mask).sum()
    return total / mask.sum()


@pytest.mark.parametrize(
    "loss", [grpo, grpo_where, grpo_filled, grpo_picked, grpo_masked_first, grpo_clamped_first, grpo_negated, grpo_in_chunks, cispo],
    ids=lambda loss: loss.__name__,
)  # fmt: skip
def test_the_batch_comes_out_however_the_loss_is_written(loss) -> None:
    """Masked by a product, a where, a fill or a pick, before or after, clamped, negated, in chunks, as the weight of a log-prob: the batch is the same."""
    snapshot = record(loss, wanting(), OLD, ADV, MASK).snapshot()
    found = loss_inputs(snapshot)
    assert torch.equal(found.log_probs, LP) and found.log_probs.requires_grad and found.log_probs.is_leaf
    assert found.old_log_probs is not None and torch.equal(found.old_log_probs, OLD)
    assert torch.equal(found.mask, MASK)
    assert torch.equal(found.advantages * MASK, ADV[:, None] * MASK)
    assert (found.ref_log_probs, found.rollout_log_probs, found.entropy) == (None, None, None)


def with_reference(logps, old_logps, ref_logps, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    d = ref_logps - logps
    per_token_kl = torch.exp(d) - d - 1
    return ((-ratio * advantages[:, None] + 0.04 * per_token_kl) * mask).sum() / mask.sum()


def nameless_reference(x, y, z, a, m):
    r = torch.exp(x - y)
    d = z - x
    return ((-r * a[:, None] + 0.04 * (torch.exp(d) - d - 1)) * m).sum() / m.sum()


def nameless_squares(x, y, m):
    return ((x - y).square() * m).sum() / m.sum()


def unnamed_reference(logps, old_logps, z, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    d = z - logps
    return ((-ratio * advantages[:, None] + 0.04 * (torch.exp(d) - d - 1)) * mask).sum() / mask.sum()


def unnamed_old(logps, z, advantages, mask):
    ratio = torch.exp(logps - z)
    return (-ratio * advantages[:, None] * mask).sum() / mask.sum()


def test_an_unnamed_anchor_is_told_by_what_it_is_for() -> None:
    """Inside exp(d) − d − 1 it is the reference, under a ratio it is the old policy."""
    found = loss_inputs(record(unnamed_reference, wanting(), OLD, REF, ADV, MASK).snapshot())
    assert torch.equal(found.old_log_probs, OLD) and torch.equal(found.ref_log_probs, REF)
    found = loss_inputs(record(unnamed_old, wanting(), OLD, ADV, MASK).snapshot())
    assert torch.equal(found.old_log_probs, OLD) and found.ref_log_probs is None


def sampler_only(logps, vllm_logps, advantages, mask):
    ratio = torch.exp(logps - vllm_logps)
    return -(ratio * advantages[:, None] * mask).sum() / mask.sum()


def with_bonus(logps, old_logps, advantages, mask, entropy):
    ratio = torch.exp(logps - old_logps)
    return ((-ratio * advantages[:, None] - 0.01 * entropy) * mask).sum() / mask.sum()


def test_reference_entropy_and_sampler_are_found() -> None:
    """Each role goes to its own place; where the sampler is the only anchor it also stands for the old policy."""
    found = loss_inputs(record(with_reference, wanting(), OLD, REF, ADV, MASK).snapshot())
    assert torch.equal(found.old_log_probs, OLD) and torch.equal(found.ref_log_probs, REF)
    entropy = torch.rand(2, 3)
    found = loss_inputs(record(with_bonus, wanting(), OLD, ADV, MASK, entropy).snapshot())
    assert torch.equal(found.entropy, entropy)
    batch = recorded_batch(record(sampler_only, wanting(), OLD, ADV, MASK).snapshot())
    assert torch.equal(batch.inputs.rollout_log_probs, OLD) and torch.equal(batch.inputs.old_log_probs, OLD)
    assert dict(batch.sources)["old_log_probs"] == "vllm_logps"


def flat(logps, old_logps, advantages, mask):
    return -(torch.exp(logps - old_logps) * advantages * mask).sum() / mask.sum()


@pytest.mark.parametrize("shape", [(6,), (1, 6)], ids=str)
def test_a_packed_batch_is_one_row(shape: tuple[int, ...]) -> None:
    """[N] and [1, N] become [1, N], with the advantages per token."""
    tokens = [tensor.reshape(shape) for tensor in (LP, OLD, ADV[:, None].expand(2, 3), MASK)]
    found = loss_inputs(record(flat, tokens[0].clone().requires_grad_(), *tokens[1:]).snapshot())
    assert found.log_probs.shape == found.mask.shape == found.advantages.shape == (1, 6)
    assert torch.equal(found.advantages[0], ADV[:, None].expand(2, 3).reshape(-1))


def test_groups_of_rows_are_rows() -> None:
    """[G, B, T] is [G·B, T]."""
    grouped = [tensor.reshape(2, 1, 3) for tensor in (LP, OLD, MASK)]
    found = loss_inputs(record(flat, grouped[0].clone().requires_grad_(), grouped[1], ADV.reshape(2, 1, 1), grouped[2]).snapshot())
    assert found.log_probs.shape == (2, 3) and torch.equal(found.advantages, ADV[:, None])


def per_sequence(logps, old_logps, advantages):
    return -(torch.exp(logps - old_logps) * advantages).mean()


def no_advantages(logps, old_logps, mask):
    return (torch.exp(logps - old_logps) * mask).sum() / mask.sum()


def pairs(chosen_logps, rejected_logps):
    return -torch.nn.functional.logsigmoid(chosen_logps.sum(-1) - rejected_logps.sum(-1)).mean()


def old_per_sequence(logps, old_logps, advantages, mask):
    return -(torch.exp((logps * mask).sum(-1) - old_logps) * advantages).mean()


@pytest.mark.parametrize(
    ("loss", "tensors", "word"),
    [
        (per_sequence, (LP[:, 0], OLD[:, 0], ADV), "one number a sequence"),
        (no_advantages, (LP, OLD, MASK), "no advantages"),
        (pairs, (LP, REF.clone().requires_grad_()), "chosen_logps, rejected_logps"),
        (old_per_sequence, (LP, OLD[:, 0], ADV, MASK), "one number a sequence"),
        (nameless_squares, (LP, OLD, MASK), "no log_probs"),
    ],
    ids=["per_sequence", "no_advantages", "pairs", "old_per_sequence", "nameless"],
)
def test_what_is_not_there_is_an_error_that_says_how_to_name_it(loss, tensors, word: str) -> None:
    """One clear error: what lacks, what the file holds, and the call that names it."""
    first = tensors[0].clone().requires_grad_()
    with pytest.raises(NanscopeError) as caught:
        loss_inputs(record(loss, first, *tensors[1:]).snapshot())
    assert caught.value.slug == "missing-role"
    assert word in str(caught.value) and "scope.tag(" in str(caught.value) and "The file holds" in str(caught.value)


def test_a_loss_without_a_single_name_is_read_from_what_it_does() -> None:
    """Who carries the gradient, what is taken from it before exp, and what weighs the ratio."""
    found = loss_inputs(record(nameless_reference, LP.clone().requires_grad_(), OLD, REF, ADV, MASK).snapshot())
    for name, wanted in (("log_probs", LP), ("old_log_probs", OLD), ("ref_log_probs", REF), ("mask", MASK)):
        assert torch.equal(getattr(found, name), wanted), name
    assert torch.equal(found.advantages, ADV[:, None])


def test_a_loss_that_drops_no_token_counts_all() -> None:
    """Without anything that masks, the mask is all ones, and the batch says so."""
    batch = recorded_batch(record(lambda lp, old_lp, adv: -(torch.exp(lp - old_lp) * adv).mean(), wanting(), OLD, ADV[:, None]).snapshot())
    assert bool((batch.inputs.mask == 1).all())
    assert "every token" in dict(batch.sources)["mask"]


def test_tags_name_what_names_do_not(tmp_path: Path) -> None:
    """With scope.tag a loss of one-letter names is read like any other, also where what is tagged was computed."""
    w = torch.ones(3, requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        x, y, z, a, m = LP * w, OLD + 0.0, REF.clone(), ADV[:, None] + 0.0, MASK.clone()
        scope.tag(log_probs=x, old_log_probs=y, ref_log_probs=z, advantages=a, mask=m)
        d = z - x
        r = torch.exp(x - y)
        loss = ((-torch.min(r * a, r.clamp(0.8, 1.2) * a) + 0.04 * (torch.exp(d) - d - 1)) * m).sum() / m.sum()
        loss.backward()
    found = loss_inputs(scope.snapshots[0])
    for tensor, wanted in ((found.log_probs, LP), (found.old_log_probs, OLD), (found.ref_log_probs, REF), (found.mask, MASK)):
        assert tensor is not None and torch.equal(tensor, wanted)


def test_another_dtype_gives_log_probs_of_their_own() -> None:
    """`on_leaf` casts what is a float and leaves the recorded batch without a gradient."""
    found = loss_inputs(record(grpo, wanting(), OLD, ADV, MASK).snapshot())
    double = on_leaf(found, torch.float64)
    double.log_probs.sum().backward()
    assert double.log_probs.grad is not None and found.log_probs.grad is None
    assert {t.dtype for t in (double.log_probs, double.old_log_probs, double.advantages, double.mask)} == {torch.float64}


# -- real runs -----------------------------------------------------------------------------------------------------------------


def incident(name: str, folder: Path) -> Snapshot:
    path = HERE / "incidents" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with nanscope.watch(out=folder) as scope:
        module.run()
    return load(next(path for path in scope.paths if path))


# What a person reads in each script: shape, tokens that the loss leaves out, and what it calls its parts.
READ = {
    "exp_overflow_packed_ppo": ((1, 18), 5, {"log_probs": "lp", "old_log_probs": "old_lp", "advantages": "adv"}),
    "verl_891_low_var_kl_on_padding": ((3, 6), 2, {"ref_log_probs": "data['ref_log_prob']", "mask": "data['response_mask']"}),
    "openrlhf_1293_gspo_unclamped_exponent": ((4, 7), 6, {"log_probs": "log_probs", "old_log_probs": "old_log_probs", "mask": "action_mask"}),
    "openrlhf_1314_icepop_filter_multiply": ((2, 7), 2, {"old_log_probs": "old_log_probs", "rollout_log_probs": "rollout_log_probs"}),
    "trl_5413_inline_is_ratio_nan": ((3, 6), 4, {"log_probs": "per_token_logps", "old_log_probs": "old_per_token_logps", "mask": "mask"}),
    "inf_times_zero_mask_k3_padding": ((3, 8), 4, {"log_probs": "lp", "ref_log_probs": "ref_lp", "mask": "mask"}),
    "inf_times_zero_mask_half_ratio": ((6, 5), 3, {"log_probs": "new", "old_log_probs": "old", "mask": "mask", "advantages": "adv"}),
    "seq_ratio_overflow_gspo_sum": ((4, 64), 72, {"log_probs": "logps", "old_log_probs": "old_logps", "advantages": "advantages"}),
    "where_grad_trap_indexing_after_exp": ((1, 16), 6, {"log_probs": "lp", "mask": "response", "advantages": "adv"}),
}  # fmt: skip
NOT_A_POLICY_LOSS = ("exp_overflow_awr_temperature", "inf_minus_inf_dpo_banned_token", "trl_1380_kto_no_kl_examples")


@pytest.mark.parametrize("name", READ)
def test_an_incident_gives_its_batch(name: str, tmp_path: Path) -> None:
    """From the file alone, what a person would have read in the script."""
    shape, left_out, names = READ[name]
    batch = recorded_batch(incident(name, tmp_path))
    assert batch.inputs.log_probs.shape == shape
    assert int((batch.inputs.mask == 0).sum()) == left_out
    assert {field: dict(batch.sources)[field] for field in names} == names


@pytest.mark.parametrize("name", NOT_A_POLICY_LOSS)
def test_a_loss_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    """What is no policy loss per token is not forced into one."""
    with pytest.raises(NanscopeError) as caught:
        loss_inputs(incident(name, tmp_path))
    assert caught.value.slug == "missing-role"


def same(batch: RecordedBatch, name: str, wanted: Tensor) -> bool:
    found = getattr(batch.inputs, name)
    return found is not None and torch.equal(found.detach().float(), wanted.detach().float())


def test_the_demo_gives_the_batch_that_its_loss_was_called_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument of the real call comes back from the file, bit by bit."""
    called: list[tuple[Tensor, ...]] = []
    original = demo.grpo_loss

    def spy(*args):
        called.append(args[:5])
        return original(*args)

    monkeypatch.setattr(demo, "grpo_loss", spy)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in demo.train(demo.DemoSettings()):
            if scope.snapshots:
                break
    batch = recorded_batch(load(scope.paths[0]))
    logps, old_logps, ref_logps, advantages, mask = called[-1]
    for name, wanted in zip(LossInputs.__slots__, (logps, old_logps, ref_logps, None, advantages[:, None], mask), strict=False):
        assert wanted is None or same(batch, name, wanted), name


@pytest.mark.parametrize(
    ("script", "step", "names"),
    [
        ("plain_loop.py", 6, {"log_probs": "log_probs", "old_log_probs": "rollout_log_probs", "mask": "mask"}),
        ("trl_grpo.py", 5, {"log_probs": "logps", "old_log_probs": "old_per_token_logps", "mask": "mask", "advantages": "advantages"}),
    ],
    ids=["plain loop", "TRL"],
)
def test_an_example_gives_its_batch(script: str, step: int, names: dict[str, str], tmp_path: Path) -> None:
    """The planted stale log-prob stands at a masked token of the batch that the file gives."""
    if script == "trl_grpo.py":
        pytest.importorskip("trl")
    command = [sys.executable, str(HERE.parent / "examples" / script), "--fault", "--out", str(tmp_path)]
    subprocess.run(command, capture_output=True, timeout=300, cwd=tmp_path, check=False)
    batch = recorded_batch(load(tmp_path / "latest" / f"step-{step:06d}.rank0.safetensors"))
    assert {field: dict(batch.sources)[field] for field in names} == names
    assert batch.inputs.old_log_probs is not None
    stale = (batch.inputs.log_probs - batch.inputs.old_log_probs > 88).nonzero()
    assert len(stale) == 1 and batch.inputs.mask[tuple(stale[0])] == 0


def test_a_file_without_a_loss_is_refused() -> None:
    """A snapshot of poisoned weights holds no batch."""
    recorded = record(lambda x: x.sum(), leaf(3))
    with pytest.raises(NanscopeError, match="no program"):
        loss_inputs(recorded.snapshot(program=type(recorded.program)((), (), -1)))
