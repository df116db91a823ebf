"""Everything known of the tokens around an origin: it is what the run computed, nothing bad is lost, and a large batch stays small."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.locate.layout import Layout
from nanscope.replay.tries import Replay, replay
from nanscope.roles import Role
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.offending import HEIGHT, WIDTH
from nanscope.verdict.token import Token, token_at_origin
from nanscope.verdict.tokens import RECORDED, TILES, WINDOWS, TokenMap, Track, tokens_of


def loss(logps: Tensor, ref_logps: Tensor, advantages: Tensor, completion_mask: Tensor) -> Tensor:
    ref_log_ratio = ref_logps - logps
    per_token_kl = torch.exp(ref_log_ratio) - ref_log_ratio - 1
    per_token_loss = (-advantages.unsqueeze(1) * logps + 0.1 * per_token_kl) * completion_mask
    return per_token_loss.sum() / completion_mask.sum()


def batch(rows: int, columns: int, bad: dict[tuple[int, int], bool]) -> tuple[Tensor, ...]:
    """A batch in which some log-probs overflow; bad: (row, column) → is it masked?"""
    torch.manual_seed(0)
    logps, mask = -torch.rand(rows, columns) - 0.1, torch.ones(rows, columns)
    for (row, column), masked in bad.items():
        logps[row, column] = -200.0
        mask[row, column] = 0.0 if masked else 1.0
    return logps.requires_grad_(), -torch.rand(rows, columns) - 0.1, torch.randn(rows), mask


def replayed(args: tuple[Tensor, ...], function: Callable[..., Tensor] = loss) -> Replay:
    recorded = record(function, *args)
    return replay(Snapshot(1, 0, recorded.program, recorded.tensors, recorded.loss, {}, Reached()))


def map_of(args: tuple[Tensor, ...], fix: str | None = "mask_before_op", function: Callable[..., Tensor] = loss) -> TokenMap:
    found = tokens_of(replayed(args, function), fix)
    assert found is not None
    return found


def track(found: TokenMap, name: str) -> Track:
    return next(one for one in found.tracks if one.name == name)


def at(found: TokenMap, one: Track, row: int, column: int, way: str = RECORDED) -> float:
    for window, cells in zip(found.windows, one.cells[way], strict=True):
        if window.row <= row < window.row + window.height and window.column <= column < window.column + window.width:
            return cells[row - window.row][0 if one.per_row else column - window.column]
    raise AssertionError("not kept")


def test_every_role_is_what_the_run_computed() -> None:
    """The log-probs, their reference, the log-ratio, the KL, the advantage of a row, and the gradient, at the origin and beside it."""
    args = batch(3, 5, {(1, 3): True})
    found = map_of(args)
    logps, ref, advantages, _ = (arg.detach() for arg in args)
    assert (found.row, found.column, found.rows, found.columns) == (1, 3, 3, 5)
    for row, column in ((1, 3), (0, 0), (2, 4)):
        assert at(found, track(found, "logps"), row, column) == float(logps[row, column])
        assert at(found, track(found, "ref_logps"), row, column) == float(ref[row, column])
        assert at(found, track(found, "advantages"), row, column) == float(advantages[row])
    assert found.tracks[found.main].name == "ref_log_ratio" and found.tracks[found.main].limit == pytest.approx(88.72, abs=0.01)
    assert at(found, track(found, "per_token_kl"), 1, 3) == math.inf


def policy_loss(old_log_prob: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(log_prob - old_log_prob)
    return (ratio * mask).sum() / mask.sum()


def rewritten(logps: Tensor, spare: Tensor, mask: Tensor) -> Tensor:
    old_log_probs = logps.detach() * 1.0
    old_log_probs[1, 3] = -120.0
    return policy_loss(old_log_probs, logps, mask)


def test_a_role_is_shown_as_the_origin_read_it() -> None:
    """Of a tensor that was written to, and has two names, not what it was before."""
    logps, spare, _, mask = batch(3, 5, {})
    found = map_of((logps, spare, mask), "clamp_exponent", rewritten)
    old = next(one for one in found.tracks if one.role == "old_log_probs")
    assert at(found, old, 1, 3) == -120.0 and at(found, old, 1, 2) == float(logps[1, 2].detach())


def gathered(logits: Tensor, input_ids: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    logps = torch.gather(logits.log_softmax(-1), 2, input_ids.unsqueeze(-1)).squeeze(-1)
    return (torch.exp(logps - old_logps) * mask).sum() / mask.sum()


def test_a_role_is_what_the_loss_reads_and_not_what_that_was_made_of() -> None:
    """Noise that was added to log-probs is none, and what was written to them later is in them, also where the origin did not read them."""

    def prepared(logps: Tensor, noise: Tensor, advantages: Tensor, completion_mask: Tensor) -> Tensor:
        old_per_token_logps = logps.detach() + 0.1 * noise
        ref_per_token_logps = logps.detach() + 0.2 * torch.full((3, 5), 0.5)
        old_per_token_logps[1, 3:] = -0.25
        ref_per_token_logps[1, 3:] = 200.0
        ratio = torch.exp(logps - old_per_token_logps)
        ref_log_ratio = ref_per_token_logps - logps
        per_token_kl = torch.exp(ref_log_ratio) - ref_log_ratio - 1
        return ((-ratio * advantages.unsqueeze(1) + 0.1 * per_token_kl) * completion_mask).sum()

    logps, noise, advantages, mask = batch(3, 5, {})
    mask[1, 3:] = 0.0
    found = map_of((logps, noise, advantages, mask), "mask_before_op", prepared)
    old, ref = (next(one for one in found.tracks if one.role == role) for role in ("old_log_probs", "ref_log_probs"))
    assert (at(found, old, 1, 4), at(found, ref, 1, 4)) == (-0.25, 200.0)


def test_token_ids_that_were_saved_are_shown_whole() -> None:
    """A person looks them up in the tokenizer; to the map they are a role as any other, without a range."""
    torch.manual_seed(0)
    ids = torch.randint(0, 200_000, (2, 4))
    ids[1, 2] = 151_643
    logits, old, mask = torch.randn(2, 4, 200_000, requires_grad=True), torch.full((2, 4), -12.0), torch.ones(2, 4)
    old[1, 2], mask[1, 2] = -150.0, 0.0
    found = map_of((logits, ids, old, mask), function=gathered)
    shown = track(found, "input_ids")
    assert shown.role == "response_ids" and shown.histogram is None and math.isnan(shown.median)
    assert [at(found, shown, row, column) for row in range(2) for column in range(4)] == ids.flatten().tolist()


def sorted_first(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    order = torch.argsort(mask, dim=1, descending=True, stable=True)
    logps, old_logps = torch.gather(logps, 1, order), torch.gather(old_logps, 1, order)
    return (torch.exp(logps - old_logps) * torch.gather(mask, 1, order)).sum() / mask.sum()


def best_first(logits: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    best = logits.topk(1, dim=-1).indices
    logps = torch.gather(logits.log_softmax(-1), -1, best).squeeze(-1)
    return (torch.exp(logps - old_logps) * mask).sum() / mask.sum()


@pytest.mark.parametrize(("function", "vocabulary"), [(sorted_first, ()), (best_first, (50,))])
def test_an_order_is_no_token_id(function: Callable[..., Tensor], vocabulary: tuple[int, ...]) -> None:
    """What a step has sorted by is an index of a gather, too, and no tokenizer knows it."""
    torch.manual_seed(0)
    logits, old, mask = (-torch.rand(2, 6, *vocabulary)).requires_grad_(), -torch.rand(2, 6), torch.ones(2, 6)
    old[1, 2], mask[1, 2] = -150.0, 0.0
    found = map_of((logits, old, mask), function=function)
    assert "response_ids" not in {track.role for track in found.tracks}


def test_the_fix_stands_beside_what_was_recorded() -> None:
    """The gradient that the log-prob would have had is there, and what a fix does not change is left out."""
    found = map_of(batch(3, 5, {(1, 3): True}))
    gradient = track(found, "gradient of logps")
    assert not math.isfinite(at(found, gradient, 1, 3)) and math.isfinite(at(found, gradient, 1, 3, "mask_before_op"))
    assert set(track(found, "logps").cells) == {RECORDED}
    assert list(found.ways)[:2] == [RECORDED, "mask_before_op"] and "clamp_exponent" in found.ways
    assert list(map_of(batch(3, 5, {(1, 3): True}), None).ways) == [RECORDED]


def test_a_variable_that_the_fix_fills_is_shown_filled() -> None:
    """What the name stands for from then on, and the gradient that goes back through it."""
    found = map_of(batch(3, 5, {(1, 3): True}))
    ratio = track(found, "ref_log_ratio")
    assert at(found, ratio, 1, 3) > 88 and at(found, ratio, 1, 3, "mask_before_op") == 0.0
    assert at(found, ratio, 0, 0, "mask_before_op") == at(found, ratio, 0, 0)


def row_means(logps: Tensor, old_logps: Tensor, advantages: Tensor, completion_mask: Tensor) -> Tensor:
    per_token = -torch.exp(logps - old_logps) * advantages.unsqueeze(1)
    per_row = (per_token * completion_mask).sum(-1) / completion_mask.sum(-1)
    return per_row.mean()


def with_empty(rows: int, columns: int, *empty: int) -> tuple[Tensor, ...]:
    """A batch in which some rows have no token that counts."""
    logps, ref, advantages, mask = batch(rows, columns, {})
    mask[list(empty)] = 0.0
    return logps, ref, advantages, mask


def test_the_first_token_of_a_row_is_not_the_token_of_its_one_number() -> None:
    """An origin is a token's where the tensor has a number for each token."""
    for found, there in ((map_of(batch(3, 5, {(1, 3): True}), None), True), (map_of(with_empty(64, 48, 57), None, row_means), False)):
        window = found.windows[0]
        cells = tuple(tuple(1e3 * (window.row + r) + window.column + c for c in range(window.width)) for r in range(window.height))
        ids = replace(found.tracks[0], role=Role.RESPONSE_IDS, per_row=False, cells={RECORDED: (cells,)})
        token = token_at_origin(replace(found, tracks=(ids,)))
        assert token == (Token(1003) if there else None)


