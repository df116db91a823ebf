"""The audit of normalisation: what it says of batches whose answer one computes by hand, of random splits, and of recorded steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import record
from torch import Tensor, nn
from typer.testing import CliRunner

import nanscope
from nanscope.__main__ import app
from nanscope.audit import Audit, Effect, Finding, Sure, audit, audit_snapshots
from nanscope.audit.denominators import denominators, emptied_under
from nanscope.audit.weights import Emptied, Scheme
from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import framework_loss
from nanscope.objective.advantages import whiten
from nanscope.objective.reduction import Guard, Over, Reduction
from nanscope.objective.settings import LossInputs, LossSettings
from nanscope.program.program import Program
from nanscope.snapshot.file import load
from nanscope.snapshot.step import Reached, Snapshot

NAN = float("nan")
FIGURES = Path(__file__).parent / "parity" / "figures.json"


def rows(*lengths_and_losses: tuple[int, float], width: int | None = None, drift: float = 1e-9) -> LossInputs:
    """A batch whose tokens have the given loss, row by row: the ratio is 1 and A = −loss. A drift keeps it from being a first step."""
    wide = width or max(length for length, _ in lengths_and_losses) or 1
    log_probs = torch.full((len(lengths_and_losses), wide), -1.0, dtype=torch.float64)
    mask = (torch.arange(wide) < torch.tensor([length for length, _ in lengths_and_losses])[:, None]).double()
    advantages = torch.tensor([-loss for _, loss in lengths_and_losses], dtype=torch.float64)
    return LossInputs(log_probs, log_probs - drift, None, None, advantages, mask)


def found(result: Audit, slug: str) -> Finding:
    """The finding of that name; a failure lists what there is."""
    by_slug = {finding.slug: finding for finding in result.findings}
    assert slug in by_slug, f"no {slug} among {list(by_slug)}"
    return by_slug[slug]


LONG_AND_SHORT = rows((100, 0.5), (900, 0.3))  # 50 + 270 = 320 over 1000 tokens; (0.5 + 0.3) / 2 = 0.4
SHORT, LONG = rows((100, 0.5)), rows((900, 0.3))


# -- means of means ----------------------------------------------------------------------------------------------------------------


def test_a_mean_of_row_means_is_told_from_the_mean_of_the_tokens() -> None:
    """100 tokens at 0.5 and 900 at 0.3 are 0.32, not 0.4, and a token of the short row weighs 9 times one of the long."""
    finding = found(audit([LONG_AND_SHORT], "trl.grpo"), "rows_unequal")
    assert finding.effect is Effect.CHANGES
    assert finding.figures == pytest.approx({"value": 0.4, "token_mean": 0.32, "shortest": 100, "longest": 900, "weight": 9})
    assert finding.sentence == (
        "The loss is a mean of row means, 0.4; the mean over all tokens is 0.32 (1.25 times that). A token of the shortest row (100 tokens) "
        "weighs 9 times one of the longest (900 tokens)."
    )


@pytest.mark.parametrize(("ranks", "slug"), [(None, "micro_batches_unequal"), ([0, 1], "ranks_unequal")])
def test_the_mean_of_two_micro_batches_or_ranks_is_told_from_that_of_the_step(ranks: list[int] | None, slug: str) -> None:
    """The same 0.4 for 0.32, and the count that mends it."""
    result = audit([SHORT, LONG], "trl.bnpo", ranks=ranks)
    assert result.loss == pytest.approx(0.4)
    finding = found(result, slug)
    assert finding.figures == pytest.approx({"value": 0.4, "whole": 0.32, "weight": 9, "count": 1000})
    assert "by 1000, the count of the whole step" in finding.sentence
    assert ("multiply by the number of ranks" in finding.sentence) is (ranks is not None)
    assert len([f for f in result.findings if f.effect is Effect.CHANGES]) == 1


MENDED: list[tuple[str, dict[str, Any]]] = [
    ("trl.dapo", {"num_items_in_batch": 1000.0}),
    ("verl.vanilla", {"batch_num_tokens": 1000.0}),
    ("openrlhf.ppo", {"batch_num_tokens": 1000.0}),
    ("nemo_rl.clipped_pg", {"global_valid_toks": 1000.0, "reference_policy_kl_penalty": 0.0}),
]


@pytest.mark.parametrize(("key", "options"), MENDED, ids=[key for key, _ in MENDED])
def test_the_counts_that_the_sentence_names_mend_it(key: str, options: dict[str, Any]) -> None:
    """With the count of the whole step the micro-batches add up to 0.32, and nothing changes the loss."""
    result = audit([SHORT, LONG], key, **options)
    assert result.loss == pytest.approx(0.32, rel=1e-6)
    assert result.reduction == "the token mean over the whole step"
    assert not result.changes_loss


def test_two_ranks_of_two_micro_batches_each() -> None:
    """Accumulation and DDP both average: ((0.5 + 0.3) / 2 + (0.5 + 0.1) / 2) / 2 = 0.35, where 10·0.5 + 30·0.3 + 10·0.5 + 10·0.1 over 60 is 1/3."""
    parts = [rows((10, 0.5)), rows((30, 0.3)), rows((10, 0.5)), rows((10, 0.1))]
    result = audit(parts, "trl.bnpo", ranks=[0, 0, 1, 1])
    assert result.loss == pytest.approx(0.35)
    micro, ranks = found(result, "micro_batches_unequal"), found(result, "ranks_unequal")
    assert micro.figures["weight"] == pytest.approx(3)  # within rank 0
    assert ranks.figures["weight"] == pytest.approx(2)  # 40 tokens against 20
    assert ranks.figures["whole"] == pytest.approx(20 / 60)
    assert "of rank 0" in micro.sentence


def test_row_means_of_unlike_many_rows_do_not_add_up() -> None:
    """1 row at 0.5 and 3 rows at 0.3 are 0.35 over the rows, and 0.4 if averaged."""
    result = audit([rows((4, 0.5)), rows((4, 0.3), (4, 0.3), (2, 0.3))], "trl.grpo")
    finding = found(result, "micro_batches_unequal")
    assert finding.figures == pytest.approx({"value": 0.4, "whole": 0.35, "weight": 3, "count": 4})
    assert "row means" in finding.sentence


ROWS_THAT_COUNT: list[tuple[str, dict[str, Any], float | None]] = [
    ("trl.grpo", {}, None),  # two rows each: the empty one counts, and all weigh the same
    ("verl.vanilla", {"loss_agg_mode": "seq-mean-token-mean"}, 2.0),  # one row against two
]


@pytest.mark.parametrize(("key", "options", "weight"), ROWS_THAT_COUNT, ids=["counted", "dropped"])
def test_an_empty_row_is_a_row_where_it_counts(key: str, options: dict[str, Any], weight: float | None) -> None:
    """A micro-batch with an empty row beside one without: their rows weigh alike if it counts, and 2 : 1 if it is dropped."""
    result = audit([rows((4, 0.5), (0, 0.9)), rows((2, 0.3), (4, 0.1))], key, **options)
    if weight is None:
        assert "micro_batches_unequal" not in {finding.slug for finding in result.findings}
        return
    figures = found(result, "micro_batches_unequal").figures  # (0.5 + (0.3 + 0.1) / 2) / 2 where (0.5 + 0.3 + 0.1) / 3 is meant
    assert figures == pytest.approx({"value": 0.35, "whole": 0.3, "weight": weight, "count": 3})


def test_a_horizon_that_is_the_width_of_the_padding_differs_between_micro_batches() -> None:
    """The sums are divided by unlike widths: what is in the narrower batch weighs more."""
    finding = found(
        audit([rows((4, 0.5), width=4), rows((4, 0.3), width=8)], "verl.vanilla", loss_agg_mode="seq-mean-token-sum-norm"),
        "micro_batches_unequal",
    )
    assert finding.figures["weight"] == pytest.approx(2)
    assert "one constant length" in finding.sentence


ADDS_UP = [  # what adds up over micro-batches of 3 and 1 tokens in one row each, of 4 columns
    (Scheme.TOKEN_MEAN, False), (Scheme.ROW_MEAN, True), (Scheme.FILLED_ROW_MEAN, True),
    (Scheme.ROW_SUM, True), (Scheme.HORIZON, True), (Scheme.TOTAL, True),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "adds_up"), ADDS_UP)
def test_which_sums_add_up_is_computed(scheme: Scheme, adds_up: bool) -> None:
    """With equally many rows, a row mean survives averaging and a token mean does not."""
    result = audit([rows((3, 0.5), width=4), rows((1, 0.3), width=4)])
    reduced = next(row for row in result.reductions if row.scheme is scheme)
    assert reduced.adds_up is adds_up
    if adds_up and scheme is not Scheme.TOTAL:
        assert reduced.averaged == pytest.approx(reduced.whole)


def test_ranks_with_unlike_many_micro_batches_are_averaged_one_after_the_other() -> None:
    """A rank with one micro-batch weighs as much as one with two; with one each, row means add up."""
    first, second, third = rows((3, 0.8), width=4), rows((3, 0.4), width=4), rows((1, 0.2), width=4)
    uneven, even = audit([first, second, third], ranks=[0, 1, 1]), audit([first, third], ranks=[0, 1])
    by_row = {
        name: next(row for row in result.reductions if row.scheme is Scheme.ROW_MEAN)
        for name, result in (("uneven", uneven), ("even", even))
    }
    assert by_row["uneven"].averaged == pytest.approx((0.8 + (0.4 + 0.2) / 2) / 2)
    assert by_row["uneven"].whole == pytest.approx((0.8 + 0.4 + 0.2) / 3)
    assert (by_row["uneven"].adds_up, by_row["even"].adds_up) == (False, True)


lengths = st.lists(st.integers(0, 7), min_size=2, max_size=8).filter(any)


@given(lengths, st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(0, 99))
def test_the_true_token_mean_does_not_depend_on_the_split(row_lengths: list[int], assigned: list[int], seed: int) -> None:
    """However rows are dealt to micro-batches: the token mean stays, and a finding is there exactly if averaging bends a weight."""
    torch.manual_seed(seed)
    dealt = [(length, float(torch.randn(()))) for length in row_lengths]
    groups = [[row for row, to in zip(dealt, assigned, strict=False) if to == part] for part in range(4)]
    parts = [rows(*group, width=7) for group in groups if group]
    whole, split = audit([rows(*dealt, width=7)], "trl.bnpo"), audit(parts, "trl.bnpo")
    assert split.token_mean == pytest.approx(whole.token_mean, abs=1e-12)
    tokens = [sum(length for length, _ in group) for group in groups if group]
    slugs = {finding.slug for finding in split.findings}
    assert ("micro_batches_unequal" in slugs) is (len({count for count in tokens if count}) > 1)
    assert ("no_tokens" in slugs) is (0 in tokens)
    if not slugs & {"micro_batches_unequal", "no_tokens"}:
        assert split.loss == pytest.approx(whole.loss, abs=1e-9)


@settings(max_examples=12)
@given(lengths, st.integers(0, 99))
def test_the_loss_of_a_key_is_that_of_the_framework(row_lengths: list[int], seed: int) -> None:
    """The weights are an account of the loss: they sum to what `framework_loss` gives."""
    torch.manual_seed(seed)
    batch = rows(*[(length, float(torch.randn(()))) for length in row_lengths], width=7)
    for key in ("trl.grpo", "trl.dapo", "trl.dr_grpo", "skyrl.regular", "tinker.ppo", "openrlhf.ppo", "trl.luspo"):
        assert audit([batch], key).loss == pytest.approx(framework_loss(key, batch).loss.item(), abs=1e-9), key


# -- rows without tokens, denominators ---------------------------------------------------------------------------------------------


def test_an_empty_row_halves_a_row_mean_that_counts_it() -> None:
    """One row of two is empty."""
    finding = found(audit([rows((3, -0.8), (0, 0.2))], "trl.grpo"), "empty_rows")
    assert finding.effect is Effect.CHANGES
    assert finding.figures == pytest.approx({"empty": 1, "rows": 2, "counted": -0.4, "dropped": -0.8})
    assert "This loss counts them" in finding.sentence


def test_the_known_figures_of_an_empty_row() -> None:
    """The batch on which TRL gave −0.4858 and OpenRLHF −0.971615."""
    values = {name: torch.tensor(value) for name, value in json.loads(FIGURES.read_text(encoding="utf-8"))["inputs"].items()}
    values["mask"][1] = 0
    finding = found(audit([LossInputs(**values)], "openrlhf.ppo", token_level_loss=False), "empty_rows")
    assert finding.figures["counted"] == pytest.approx(-0.4858, abs=5e-5)
    assert finding.figures["dropped"] == pytest.approx(-0.971615, abs=5e-6)
    assert finding.effect is Effect.NOTE  # OpenRLHF drops them


FLOORS = [
    ("openrlhf.ppo", {}, True),
    ("verl.vanilla", {}, True),
    ("trl.grpo", {}, False),
    ("nemo_rl.clipped_pg", {"reference_policy_kl_penalty": 0.0}, False),
]


@pytest.mark.parametrize(("key", "options", "bare"), FLOORS, ids=[row[0] for row in FLOORS])
def test_a_denominator_without_a_floor_is_a_risk_until_a_batch_is_empty(key: str, options: dict[str, Any], bare: bool) -> None:
    """A healthy batch under OpenRLHF's loss is told of it; an empty one makes it a finding."""
    slugs = {finding.slug: finding.effect for finding in audit([rows((3, 0.5), (3, 0.2))], key, **options).findings}
    assert slugs == ({"batch_without_floor": Effect.RISK} if bare else {})
    empty = audit([rows((3, 0.5)), rows((0, 0.2), width=3)], key, **options)
    assert found(empty, "no_tokens").figures == {"empty": 1.0, "micro_batches": 2.0}
    assert ("batch_without_floor" in {f.slug for f in empty.findings if f.effect is Effect.CHANGES}) is bare


