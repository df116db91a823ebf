"""NeMo-RL: rows checked against commit 7ea279ab (`algorithms/loss/loss_functions.py`, `algorithms/utils.py`); it is not on PyPI.

Notable: one class with many switches. The policy ratio is not clamped; the KL is, before and after its exp, and both clamps can be
switched off. Every mean divides by its count + 1e-8. A weight against the generation policy that is not finite becomes 0. The batch still
has its prompt columns, with token_mask 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanscope.errors import NanscopeError
from nanscope.frameworks.rows import CLAMPED, Framework, Loss, LossSite, Remedy, Settings, Term, clip, pick, roles
from nanscope.objective.bounds import OPEN, Bounds
from nanscope.objective.reduction import Guard, Masking, Over, Reduction
from nanscope.objective.settings import PER_SEQUENCE, Anchor, Correction, Estimator, Gate, Kl, KlWeight, Level, LossSettings, Ratio
from nanscope.objective.surrogates import Cispo, ImportanceSampling, Ppo, Reinforce, Surrogate

_VERSION = "7ea279ab"
_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap")
_LOSS = "nemo_rl/algorithms/loss/loss_functions.py"

_ESTIMATOR = {"k1": Estimator.K1, "k2": Estimator.K2, "k3": Estimator.K3}


@dataclass(frozen=True, slots=True)
class ClippedPG:
    """`ClippedPGLossConfig`; global_valid_toks and global_valid_seqs are arguments of the call, None counts what is here."""

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    disable_ppo_ratio: bool = False
    force_on_policy_ratio: bool = False
    use_cispo: bool = False
    sequence_level_importance_ratios: bool = False
    token_level_loss: bool = True
    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: str = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_kl_in_reward: bool = False
    use_on_policy_kl_approximation: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    global_valid_toks: float | None = None
    global_valid_seqs: float | None = None

    def settings(self) -> LossSettings:
        tokens = Reduction(Over.TOKENS, guard=Guard.EPSILON, count=self.global_valid_toks)
        rows = Reduction(Over.ROW_MEANS, guard=Guard.EPSILON, row_guard=Guard.EPSILON, count=self.global_valid_seqs)
        return LossSettings(
            surrogate=self.surrogate(),
            ratio=self.ratio(),
            correction=self.correction() if self.use_importance_sampling_correction else None,
            kl=self.kl() if self.reference_policy_kl_penalty and not self.use_kl_in_reward else None,
            reduction=tokens if self.token_level_loss else rows,
        )

    def surrogate(self) -> Surrogate:
        """Return the policy term: the switches in the order in which the framework reads them."""
        if self.force_on_policy_ratio:
            return ImportanceSampling()
        if self.disable_ppo_ratio:
            return Reinforce(twofold=True)
        band = clip(self.ratio_clip_min, self.ratio_clip_max)
        return Cispo(band) if self.use_cispo else Ppo(band, dual=self.ratio_clip_c)

    def ratio(self) -> Ratio:
        """Return the ratio; a sequence ratio needs sequence means."""
        if self.sequence_level_importance_ratios and self.token_level_loss:
            message = "sequence_level_importance_ratios=True needs token_level_loss=False, as NeMo-RL asserts"
            raise NanscopeError(message, slug="unknown-setting-value")
        if self.force_on_policy_ratio:
            return Ratio(against=Anchor.SELF)
        return replace(PER_SEQUENCE, guard=Guard.EPSILON) if self.sequence_level_importance_ratios else Ratio()

    def kl(self) -> Kl:
        """Return the KL term, algorithms/utils.py:42 (`calculate_kl`)."""

        def around(value: float | None) -> Bounds:
            return OPEN if value is None else Bounds(-value, value)

        return Kl(
            coef=self.reference_policy_kl_penalty,
            estimator=pick("reference_policy_kl_type", self.reference_policy_kl_type, _ESTIMATOR),
            clamp=around(self.kl_input_clamp_value),
            cap=around(self.kl_output_clamp_value),
            weight=KlWeight.ROLLOUT if self.use_on_policy_kl_approximation else KlWeight.SELF,
            finite=True,
        )

    def correction(self) -> Correction:
        """Return the weight against the generation policy, loss_functions.py:567-665."""
        whole = self.sequence_level_importance_ratios
        weight = Correction(
            against=Anchor.SELF if self.force_on_policy_ratio else Anchor.OLD,
            level=Level.SEQUENCE_SUM if whole else Level.TOKEN,
            mask_log_weight=Masking.MULTIPLY if whole else Masking.NONE,
            finite=True,
        )
        if self.truncated_importance_sampling_type is None or self.truncated_importance_sampling_ratio is None:
            return weight
        band = Bounds(self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio)
        geometric = Gate(band, level=Level.SEQUENCE_MEAN, guard=Guard.EPSILON, finite_first=True)
        kinds = {
            "tis": replace(weight, bounds=replace(band, low=band.low or 0.0)),
            "icepop": replace(weight, bounds=band, drop=True),
            "seq-mask-tis": replace(weight, gates=(geometric,)),
        }
        return pick("truncated_importance_sampling_type", self.truncated_importance_sampling_type, kinds)


_NO_KL: Settings = {"reference_policy_kl_penalty": 0.0}
_TIS = "truncated_importance_sampling"
_TRUNCATED: tuple[Settings, ...] = (
    {f"{_TIS}_type": "tis", f"{_TIS}_ratio": 2.0},
    {f"{_TIS}_type": "icepop", f"{_TIS}_ratio": 5.0, f"{_TIS}_ratio_min": 0.5},
    {f"{_TIS}_type": "seq-mask-tis", f"{_TIS}_ratio": 1.3, f"{_TIS}_ratio_min": 0.999},
)
_WALKED: tuple[Settings, ...] = (
    _NO_KL,
    {"kl_input_clamp_value": None},
    {"kl_input_clamp_value": None, "kl_output_clamp_value": None},
    {"reference_policy_kl_type": "k2"},
    {"reference_policy_kl_type": "k1"},
    {"use_on_policy_kl_approximation": True},
    {"ratio_clip_c": 3.0, **_NO_KL},
    {"token_level_loss": False, **_NO_KL},
    {"sequence_level_importance_ratios": True, "token_level_loss": False, **_NO_KL},
    {"use_cispo": True, "ratio_clip_max": 5.0, **_NO_KL},
    {"disable_ppo_ratio": True, **_NO_KL},
    {"force_on_policy_ratio": True, **_NO_KL},
    {"use_importance_sampling_correction": True, **_NO_KL},
    *({"use_importance_sampling_correction": True, **truncated, **_NO_KL} for truncated in _TRUNCATED),
    *CLAMPED,
)
_DROPS = "a weight of NaN or ±Inf becomes 0: with use_importance_sampling_correction the token leaves the loss without a word"


FRAMEWORK = Framework(
    name="NeMo-RL",
    package="nemo_rl",
    version=_VERSION,
    files=("nemo_rl/algorithms/",),
    options=(_LOSS, "nemo_rl/algorithms/grpo.py"),
    remedies=(
        Remedy(
            _EXP,
            "takes the ratio out of the graph and clips it, so its exp cannot overflow into the loss",
            "loss_fn.use_cispo=true",
            Term.RATIO,
        ),
        Remedy(_EXP, "ratio 1, for one update per batch of rollouts", "loss_fn.force_on_policy_ratio=true", Term.RATIO),
        Remedy(
            (*_EXP, "nan_times_zero_mask"),
            "clamps the log-ratio of the KL before exp (null switches it off)",
            "loss_fn.kl_input_clamp_value=20",
            Term.KL,
            unless=(("reference_policy_kl_penalty", 0.0),),
        ),
        Remedy(
            (*_EXP, "magnitude_overflow"),
            "clamps the KL after exp; the clamp before exp alone keeps its gradient finite",
            "loss_fn.kl_output_clamp_value=10",
            Term.KL,
            unless=(("reference_policy_kl_penalty", 0.0),),
        ),
        Remedy(
            ("seq_ratio_overflow",),
            "ratios of single tokens overflow later than those of sequences",
            "loss_fn.sequence_level_importance_ratios=false",
            Term.RATIO,
        ),
        Remedy(
            ("exp_overflow", "bad_input"),
            "leaves sequences out that trainer and generation disagree on",
            "loss_fn.truncated_importance_sampling_type=seq-mask-tis",
            Term.ROLLOUT,
        ),
        Remedy(
            ("exp_overflow", "inf_times_zero_mask", "bad_input"),
            "leaves sequences out whose log-probs differ by more than this",
            "grpo.seq_logprob_error_threshold=2",
        ),
    ),
    guards=("Megatron's rerun state machine checks loss and gradients for NaN; the DTensor path has no such check",),
    sites=(
        LossSite(
            _LOSS,
            "ClippedPGLossFn.__call__",
            roles(
                log_probs="next_token_logprobs curr_logprobs curr_logprobs_unfiltered",
                old_log_probs="prev_logprobs",
                rollout_log_probs="generation_logprobs",
                ref_log_probs="reference_policy_logprobs",
                advantages="advantages",
                mask="mask token_mask sample_mask",
                log_ratio="log_ratios seq_log_ratio_mean seq_lp_diff lp_error log_is_ratio",
                ratio="ratios ratios_clamped seq_ratio",
                kl="kl",
                is_weight="actor_importance_weights actor_importance_weights_expanded importance_weights_to_use kl_importance_weights",
                loss="loss1 loss2 loss3 clip_loss actor_loss nll_loss loss",
            ),
            "nemo_rl.clipped_pg",
            ("self",),
            (
                ("token_level_loss", "self.loss_type.value==token_level"),
                ("global_valid_toks", "global_valid_toks"),
                ("global_valid_seqs", "global_valid_seqs"),
            ),
            beside=(  # one more each than the loss has tokens, alike
                ("rollout_log_probs", "data.generation_logprobs"),
                ("old_log_probs", "data.prev_logprobs"),
                ("mask", "data.token_mask"),
            ),
        ),
        LossSite(
            "nemo_rl/algorithms/utils.py",
            "calculate_kl",
            roles(
                log_probs="logprobs",
                ref_log_probs="logprobs_reference",
                log_ratio="logr logr_clamped",
                kl="kl",
                is_weight="importance_sampling_weights",
            ),
        ),
        LossSite("nemo_rl/algorithms/utils.py", "masked_mean", roles(mask="mask")),
    ),
    losses=(Loss("nemo_rl.clipped_pg", ClippedPG, f"{_LOSS}:372", _VERSION, flaws=(_DROPS,), walked=_WALKED),),
)