def test_one_number_a_row_is_told_by_its_row_and_beside_its_tokens() -> None:
    """Of row 57 of 64 what its tokens were, what the mask says of them and how many it lets count; the origin is that row, and one number."""
    args = with_empty(64, 48, 57)
    found = map_of(args, "clamp_denominator", row_means)
    main = found.tracks[found.main]
    assert (found.rows, found.columns, found.row, found.column, found.layout) == (64, 48, 57, 0, Layout.ROWS)
    assert (main.name, main.per_row, main.bad, main.bad_masked) == ("per_row", True, 1, 0) and found.worst == ((57, 1, 0),)
    logps, _, advantages, mask = (arg.detach() for arg in args)
    for row, column in ((57, 0), (57, 47), (50, 3)):
        assert at(found, track(found, "logps"), row, column) == float(logps[row, column])
        assert at(found, track(found, "completion_mask"), row, column) == float(mask[row, column])
        assert at(found, track(found, "advantages"), row, column) == float(advantages[row])
        assert at(found, track(found, "counted tokens"), row, column) == float(mask[row].sum())
    assert math.isnan(at(found, main, 57, 0)) and at(found, main, 57, 0, "clamp_denominator") == 0.0
    assert sum(map(sum, found.tiles)) == 1 and found.tile_width == 48 and len(found.tiles[0]) == 1