def test_the_frameworks_without_a_floor_are_the_known_two() -> None:
    """Tried on every loss: 0/0 in verl and OpenRLHF, finite everywhere else; no loss fails for one row."""
    known = denominators()
    assert {row.key.split(".")[0] for row in known if not row.empty_batch} == {"verl", "openrlhf"}
    assert all(row.empty_row for row in known)
    assert {row.guard.value for row in known if not row.empty_batch} == {"raw"}


def test_a_row_count_without_a_floor_fails_for_one_row() -> None:
    """No framework has it, but a loop by hand may."""
    how = LossSettings(reduction=Reduction(Over.ROW_MEANS, row_guard=Guard.RAW))
    assert emptied_under(how) == Emptied(row=False, batch=False)
    assert emptied_under(LossSettings(reduction=Reduction(Over.TOKENS, guard=Guard.RAW))) == Emptied(row=True, batch=False)


def test_a_batch_without_any_token_is_audited_as_well() -> None:
    """There is no token mean, and no row of the table."""
    result = audit([rows((0, 0.5), width=3)])
    assert (result.token_mean, result.reductions, result.changes_loss) == (None, (), True)


# -- sums, padding, advantages -----------------------------------------------------------------------------------------------------


def test_a_sum_is_told_with_its_factor() -> None:
    """tinker sums: 320 where the mean is 0.32."""
    finding = found(audit([LONG_AND_SHORT], "tinker.ppo"), "sum_not_mean")
    assert finding.figures == pytest.approx({"sum": 320, "token_mean": 0.32, "factor": 1000})


