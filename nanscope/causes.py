"""The causes: every way a step goes non-finite that nanscope tells apart, and which kinds of fix answer it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why the origin is non-finite, or why it did harm."""

    EXP_OVERFLOW = "exp_overflow"
    SEQ_RATIO_OVERFLOW = "seq_ratio_overflow"
    INF_TIMES_ZERO_MASK = "inf_times_zero_mask"
    NAN_TIMES_ZERO_MASK = "nan_times_zero_mask"
    INF_TIMES_ZERO_COEF = "inf_times_zero_coef"
    INF_MINUS_INF = "inf_minus_inf"
    WHERE_GRAD_TRAP = "where_grad_trap"
    LOG_ZERO = "log_zero"
    PLOGP_ZERO = "plogp_zero"
    ZERO_DIV_ZERO = "zero_div_zero"
    ZERO_DENOMINATOR = "zero_denominator"
    EMPTY_MASK_MEAN = "empty_mask_mean"
    STD_SINGLE = "std_single"
    SQRT_ZERO_GRAD = "sqrt_zero_grad"
    SQRT_NEGATIVE = "sqrt_negative"
    OUTSIDE_DOMAIN = "outside_domain"
    CANCELLATION_SPIKE = "cancellation_spike"
    FULLY_MASKED_SOFTMAX = "fully_masked_softmax"
    FP16_OVERFLOW = "fp16_overflow"
    EPS_UNDERFLOW = "eps_underflow"
    MAGNITUDE_OVERFLOW = "magnitude_overflow"
    BAD_INPUT = "bad_input"
    UNINITIALIZED = "uninitialized"
    POISONED_WEIGHTS = "poisoned_weights"
    HW_BITFLIP = "hw_bitflip"
    INF_GRAD_NORM_CLIP = "inf_grad_norm_clip"
    ALLREDUCE_NAN = "allreduce_nan"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CauseInfo:
    """What a cause is, in one line, and the fix classes that answer it, the most natural first.

    varieties: what it is said to be where more is known of it, or it is something else of the same kind.
    """

    title: str
    fixes: tuple[str, ...]
    varieties: tuple[str, ...] = ()


CAUSES: dict[Cause, CauseInfo] = {
    Cause.EXP_OVERFLOW: CauseInfo(
        "exp overflows on a token that counts",
        ("clamp_exponent",),
        (
            "exp of an exponent far above the others",
            "a power overflows by its exponent",
            "exp overflows, where the loss does not count it",
            "exp overflows",
        ),
    ),
    Cause.SEQ_RATIO_OVERFLOW: CauseInfo(
        "exp overflows after log-ratios were summed over a sequence",
        ("clamp_exponent",),
        ("exp of log-ratios that were summed over a sequence is far above the others",),
    ),
    Cause.INF_TIMES_ZERO_MASK: CauseInfo(
        "a masked token overflows, and the mask multiplies inf by 0",
        ("mask_before_op", "clamp_exponent", "finite_mask_fill"),
        (
            "a masked token came in infinite, and the backward pass multiplies inf by 0",
            "a masked token came in infinite, and the mask multiplies inf by 0",
            "a mask is multiplied by an infinity of the code, and where it is 0 that is NaN",
            "a masked token is infinite, and the mask multiplies it by 0",
        ),
    ),
    Cause.NAN_TIMES_ZERO_MASK: CauseInfo("a masked token is NaN, and the mask multiplies it by 0", ("mask_before_op",)),
    Cause.INF_TIMES_ZERO_COEF: CauseInfo(
        "an overflow meets a factor that is exactly 0 (an advantage, a coefficient), and inf · 0 is NaN",
        ("clamp_exponent", "finite_mask_fill", "skip_disabled_term"),
        ("a number that the code gave is infinite, and inf · 0 is NaN",),
    ),
    Cause.INF_MINUS_INF: CauseInfo("two infinities are subtracted", ("mask_before_op", "drop_invalid_sample", "finite_mask_fill")),
    Cause.WHERE_GRAD_TRAP: CauseInfo(
        "forward drops the bad value, backward multiplies it by a zero gradient",
        ("mask_before_op", "clamp_exponent", "clamp_denominator", "stable_function", "safe_softmax", "finite_mask_fill", "clamp_input"),
    ),
    Cause.LOG_ZERO: CauseInfo(
        "the logarithm of 0",
        ("stable_function", "clamp_input"),
        (
            "the logarithm of a negative number",
            "the logarithm of a number so small that its gradient overflows",
            "the logarithm of a determinant that is 0",
        ),
    ),
    Cause.PLOGP_ZERO: CauseInfo("the product p · log p with p = 0 and log p = −inf", ("stable_function", "finite_mask_fill")),
    Cause.ZERO_DIV_ZERO: CauseInfo(
        "0 divided by 0",
        ("mask_before_op", "clamp_denominator"),
        (
            "a normalisation divides by the spread, or the size, of what it is given, and that is 0",
            "the gradient of a decomposition, which divides by the distance of eigenvalues, or of singular values, and that is 0",
        ),
    ),
    Cause.ZERO_DENOMINATOR: CauseInfo(
        "a division by a setting, a scale or a norm that is 0",
        ("validate_config", "clamp_denominator"),
        ("a matrix that is singular, and is divided by", "a division by a number that was computed, and is 0"),
    ),
    Cause.EMPTY_MASK_MEAN: CauseInfo("a mean over a mask that selects nothing", ("clamp_denominator", "guard_empty")),
    Cause.STD_SINGLE: CauseInfo("the standard deviation of a single element", ("guard_small_group",)),
    Cause.SQRT_ZERO_GRAD: CauseInfo(
        "the gradient of a square root at 0", ("avoid_singular_op", "clamp_input"), ("a gradient that is infinite at the end of a domain",)
    ),
    Cause.SQRT_NEGATIVE: CauseInfo(
        "the root of a negative number", ("clamp_input",), ("the root of a small negative number left by cancellation",)
    ),
    Cause.OUTSIDE_DOMAIN: CauseInfo("finite operands for which the operation, or its derivative, has no finite number", ("clamp_input",)),
    Cause.CANCELLATION_SPIKE: CauseInfo("cancellation leaves a tiny denominator", ("clamp_denominator",)),
    Cause.FULLY_MASKED_SOFTMAX: CauseInfo("softmax over a row that is entirely −inf", ("safe_softmax", "finite_mask_fill")),
    Cause.FP16_OVERFLOW: CauseInfo(
        "a value leaves the range of half precision (65504)", ("upcast_fp32",), ("a gradient leaves the range of half precision (65504)",)
    ),
    Cause.EPS_UNDERFLOW: CauseInfo(
        "an epsilon too small for the dtype rounds to 0",
        ("upcast_fp32", "representable_eps"),
        ("the epsilon of the optimizer is 0, or too small for the dtype",),
    ),
    Cause.MAGNITUDE_OVERFLOW: CauseInfo(
        "a huge finite value is squared or summed beyond the dtype's range",
        ("clamp_input", "stable_function"),
        ("a quotient of finite numbers leaves the dtype's range", "a finite value leaves the dtype's range"),
    ),
    Cause.BAD_INPUT: CauseInfo(
        "non-finite data came with the batch",
        ("reject_input", "drop_invalid_sample"),
        (
            "a setting of the optimizer is not finite",
            "a number that the code gave is beyond what its dtype can hold",
            "a number that the code gave is NaN",
            "a number that the code gave is infinite",
            "the code wrote it there",
        ),
    ),
    Cause.UNINITIALIZED: CauseInfo("memory that was never written", ("initialise_memory",)),
    Cause.POISONED_WEIGHTS: CauseInfo("a weight is non-finite, and no loss of this step made it so", ("fix_upstream",)),
    Cause.HW_BITFLIP: CauseInfo("a flipped bit in a weight", ("fix_upstream",)),
    Cause.INF_GRAD_NORM_CLIP: CauseInfo("clipping by a non-finite norm damages healthy gradients", ("skip_bad_step", "clamp_input")),
    Cause.ALLREDUCE_NAN: CauseInfo(
        "a NaN of one rank reached all of them",
        ("fix_upstream",),
        ("an infinity of one rank, or of the sum of what all gave, reached all of them",),
    ),
    Cause.UNKNOWN: CauseInfo("no rule names this", ()),
}