def test_windows_of_one_number_a_row_go_where_it_is_bad() -> None:
    """Each bad row is in one of them, and no row takes all of them for its many tokens."""
    found = map_of(with_empty(200, 900, 3, 90, 190), "clamp_denominator", row_means)
    kept = {row for window in found.windows for row in range(window.row, window.row + window.height)}
    assert kept >= {3, 90, 190} and [row for row, _, _ in found.worst] == [3, 90, 190]


def test_a_row_that_the_mask_leaves_out_is_told_so() -> None:
    """A ratio of a sequence none of whose tokens counts is bad and masked; a mean of no tokens is counted."""

    def sequences(logps: Tensor, old_logps: Tensor, advantages: Tensor, completion_mask: Tensor) -> Tensor:
        seq_ratio = torch.exp((logps - old_logps).sum(-1, keepdim=True))
        return -(seq_ratio * advantages.unsqueeze(1) * completion_mask).sum() / completion_mask.sum()

    args = with_empty(8, 5, 6)
    args[1][6] = -900.0
    found = map_of(args, None, sequences)
    main = found.tracks[found.main]
    assert (found.layout, main.bad, main.bad_masked, found.worst) == (Layout.ROWS, 1, 1, ((6, 0, 1),))


def test_the_histogram_of_the_fix_is_beside_that_of_the_recording() -> None:
    """In the same bins, wherever a fix changes something, and nowhere else."""
    found = map_of(batch(3, 5, {(1, 3): True, (2, 2): False}), "clamp_exponent")
    for one in found.tracks:
        assert set(one.histograms) <= set(one.cells) - {RECORDED}
    ratio = track(found, "per_token_kl")
    recorded, fixed = ratio.histogram, ratio.histograms["clamp_exponent"]
    assert recorded is not None and (fixed.low, fixed.high) == (recorded.low, recorded.high)
    assert sum(fixed.counted) + sum(fixed.masked) == 15 == sum(recorded.counted) + sum(recorded.masked) + ratio.bad
    assert "clamp_exponent" in track(found, "gradient of logps").histograms and not track(found, "logps").histograms


