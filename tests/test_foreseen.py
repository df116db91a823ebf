"""What killed these runs could have been said before: `check`, on the failing step with ordinary numbers in it, names the line that failed."""

from __future__ import annotations

import linecache
from pathlib import Path

import new
import pytest

from nanscope.errors import NanscopeError
from nanscope.foresight.search import check
from nanscope.snapshot.file import load
from nanscope.snapshot.step import Snapshot

SCRIPTS = sorted(path for path in (Path(__file__).parent / "incidents").glob("*.py") if path.stem not in ("expected", "new"))
DAY = 24  # of so many scripts one is asked by day

UNFORESEEN = {  # whose line is not named: mostly an edge that one number alone reaches, or two tensors together, and so no push does
    "auto_round_207_half_scale_underflow",
    "bear_mmd_laplacian_bf16",
    "compose_rl_kl_target_of_zero",
    "dreamer_tanh_bijector_bf16",
    "egnn_pairwise_force_self_distance",
    "glow_tts_padded_duration_log_in_half",
    "halos_ipo_first_step",
    "hist2st_7_spot_without_neighbours",
    "lerobot_1096_beta_time_bf16",
    "liger_chunked_jsd_padded_vocab",
    "mico_angle_of_a_state_with_itself",
    "natural_gradient_solve_singular_fisher",
    "nft_implicit_negative_of_solved_prompt",
    "open_instruct_1182_reference_cache_hole",
    "rwkv_v2_time_mix_exp_of_key_in_half",
    "sdpo_softmax_rejected_underflow",
    "smp_463_dice_sums_in_half",
    "speechbrain_181_magnitude_power_half_of_padding",
    "sqrt_negative_angular_margin",
    "textpolicy_10_gtpo_collapsed_entropy",
    "transformers_10674_label_smoother_half_sum",
    "transformers_14184_warped_scores_after_eos",
    "trl_5773_nanstd_one_scored",
    "trl_ddpo_ddim_step_eta_above_one",
    "trl_minillm_gamma_pow_underflow",
    "trl_padding_free_block_mask",
    "unsloth_zoo_866_half_backward_of_norm_gain",
    "yolov5_541_ciou_alpha_of_exact_box",
    "yolox_1565_box_area_in_half",
    "zero_div_zero_dropped_token_gates",
}
SETTLED = {  # what ruined them is a shape, or a number of the code, and no number of the batch heals that; or a loop of thousands of calls
    "fla_11_rwkv6_decay_outside_log_space",
    "allreduce_nan_global_reward_mean",
    "allreduce_nan_gloo_gradient_mean",
    "blackbox_backprop_lambda_warmup_of_zero",
    "deepanalyze_116_std_of_one_generation",
    "deepspeed_chat_571_left_padded_pair",
    "dreamerv3_torch_disagreement_of_one_head",
    "evonorm_5_instance_std_of_one_pixel",
    "gemma2_final_softcap_of_zero",
    "half_gradients_of_branches_add_up",
    "openrlhf_1289_adaptive_kl_horizon",
    "openrlhf_740_prm_placeholder_never_found",
    "reformers_3_mask_times_neg_inf",
    "reward_ensemble_uwo_with_one_model",
    "rlevo_345_qr_dqn_kappa_of_zero",
    "std_single_feature_norm_batch_of_one",
    "std_single_uid_groups",
    "std_single_whiten_one_sequence",
    "torch_truncnorm_4_one_sided_policy",
    "transformers_yarn_linear_ramp_of_equal_bounds",
    "trl_1380_kto_no_kl_examples",
    "trl_dpo_alpha_divergence_zero",
    "trl_robust_dpo_label_smoothing_of_half",
    "trlx_ref_std_of_first_chunk",
    "weight_standardization_depthwise_pointwise",
    "wheatley_93_last_minibatch_of_one",
}

ASKED = [pytest.param(path, id=path.stem, marks=[] if place % DAY == 0 else pytest.mark.nightly) for place, path in enumerate(SCRIPTS)]


def text(file: str | None, line: int | None) -> str:
    """What stands in a line."""
    return linecache.getline(file or "", line or 0).strip()


def lines(snapshot: Snapshot) -> set[str]:
    """The lines that a saved loss was computed in."""
    sites = [snapshot.program.site_of(call) for call in snapshot.program.calls]
    return {text(site.file, site.line) for site in sites if site is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ASKED)
def test_the_line_that_failed_is_named_on_the_step_made_healthy(path: Path, tmp_path: Path) -> None:
    """Where that line lies in the recorded loss, and the harm is made there: not in an optimizer, and not before the step."""
    module = new.load(path)
    new.watched(module, tmp_path)
    expected = module.EXPECTED
    saved = [load(file) for file in sorted(tmp_path.glob("2*/step-*.safetensors"))[:1]]
    if not saved or expected.phase[0] not in ("forward", "backward") or not lines(saved[0]) & set(expected.line):
        pytest.skip("does not lie in a recorded loss")
    if path.stem in SETTLED:
        with pytest.raises(NanscopeError, match="stays so whatever numbers"):
            check(saved[0])
        return
    named = {text(hazard.origin.file, hazard.origin.line) for hazard in check(saved[0]).hazards}
    assert bool(named & set(expected.line)) is (path.stem not in UNFORESEEN), named