# Fix classes that change what a loss reads: the update of an optimizer has neither samples nor a mask.
OF_A_BATCH = frozenset(
    (
        "mask_before_op",
        "drop_invalid_sample",
        "reject_input",
        "skip_disabled_term",
        "guard_empty",
        "guard_small_group",
        "finite_mask_fill",
        "safe_softmax",
    )
)

ADVICE: dict[str, str] = {
    "mask_before_op": "fill the operand where the mask is 0, before the op; masking the result is too late for backward",
    "clamp_exponent": "clamp the exponent before exp",
    "clamp_denominator": "keep the denominator away from 0",
    "clamp_input": "keep the operand inside the domain of the op",
    "stable_function": "use the stable form of the function",
    "upcast_fp32": "compute this in float32",
    "finite_mask_fill": "mask with a large finite number instead of −inf",
    "safe_softmax": "let a fully masked row give zeros",
    "representable_eps": "use an epsilon that the dtype can hold",
    "guard_small_group": "skip the division by std for groups of one",
    "guard_empty": "skip the mean where nothing is selected",
    "drop_invalid_sample": "drop the sample that carries the bad value",
    "reject_input": "reject the batch entry before it reaches the loss, and find out who made it",
    "validate_config": "reject this setting when the run starts",
    "skip_bad_step": "do not step the optimizer on non-finite gradients",
    "initialise_memory": "write the memory before it is used",
    "avoid_singular_op": "avoid the op whose derivative is infinite there",
    "where_on_detached": "select on a detached value",
    "skip_disabled_term": "do not compute a term whose coefficient is 0",
    "fix_upstream": "go back to the step or checkpoint before; the harm was done earlier",
}

# Where the same class of fix is another thing to do.
ADVICE_AGAINST: dict[tuple[Cause, str], str] = {
    (Cause.ALLREDUCE_NAN, "fix_upstream"): "mend the rank whose own loss or gradient is not finite; on this one nothing went wrong",
}

# And where what is divided by is no setting.
ADVICE_OF_COMPUTED: dict[tuple[Cause, str], str] = {
    (Cause.ZERO_DENOMINATOR, "validate_config"): "it was computed, and may be 0: look at what it is made of before it divides",
}