def test_counts_are_of_the_whole_and_masked_apart() -> None:
    """One bad token that counts is not lost among those that do not."""
    bad = {(0, 0): True, (2, 1): True, (7, 9): False}
    found = map_of(batch(9, 11, bad))
    main = found.tracks[found.main]
    assert (main.bad, main.bad_masked) == (3, 2)
    assert found.worst[0] == (7, 1, 0) and {row for row, _, _ in found.worst} == {0, 2, 7}
    assert sum(map(sum, found.tiles)) == 3


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 300), (300, 1), (50, 130), (97, 193), (24, 64)])
def test_the_windows_hold_the_origin_and_the_tiles_the_whole(rows: int, columns: int) -> None:
    """Whatever the shape: windows lie inside, no two alike, as many as are kept, the one around the origin first."""
    row, column = rows - 1, columns - 1
    found = map_of(batch(rows, columns, {(row, column): True}) if rows * columns > 1 else batch(rows, columns, {(0, 0): False}), None)
    first = found.windows[0]
    assert first.row <= found.row < first.row + first.height and first.column <= found.column < first.column + first.width
    assert len({(w.row, w.column) for w in found.windows}) == len(found.windows) <= WINDOWS
    for window in found.windows:
        assert 0 <= window.row <= rows - window.height and 0 <= window.column <= columns - window.width
        assert window.height <= HEIGHT and window.width <= WIDTH
    assert len(found.tiles) <= TILES[0] and all(len(line) <= TILES[1] for line in found.tiles)
    assert len(found.tiles) * found.tile_height >= rows and len(found.tiles[0]) * found.tile_width >= columns
    assert sum(map(sum, found.tiles)) == found.tracks[found.main].bad == 1


def test_windows_go_where_it_is_bad() -> None:
    """A far corner in which more is bad is kept, too."""
    bad = {(0, 0): True, **{(199, 290 + n): True for n in range(8)}}
    found = map_of(batch(200, 300, bad))
    assert at(found, found.tracks[found.main], 199, 295) > 88.8