def test_a_reduction_that_counts_padding_is_named() -> None:
    """Liger's luspo multiplies by n_i/T and not by the mask."""
    assert found(audit([LONG_AND_SHORT], "liger.luspo", beta=0.0), "padding_weighs").effect is Effect.CHANGES


def grouped(seed: int = 0) -> LossInputs:
    """Four groups of four rows of unlike length, with advantages relative to the group."""
    torch.manual_seed(seed)
    rewards = torch.rand(4, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    batch = rows(*[(int(length), 0.0) for length in torch.randint(1, 9, (16,))], width=9)
    return LossInputs(batch.log_probs, batch.old_log_probs, None, None, advantages.reshape(-1), batch.mask)


def whitened(batch: LossInputs) -> LossInputs:
    advantages = whiten(batch.advantages.float()[:, None].expand(batch.mask.shape), batch.mask)
    return LossInputs(batch.log_probs, batch.old_log_probs, None, None, advantages, batch.mask)


def test_advantages_that_were_normalised_twice_are_told_and_once_are_not() -> None:
    """By group and then over the tokens, also where the rows are dealt to micro-batches."""
    once, twice = grouped(), whitened(grouped())
    assert "normalised_twice" not in {finding.slug for finding in audit([once], "trl.bnpo").findings}
    finding = found(audit([twice], "trl.bnpo"), "normalised_twice")
    assert (finding.effect, finding.sure) == (Effect.CHANGES, Sure.MEASURED)
    halves = [LossInputs(twice.log_probs[s], None, None, None, twice.advantages[s], twice.mask[s]) for s in (slice(8), slice(8, 16))]
    assert found(audit(halves, "trl.bnpo"), "normalised_twice").figures == pytest.approx(finding.figures)


TWICE_BY_SETTINGS = [
    ({"advantage_batch_normalize": True, "advantage_estimator": "gae"}, True),
    ({"advantage_batch_normalize": True, "advantage_estimator": "rloo"}, False),
    ({"advantage_batch_normalize": False, "advantage_estimator": "gae"}, False),
    ({"whiten_advantages": True, "scale_rewards": "group"}, True),
]


@pytest.mark.parametrize(("trainer", "twice"), TWICE_BY_SETTINGS)
def test_settings_tell_what_the_numbers_cannot(trainer: dict[str, Any], twice: bool) -> None:
    """A critic's advantages that are whitened and whitened again look like once."""
    batch = rows((3, 0.4), (5, -0.1))
    torch.manual_seed(0)
    critic = LossInputs(batch.log_probs, batch.old_log_probs, None, None, torch.randn(2, 5), batch.mask)
    slugs = {f.slug: f.sure for f in audit([critic], "trl.bnpo", trainer=trainer).findings}
    assert (slugs.get("normalised_twice") is Sure.SETTINGS) is twice


# -- the first step ----------------------------------------------------------------------------------------------------------------


def test_the_zero_loss_of_a_first_step_is_explained() -> None:
    """A = 1 and −1 on rows of 3 tokens and of 1: 0 under a row mean, −(3 − 1)/4 = −0.5 under a token mean, and never 0 under SAPO."""
    first = rows((3, -1.0), (1, 1.0), drift=0.0)
    by_row, by_token = found(audit([first], "trl.grpo"), "first_step"), found(audit([first], "trl.dapo"), "first_step")
    assert by_row.effect is Effect.NOTE
    assert by_row.figures["expected"] == pytest.approx(0.0, abs=1e-12)
    assert by_row.figures["gradient_norm"] == pytest.approx((3 / 36 + 1 / 4) ** 0.5)  # weights 1/6, 1/6, 1/6 and 1/2
    assert by_token.figures["expected"] == pytest.approx(-0.5)
    assert by_token.figures["gradient_norm"] == pytest.approx(0.5)
    assert "exactly 0 in trl.grpo, verl seq-mean-token-mean, skyrl sequence_mean; −0.5 in trl.dapo" in by_token.sentence
    assert "−0.0476 in trl.sapo" not in by_token.sentence.partition("exactly 0")[0]
    assert "trl.sapo" in by_token.sentence.partition(";")[2]


def test_the_gradient_norm_and_the_loss_of_a_first_step_are_those_of_the_framework() -> None:
    """Held against autograd."""
    first = rows((3, -1.0), (1, 1.0), (2, 0.4), drift=0.0)
    for key in ("trl.grpo", "trl.dapo", "tinker.ppo"):
        first.log_probs.requires_grad_()
        loss = framework_loss(key, first).loss
        (gradient,) = torch.autograd.grad(loss, first.log_probs)
        figures = found(audit([first], key), "first_step").figures
        assert figures["expected"] == pytest.approx(loss.item())
        assert figures["gradient_norm"] == pytest.approx(gradient.norm().item())


def test_a_loss_that_is_not_the_weighted_advantages_on_a_first_step_says_so() -> None:
    """CISPO multiplies by the log-prob."""
    sentence = found(audit([rows((3, -1.0), (1, 1.0), drift=0.0)], "trl.cispo", epsilon_high=5.0), "first_step").sentence
    assert sentence.endswith("here: this loss is no ratio · advantage alone.")


def test_a_first_step_in_float64_has_the_same_gradient() -> None:
    """Executed, on the recorded program and under a framework's rule: the loss is 0 and learning owes nothing to rounding."""
    first = rows((3, -1.0), (1, 1.0), (2, 0.7), (4, -0.7), drift=0.0)
    for finding in (found(audit([first], "trl.grpo"), "first_step_exact"), found(recorded(first), "first_step_exact")):
        assert finding.effect is Effect.NOTE
        assert 0 <= finding.figures["gradient"] < 1e-6 and finding.figures["cosine"] == pytest.approx(1.0)
        assert "owes nothing to calculation errors" in finding.sentence


def test_a_first_step_that_rounding_spoils_says_so() -> None:
    """In bfloat16 a part of the gradient is calculation error, and that is not talked away."""
    first = rows((3, -1.0), (1, 1.0), (2, 0.7), (4, -0.7), drift=0.0)
    finding = found(recorded(first, torch.bfloat16), "first_step_exact")
    assert finding.figures["gradient"] > 1e-4 and "is calculation error" in finding.sentence


def test_noise_on_the_advantages_is_executed() -> None:
    """Held against the same noise by hand: one number a row, with the seed, on the recorded program and on one that makes its advantages."""
    first = rows((3, -1.0), (1, 1.0), (2, 0.7), (4, -0.7), drift=0.0)
    noise = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float() * 1e-2
    tokens = first.mask.sum(-1)
    loss = float(-(noise + first.advantages).mean())  # a mean of row means: every ratio is 1
    moved = (noise**2 / tokens).sum().sqrt() / (first.advantages**2 / tokens).sum().sqrt()
    for made_inside in (False, True):
        figures = found(recorded(first, made_inside=made_inside), "advantage_noise").figures
        assert figures["variance"] == 1e-4
        assert figures["loss"] == pytest.approx(loss, rel=1e-3)
        assert figures["gradient"] == pytest.approx(float(moved), rel=1e-3)
    figures = found(audit([first], "trl.grpo"), "advantage_noise").figures
    assert figures["loss"] == pytest.approx(loss, rel=1e-3) and 0.9 < figures["cosine"] < 1


def recorded(batch: LossInputs, dtype: torch.dtype = torch.float32, *, made_inside: bool = False) -> Audit:
    """The audit of a GRPO loss on a batch, recorded. made_inside: the loss itself takes the mean off the rewards."""

    def loss(logps: torch.Tensor, old_logps: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        advantages = rewards - rewards.mean() if made_inside else rewards
        ratio = torch.exp(logps - old_logps)
        per_token_loss = -torch.min(ratio * advantages[:, None], torch.clamp(ratio, 0.8, 1.2) * advantages[:, None])
        return ((per_token_loss * mask).sum(-1) / mask.sum(-1)).mean()

    logps = batch.log_probs.detach().to(dtype)
    pushed = batch.advantages.to(dtype) + (1.0 if made_inside else 0.0)
    return audit_snapshots([record(loss, logps.requires_grad_(), logps.detach().clone(), pushed, batch.mask.to(dtype)).snapshot()])


def test_a_later_step_is_not_explained_away() -> None:
    """A log-ratio of 1e-9 is one."""
    assert "first_step" not in {finding.slug for finding in audit([rows((3, -1.0), (1, 1.0))], "trl.grpo").findings}


# -- faults and errors -------------------------------------------------------------------------------------------------------------


def test_what_the_mask_excludes_reaches_no_figure() -> None:
    """NaN and −inf in padding change nothing; in a valid token they are counted, and left out of the values only."""
    clean, dirty = rows((3, 0.5), (5, 0.3)), rows((3, 0.5), (5, 0.3))
    dirty.log_probs[0, 4] = NAN
    assert dirty.old_log_probs is not None
    dirty.old_log_probs[0, 3] = -float("inf")
    for key in ("trl.grpo", "verl.gspo", "trl.rloo"):  # by token, and with one ratio for the row
        assert audit([dirty], key) == audit([clean], key)
    dirty.log_probs[1, 0] = NAN
    hurt = audit([dirty], "trl.grpo")
    assert hurt.left_out == 1
    assert found(hurt, "rows_unequal").figures["weight"] == pytest.approx(5 / 3)


BLANK = Snapshot(7, 0, Program((), (), -1), {}, None, {}, Reached())


ERRORS = [
    (lambda: audit([]), "empty-audit"),
    (lambda: audit_snapshots([]), "empty-audit"),
    (lambda: audit_snapshots([BLANK, BLANK]), "same-part"),
    (lambda: audit_snapshots([BLANK], group_size=0), "bad-argument"),
    (lambda: audit([SHORT], ranks=[0, 1]), "shape-mismatch"),
    (lambda: audit([SHORT], "trl.nothing"), "unknown-loss"),
    (lambda: audit([SHORT], "trl.grpo", loss_agg_mode="x"), "unknown-setting"),
]


@pytest.mark.parametrize(("call", "slug"), ERRORS, ids=[slug for _, slug in ERRORS])
def test_bad_input_is_one_clear_error(call: Any, slug: str) -> None:
    """With its slug."""
    with pytest.raises(NanscopeError) as caught:
        call()
    assert caught.value.slug == slug


def test_an_audit_is_json() -> None:
    """Everything in it, without NaN."""
    data = json.loads(json.dumps(audit([SHORT, LONG], "trl.bnpo").to_json(), allow_nan=False))
    assert data["loss"] == pytest.approx(0.4)
    assert {finding["slug"] for finding in data["findings"]} == {"micro_batches_unequal"}


# -- recorded steps ----------------------------------------------------------------------------------------------------------------

REDUCTIONS = {
    "token mean": lambda x, m: (x * m).sum() / m.sum(),
    "row mean": lambda x, m: ((x * m).sum(-1) / m.sum(-1)).mean(),
    "sum": lambda x, m: (x * m).sum(),
    "half of the sum": lambda x, m: (x * m).sum() / 2,
    "mean over padding": lambda x, m: (x * m).mean(),
    "constant": lambda x, m: (x * m).sum() / 2048,
}


class Policy(nn.Module):
    """One embedding: the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def train(folder: Path, reduced: str, lengths: tuple[int, ...] = (6, 2, 4), steps: int = 3) -> Snapshot:
    """A GRPO loop that overflows at a masked token in its last step, watched; the snapshot of that step."""
    torch.manual_seed(0)
    policy, mask = Policy(), (torch.arange(6) < torch.tensor(lengths)[:, None]).float()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    tokens = torch.randint(0, 5, (len(lengths), 7))
    with nanscope.watch(out=folder) as scope:
        old_log_probs = log_probs_of(policy, tokens).detach()
        for step in range(steps):
            log_probs = log_probs_of(policy, tokens)
            advantages = torch.linspace(1, -1, len(lengths))[:, None]
            if step == steps - 1:
                old_log_probs[1, 5] = -200.0
            ratio = torch.exp(log_probs - old_log_probs)
            token_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = REDUCTIONS[reduced](token_loss, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (path,) = [path for path in scope.paths if path is not None]
    return load(path)


def log_probs_of(policy: Policy, tokens: Tensor) -> Tensor:
    return torch.log_softmax(policy(tokens[:, :-1]), -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize(("reduced", "slug"), [("token mean", None), ("row mean", "rows_unequal"), ("sum", "sum_not_mean")])
def test_the_reduction_of_a_watched_loop_is_recognised(tmp_path: Path, reduced: str, slug: str | None) -> None:
    """From the file alone, although its gradient is NaN; the recorded loss is the one that the weights account for."""
    snapshot = train(tmp_path, reduced)
    result = audit_snapshots([snapshot])
    assert result.reduction == f"the {reduced}"
    if snapshot.loss is not None and torch.isfinite(snapshot.loss):
        assert result.loss == pytest.approx(result.recorded, rel=1e-5)
    assert [f.slug for f in result.findings if f.effect is Effect.CHANGES] == ([slug] if slug else [])
    floor = {"token mean": "batch_without_floor", "row mean": "row_without_floor", "sum": None}[reduced]
    assert [f.slug for f in result.findings if f.effect is Effect.RISK] == ([floor] if floor else [])


@pytest.mark.parametrize(
    ("reduced", "slug", "effect", "divisor"),
    [
        ("half of the sum", "sum_not_mean", Effect.CHANGES, 2.0),
        ("mean over padding", "padding_in_denominator", Effect.RISK, 18.0),
        ("constant", "fixed_divisor", Effect.NOTE, 2048.0),
    ],
)
def test_a_divisor_that_is_not_the_count_is_named(tmp_path: Path, reduced: str, slug: str, effect: Effect, divisor: float) -> None:
    """12 tokens in 3 rows of 6: what the sum over them was divided by, and what that makes of the mean."""
    finding = found(audit_snapshots([train(tmp_path, reduced)]), slug)
    assert finding.effect is effect
    assert finding.figures["divisor"] == pytest.approx(divisor, rel=1e-4) and finding.figures["tokens"] == 12


def test_ranks_are_told_by_their_files(tmp_path: Path) -> None:
    """Two files of one step, of ranks with 12 and 18 tokens: their token means are averaged, and weights are 1.5 : 1."""
    from dataclasses import replace

    first = train(tmp_path / "0", "token mean")
    second = replace(train(tmp_path / "1", "token mean", lengths=(6, 6, 6)), rank=1)
    result = audit_snapshots([first, second])
    assert result.ranks == 2
    assert found(result, "ranks_unequal").figures["weight"] == pytest.approx(18 / 12)
    with pytest.raises(NanscopeError) as caught:
        audit_snapshots([first, replace(second, step=77)])
    assert caught.value.slug == "different-steps"


def test_the_command_audits_files(tmp_path: Path) -> None:
    """Status 3 if a finding changes the loss, 0 if none does, 1 for a file that cannot be read."""
    train(tmp_path / "row", "row mean")
    train(tmp_path / "token", "token mean")
    (row,), (token,) = (list((tmp_path / name).glob("[0-9]*/*.safetensors")) for name in ("row", "token"))
    runner = CliRunner()
    done = runner.invoke(app, ["audit", str(row), "--json", str(tmp_path / "audit.json")])
    assert done.exit_code == 3
    assert "the loss is the row mean" in done.stdout
    assert json.loads((tmp_path / "audit.json").read_text())["reduction"] == "the row mean"
    assert runner.invoke(app, ["audit", str(token)]).exit_code == 0
    failed = runner.invoke(app, ["audit", str(tmp_path / "audit.json")])
    assert isinstance(failed.exception, NanscopeError)  # `main` explains it in one line and exits with 1


def test_a_file_without_a_batch_is_named(tmp_path: Path) -> None:
    """With what it lacks."""
    with pytest.raises(NanscopeError, match="step-000007.rank0.safetensors: the file holds no program") as caught:
        audit_snapshots([_empty()])
    assert caught.value.slug == "missing-role"


def _empty() -> Snapshot:
    from nanscope.program.program import Program
    from nanscope.snapshot.step import Reached

    return Snapshot(7, 0, Program((), (), -1), {}, torch.tensor(NAN), {}, Reached())


def test_the_findings_are_a_frame() -> None:
    """One row per finding, by its slug; without findings there are the columns."""
    found = audit([rows((3, 1.0), (5, 2.0))], "trl.grpo")
    assert list(found.frame().index) == [finding.slug for finding in found.findings]
    assert found.frame().loc["rows_unequal", "effect"] == Effect.CHANGES
    assert list(replace(found, findings=()).frame().columns) == ["effect", "sentence", "sure", "figures"]