def test_ranges_and_histogram_are_of_what_is_finite() -> None:
    """The median is that of the tokens that count; every finite element is in a bin, counted or masked."""
    args = batch(6, 10, {(1, 3): True, (4, 4): True})
    found = map_of(args)
    logps, mask = args[0].detach(), args[3]
    one = track(found, "logps")
    assert one.median == pytest.approx(float(torch.quantile(logps[mask == 1].double(), 0.5)), rel=1e-6)
    assert (one.least, one.most) == (float(logps.min()), float(logps.max()))
    assert one.histogram is not None
    assert sum(one.histogram.counted) == 58 and sum(one.histogram.masked) == 2
    kl = track(found, "per_token_kl")
    assert kl.histogram is not None and sum(kl.histogram.counted) + sum(kl.histogram.masked) == 58 and math.isfinite(kl.most)


@pytest.mark.parametrize("outlier", [-9.0, -900.0, -5e4])
@pytest.mark.parametrize("name", ["logps", "ref_logps", "advantages"])
def test_an_outlier_does_not_set_the_ends(name: str, outlier: float) -> None:
    """Colours and bins go as far as what is usual; what lies beyond is counted, and what is masked is not asked."""
    logps, ref, _, mask = batch(40, 60, {(1, 3): True})
    advantages = torch.linspace(-2.0, 2.0, 40)
    with torch.no_grad():
        logps[7, 7] = ref[7, 7] = advantages[7] = outlier
    one = track(map_of((logps, ref, advantages, mask)), name)
    usual = {"logps": (-1.1, -0.1), "ref_logps": (-1.1, -0.1), "advantages": (-3.0, 3.0)}[name]
    assert usual[0] < one.ends[0] < one.ends[1] < usual[1] and one.least <= outlier
    assert one.histogram is not None and (one.histogram.low, one.histogram.high) == one.ends
    assert one.histogram.below == (2 if name == "logps" else 1) and one.histogram.above == 0
    assert sum(map(bool, one.histogram.counted)) > 10
    assert sum(one.histogram.counted) + sum(one.histogram.masked) == (40 if name == "advantages" else 2400)


def test_without_outliers_the_ends_are_the_range() -> None:
    """Nothing is cut off where nothing lies far out, nor where most of it is one number."""
    for content in (torch.linspace(-3.0, 2.0, 40), torch.tensor([0.0] * 30 + [1.0] * 10), torch.zeros(40)):
        _, ref, _, mask = batch(40, 3, {(1, 2): True})
        one = track(map_of((torch.where(mask > 0, -1.0, -200.0).requires_grad_(), ref, content, mask)), "advantages")
        assert one.ends == (one.least, one.most) == (float(content.min()), float(content.max()))


def test_no_window_is_most_of_another() -> None:
    """What is kept is not kept twice: beside the origin, with much that is bad in one block, and at an edge."""
    for bad in ({(100, 150): True}, {(100 + n, 150): True for n in range(20)}, {(0, 299): True, (1, 298): False}):
        windows = map_of(batch(200, 300, bad)).windows
        first, others = windows[0], windows[1:]
        assert len(others) == WINDOWS - 1
        unseen = [w for w in others if abs(w.row - first.row) >= first.height or abs(w.column - first.column) >= first.width]
        assert unseen == list(others) or len(bad) > 12  # a block that holds some that the first does not is kept


def test_a_scalar_has_no_map() -> None:
    """There is nothing to look around in."""

    def scalar(x: Tensor, n: Tensor) -> Tensor:
        return x.sum() / n

    assert tokens_of(replayed((torch.ones(3, requires_grad=True), torch.tensor(0.0)), scalar), None) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: Any) -> None:
    """Half precision and double are read as they are."""

    def half(x: Tensor, mask: Tensor) -> Tensor:
        return (torch.exp(x) * mask).float().sum()

    x = torch.zeros(2, 3, dtype=dtype)
    x[1, 2] = 800.0
    found = map_of((x.requires_grad_(), torch.ones(2, 3, dtype=dtype)), None, half)
    assert (found.row, found.column) == (1, 2) and found.tracks[found.main].bad == 1
