"""The operator table: which aten operators a recorded program may hold, and how elements flow through each.

An operator that is not here is never executed from a file; where a tape meets one, its result becomes an opaque leaf. Every row is
functional and deterministic: in-place operators are recorded in their functional form, random ones never.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache


class Flow(StrEnum):
    """How an element of the result depends on the elements of the arguments."""

    POINTWISE = "pointwise"  # same index, after broadcasting
    MOVE = "move"  # copied from exactly one element
    REDUCE = "reduce"  # from all elements along the reduced dimensions
    ALONG = "along"  # from all elements along one dimension, which stays
    MATMUL = "matmul"  # from a row and a column
    MATRIX = "matrix"  # from all elements of the same matrix of a batch
    CREATE = "create"  # from no element at all
    MIX = "mix"  # from any element (no finer rule)


_TABLE: dict[Flow, str] = {
    Flow.POINTWISE: """
        abs acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
        bitwise_xor ceil celu clamp clamp_max clamp_min clone contiguous copysign cos cosh deg2rad detach digamma
        div elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac ge gelu gt hardsigmoid
        hardswish hardtanh heaviside huber_loss hypot isfinite isinf isnan isneginf isposinf le leaky_relu lerp lgamma
        lift lift_fresh log log10 log1p log2 log_sigmoid_forward logaddexp logaddexp2 logical_and logical_not logical_or
        logical_xor logit lt maximum minimum mish mse_loss mul mvlgamma nan_to_num ne neg nextafter polygamma positive
        pow reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh
        smooth_l1_loss softplus softshrink sqrt square sub tan tanh threshold trunc true_divide xlogy special_xlogy
        special_entr special_expit special_log_ndtr special_xlog1py binary_cross_entropy_with_logits _to_copy to
        bitwise_left_shift bitwise_right_shift special_erfcx special_i0""",
    Flow.MOVE: """
        _reshape_alias _unsafe_view as_strided broadcast_to cat chunk concat constant_pad_nd diag_embed diagonal
        diagonal_scatter embedding expand expand_as flatten flip gather hstack index index_copy index_fill index_put index_select
        masked_fill masked_scatter masked_select movedim narrow permute put repeat repeat_interleave reshape roll rot90
        scatter select select_scatter slice slice_scatter split split_with_sizes squeeze stack swapaxes t take
        take_along_dim tile transpose tril triu unbind unflatten unfold unsqueeze view view_as where vstack
        _unsafe_index _unsafe_index_put unsafe_split unsafe_chunk""",
    Flow.REDUCE: """
        _is_all_true _is_any_true all amax amin aminmax any argmax argmin count_nonzero linalg_vector_norm logsumexp max mean median min
        nanmean
        nanmedian nansum norm prod std std_mean sum var var_mean frobenius_norm""",
    Flow.ALONG: """
        _log_softmax _safe_softmax _softmax argsort cummax cummin cumprod cumsum log_softmax logcumsumexp softmax sort topk""",
    Flow.MATMUL: "addmm addmv baddbmm bmm dot linear matmul mm mv",
    Flow.MATRIX: """
        _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky_inverse cholesky_solve det linalg_cholesky_ex
        linalg_inv_ex linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr linalg_solve_triangular logdet
        """,
    Flow.CREATE: """
        arange eye fill full full_like linspace logspace new_full new_ones new_zeros ones ones_like scalar_tensor zeros
        zeros_like""",
    Flow.MIX: """
        diff msort prelu renorm bincount bucketize cdist
        cross_entropy_loss cumulative_trapezoid histc index_add index_reduce kl_div layer_norm native_group_norm
        native_layer_norm nll_loss nll_loss_forward nll_loss2d_forward nonzero one_hot scatter_add scatter_reduce
        searchsorted trapezoid unique_dim _unique2 equal rms_norm _fused_rms_norm linalg_norm trace
        convolution avg_pool2d _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu""",
}


FLOW: dict[str, Flow] = {name: flow for flow, names in _TABLE.items() for name in names.split()}


# Which arguments of a MOVE carry elements (the others only say where from). Everything else: argument 0.
PAYLOAD: dict[str, tuple[int, ...]] = {
    "diagonal_scatter": (0, 1),
    "index_copy": (0, 3),
    "index_fill": (0, 3),
    "index_put": (0, 2),
    "_unsafe_index_put": (0, 2),
    "masked_fill": (0, 2),
    "masked_scatter": (0, 2),
    "put": (0, 2),
    "scatter": (0, 3),
    "select_scatter": (0, 1),
    "slice_scatter": (0, 1),
    "where": (1, 2),
}


def _family(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Results that say "which", never "how much": they carry no harm forward and no gradient backward.
SELECTORS = _family("""
    _is_all_true _is_any_true all any argmax argmin argsort bitwise_not bucketize count_nonzero eq equal ge gt isfinite isinf isnan isneginf
    isposinf le
    logical_and logical_not logical_or logical_xor lt ne nonzero one_hot searchsorted signbit""")


# Their second result says which, too.
RANKINGS = _family("cummax cummin max median min nanmedian sort topk")


# Of these that and which stands where: their positions are an order, and nothing that was picked.
ORDERS = _family("argsort sort topk")


# What says of each element whether it is a number; so does a comparison with itself.
CHECKS = _family("isfinite isinf isnan")
EQUALITIES = _family("eq ne")
NEGATIONS = _family("bitwise_not logical_not")
COMPARISONS = EQUALITIES | _family("ge gt le lt")

# The same elements, at most in another dtype.
COPIES = _family("_to_copy alias clone contiguous detach lift lift_fresh")

# From here on: what an operator does to numbers. Walks, names, rules and edits ask these families; nobody else lists operators.

# One number in, one out.
EXPONENTIALS = _family("exp exp2 expm1")
SHARED_OUT = _family("exp pow")  # what is divided by its own sum to be a distribution
NATURAL_EXPONENTIALS = _family("exp expm1")  # of e: the operand is in nats
LOGARITHMS = _family("log log10 log1p log2 xlogy")
NATURAL_LOGARITHMS = _family("log log1p")
GAMMAS = _family("digamma lgamma polygamma")  # infinite at 0, and at every whole number below
POWERS = _family("pow rsqrt sqrt")  # NaN for a negative number
DOMAINS = POWERS | _family("acos acosh asin atanh log log10 log1p log2")  # NaN outside of their domain
TAKEN_OF = {"xlogy": 1}  # which argument a logarithm is taken of, if not the first
CLAMPABLE = POWERS | LOGARITHMS | GAMMAS | _family("acos acosh asin atanh erfinv logit square")  # saved by a bound of the operand
EVERYWHERE = EXPONENTIALS | _family("abs add mul rsub sqrt sub square")  # a number, or an infinity, of any finite operands
ROUNDED_DIVISIONS = _family("floor_divide fmod remainder")
SQUARES = _family("pow square")
EXPONENTS = {"pow": None, "sqrt": 0.5, "rsqrt": -0.5, "square": 2.0, "reciprocal": -1.0}  # None: the second argument
INVERSES = {"atanh": "tanh", "logit": "sigmoid"}  # each with what it takes back
SIGMOIDS = _family("sigmoid special_expit")
# Where these are defined; at the bounds their derivatives are not.
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-1.0, 1.0)),
    "acosh": (1.0, math.inf),
    "log1p": (-1.0, math.inf),
    "logit": (0.0, 1.0),
}
INSIDE = {name: (low + high) / 2 if high < math.inf else low + 1 for name, (low, high) in BOUNDS.items()}  # an ordinary number there
ROOTS = POWERS | _family("linalg_vector_norm norm std")  # infinite derivative where the operand, or all of it, is 0
STEEP = ROOTS | _family("acos acosh asin cdist")  # infinite derivatives anywhere
NEEDS_MORE_THAN_ZERO = _family("digamma lgamma log log2 log10 reciprocal rsqrt sqrt xlogy")
SHRINKING = _family("div pow reciprocal")  # make 0 of an infinity
CLAMPS = _family("clamp clamp_max clamp_min")
REPLACEMENTS = _family("nan_to_num nanmean nansum")  # a number takes the place of NaN

# Two numbers in, one out.
ADDITIONS = _family("add sub")
SHIFTS = ADDITIONS | _family("rsub")
DIFFERENCES = _family("rsub sub")
UNDONE_SECOND = _family("div sub")  # by 1, or 0, as the second operand alone
PRODUCTS = _family("mul")
ZERO_PRODUCTS = PRODUCTS | _family("addcmul addmm")  # where 0 · inf happens
SCALES = _family("mul neg")
RESCALINGS = _family("div mul")
COMMUTATIVE = _family("add mul")  # a number may stand first in the code and last in the call
EXTREMA = _family("fmax fmin maximum minimum")
OVERLOADED_EXTREMA = _family("max min")  # of two, or of many, as the overload says
BOUNDING = SHIFTS | CLAMPS | _family("maximum minimum")  # where an epsilon or a bound of the code stands
DIVISIONS = {"div": 1, "true_divide": 1, "addcdiv": 2, "reciprocal": 0, "rsqrt": 0}  # which argument is the divisor
QUOTIENTS = frozenset(name for name, divisor in DIVISIONS.items() if divisor)  # and the one before it is divided
DIVISORS = {**DIVISIONS, **dict.fromkeys(ROUNDED_DIVISIONS, 1), "pow": 0}  # a negative power divides by what is raised
# Of which a number of the code may be what goes wrong.
NUMBERED = QUOTIENTS | ROUNDED_DIVISIONS | SHIFTS | PRODUCTS | _family("lerp pow xlogy")
# Operands after which one by name may follow, by which one of these is scaled.
SCALED = {**dict.fromkeys(SHIFTS, 2), "addcdiv": 3, "addcmul": 3}
SCALES_OF = ("alpha", "value")

# Many numbers in.
SUMS = _family("mean sum")
TOKEN_SUMS = SUMS | _family("cumsum")
SEQUENCE_SUMS = TOKEN_SUMS | _family("index_add scatter_add")
NLL_LOSSES = _family("nll_loss2d_forward nll_loss_forward")  # read one element a row: the target's
MEANS = NLL_LOSSES | _family("mean nanmean")  # 0 / 0 over nothing
SPREADS = _family("std var")
BOTH_MOMENTS = _family("std_mean var_mean")
TOPS = _family("amax logsumexp max")  # what is subtracted before exp, for the sake of its range
CUMULATIVE = _family("cummax cummin cumprod cumsum logcumsumexp")
SOFTMAXES = _family("_softmax softmax")
LOG_SOFTMAXES = _family("_log_softmax log_softmax")
ALL_SOFTMAXES = SOFTMAXES | LOG_SOFTMAXES | _family("_safe_softmax")
SHARES = ALL_SOFTMAXES | _family("logsumexp")  # of which −inf is none
PROBABILITIES = ALL_SOFTMAXES - LOG_SOFTMAXES | SIGMOIDS  # what these give is one
OF_PROBABILITIES = CLAMPS | SUMS | _family("add neg rsub")  # what is made of one before its logarithm is taken
SPOILT_BY_INFINITY = (
    SOFTMAXES | LOG_SOFTMAXES | _family("logaddexp logaddexp2 logsumexp mul sub")
)  # and fine with a large finite number in its place
SPOILT_BY_EITHER = SPOILT_BY_INFINITY & _family("logaddexp logaddexp2 mul sub")  # of its two operands
ROW_NORMS = _family("_fused_rms_norm layer_norm native_layer_norm rms_norm")  # input, normalized_shape, weight, bias
WEIGHT_NORMS = _family("_weight_norm_interface")
# Query, key, value: softmax(q · kᵀ + mask) · v in one kernel, which has another name on another device.
ATTENTIONS = _family("""
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu""")
NORMALISATIONS = ROW_NORMS | WEIGHT_NORMS | _family("native_group_norm")  # divide by a spread, or a size, of what they are given
MEAN_LOSSES = _family("binary_cross_entropy_with_logits huber_loss mse_loss smooth_l1_loss")  # pointwise, and then put together
REGRESSIONS = MEAN_LOSSES - _family("binary_cross_entropy_with_logits")
COMPARED = SQUARES | REGRESSIONS | _family("abs")  # what is made of a difference that a loss wants small
LOGISTIC = ALL_SOFTMAXES | _family("binary_cross_entropy_with_logits cross_entropy_loss log_sigmoid_forward")  # of logits
DISTANCES = _family("cdist")
MATRIX_VECTORS = _family("addmv mv")
SIZES = ROOTS | SQUARES | SPREADS | _family("abs dot")  # what a norm or a spread is made by
TO_A_SCALE = CLAMPS | EXTREMA | POWERS | SHIFTS | RESCALINGS | _family("reciprocal")  # between it and what it rescales
BATCHED_MATMULS = _family("baddbmm bmm")
ADDED_MATMULS = _family("addmm baddbmm")  # onto argument 0
PLAIN_MATMULS = _family("bmm matmul mm")  # of two factors, and nothing else
WHOLE_PRODUCTS = _family("dot matmul")  # no finer rule than: all of both factors
UNSPLIT_PRODUCTS = WHOLE_PRODUCTS | MATRIX_VECTORS | _family("linear")

# Where finite operands have no finite result, or no finite derivative: which arguments decide.
EDGES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(EXPONENTIALS | LOGARITHMS | STEEP | SQUARES | MEANS | ALL_SOFTMAXES | frozenset(BOUNDS), (0,)),
    **dict.fromkeys(_family("cosh linalg_vector_norm logcumsumexp logsumexp prod sinh var"), (0,)),
    **dict.fromkeys(_family("atan2 cdist hypot logaddexp"), (0, 1)),
    **{name: (divisor,) for name, divisor in {**DIVISORS, **TAKEN_OF}.items()},
}

# By which large numbers become larger.
GROWING = SHIFTS | PRODUCTS | SQUARES | SEQUENCE_SUMS | SPREADS | _family("addcmul linalg_vector_norm norm prod " + _TABLE[Flow.MATMUL])

# Of matrices. What they divide by, of which 0 ruins them: see `locate.matrices`.
ALONE = _family("_linalg_det log_sigmoid_forward nll_loss_forward")  # whose further results are autograd's own
DETERMINANTS = _family("_linalg_det det")
LOG_DETERMINANTS = _family("_linalg_slogdet")
SPECTRA = _family("_linalg_eigh _linalg_svd")  # their backward divides by the distances of eigenvalues, or of squared singular values
SOLVERS = _family(  # these divide by pivots
    "_linalg_solve_ex cholesky_solve linalg_cholesky_ex linalg_inv_ex linalg_qr linalg_solve_triangular"
)
MATRIX_OF = {"cholesky_solve": 1}  # which argument is the matrix, if not the first
FACTORISED = _family(_TABLE[Flow.MATRIX])
DECOMPOSITIONS = LOG_DETERMINANTS | SPECTRA | SOLVERS

# Elements to other places.
GATHERS = _family("gather index")
JOINS = _family("cat stack")  # of a list of tensors
PICKS = _family("index masked_select")  # by a mask: a smaller tensor
MASKINGS = _family("masked_fill mul where")  # by a mask: the shape stays
CHOICES = _family("masked_fill where")
SELECTIONS = PICKS | CHOICES
# Which argument says of each element whether it is taken, or which one is.
SELECTED_BY = {"index": 1, "masked_fill": 1, "masked_select": 1, "where": 0, **dict.fromkeys(NLL_LOSSES, 1)}
EXPANSIONS = _family("broadcast_to expand")
SQUEEZES = _family("squeeze unsqueeze")
MOVES = COPIES | _family("_unsafe_view cat reshape squeeze unsqueeze view")  # tokens stay tokens
IN_ORDER = MOVES | EXPANSIONS | _family("narrow select slice split")  # and stay in their order, where there are as many as before
REARRANGINGS = (
    COPIES
    | GATHERS
    | EXPANSIONS
    | _family(  # of one tensor, and nothing is put beside its elements
        "_reshape_alias _unsafe_view diagonal flip index_select masked_select narrow permute repeat reshape select slice squeeze t "
        "take_along_dim transpose unsqueeze view"
    )
)
REORDERINGS = REARRANGINGS - IN_ORDER - _family("_reshape_alias repeat")  # other tokens stand in the place of a token
SLICES = _family("narrow slice")  # a stretch of a dimension
PICKS_OF_EACH = _family("gather take_along_dim")  # of each token one of its numbers
CUTTINGS = _family("select slice")  # a part of a dimension, by its numbers
TRANSPOSITIONS = _family("swapaxes transpose")  # of the two dimensions that arguments 1 and 2 say
RESHAPINGS = _family("_reshape_alias flatten unflatten")  # the same elements in another shape, which no argument says as a whole
SPLITS = _family("chunk split split_with_sizes unbind unsafe_chunk unsafe_split")  # one tensor in several
CARRYING = MOVES - COPIES | SQUEEZES | TRANSPOSITIONS | _family("expand flatten movedim permute t unflatten")  # the same tensor
OVERWRITING = _family("index_copy index_put masked_scatter put scatter select_scatter slice_scatter")  # a tensor with another one in a part
UP_TO_SIGN = MOVES | _family("expand neg")
WEIGHINGS = COPIES | MASKINGS | _family("_unsafe_view div neg squeeze unsqueeze view")  # between a token's loss and the sum
BEFORE_RAISED = CLAMPS | SUMS | PRODUCTS | _family("div nan_to_num neg where")  # of a log-ratio, before e is raised to it
SIZED = EXPANSIONS | _family("_unsafe_view new_full new_ones new_zeros reshape view")  # argument 1 is the size of the result
INSIDE_ROW = _family("gather index_select narrow select slice squeeze unsqueeze")  # argument 1 is a dimension
FILLS = _family("fill index_fill masked_fill")
LITERALS = FILLS | _family("full full_like lift_fresh new_full")  # put a number of the code into a tensor
SCATTERS = _family("scatter slice_scatter")  # a view that was written to is put back so into the memory that it is a part of
SETS = FILLS | SCATTERS | _family("index_put")  # put something into a part of a tensor
MOVES_OF_WRITES = _family("as_strided expand lift_fresh reshape")  # on the way there
WRITES = SETS | MOVES_OF_WRITES
ACCUMULATING = _family("_unsafe_index_put index_put put")  # add to what is there, if argument 3 says so
CONSTANT_PAYLOADS = _family("index_fill masked_fill scatter where")  # may take a number instead of a tensor
MASK_ARITHMETIC = SHIFTS | _family("_to_copy div log mul neg")  # ways to make −inf of a mask: mask.log(), (1 - mask) * -inf

# Elements out of nothing, or as many as the content says.
FLOAT_FACTORIES = _family("eye linspace logspace ones scalar_tensor zeros")  # of the default dtype where none is named
RANGES = _family("arange eye linspace logspace")  # as large as a number says

# Seen while a step runs, and for the most part in no program: the tape has to know them, and `Flow` does not.
UNWRITTEN_FACTORIES = _family("empty new_empty")  # memory that somebody has still to write
DATA_FACTORIES = UNWRITTEN_FACTORIES | _family("empty_like empty_strided normal_ rand randint randn randperm uniform_")  # a leaf is data
GRADIENT_NORMS = _family("_foreach_norm linalg_vector_norm norm")  # what a clip divides by
ASKS_EACH = _family("isinf isnan nan_to_num")  # of each element whether it is finite
ASKS_BY_ITSELF = _family("eq ne")  # so does this where a tensor is compared to itself, as `isfinite` does
SILENT = _family("_assert_async _local_scalar_dense is_nonzero is_same_size record_stream resize_ set_")  # no value comes of them
SHARED = _family("as_strided detach")  # what they give is a tensor by what it shares with another one
NOT_AGAIN = ("_foreach", "_nested", "_sparse", "empty", "rand", "to_sparse")  # what begins so is in no program, not even in memory
UNDECLARED_WRITES = "batch_norm"  # what is called so writes to what it is given, whatever its schema says
MADE_OF_PRODUCTS = _family("_trilinear")  # by calls that autocast casts, and it casts nothing before
KEPT_OPERANDS = _family("abs cos div log log10 log1p log2 mul sin")  # autograd keeps these, and not the result
BOUNDED = _family("relu sigmoid tanh")  # what they give is bad only where what they were given is
LETS_IN = _family("add fill index_fill index_put masked_fill scatter slice_scatter sub where")  # by which masks of infinities come in
OVERWRITES = _family("copy fill zero")  # writes that read nothing of what they write to, without their underscore
BATCH_NORMS = _family("_batch_norm_with_update _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm native_batch_norm")
RUNNING_STATISTICS, IN_TRAINING = (3, 4), 5  # of a batch norm: which arguments these are, and which one says that they are only written to
MASK_FREE = BATCH_NORMS | ROW_NORMS | _family(_TABLE[Flow.MATMUL]) | _family("convolution native_group_norm")  # get no mask of infinities
HISTORY_ENDS = _family("detach") | {name for name, flow in FLOW.items() if flow is Flow.CREATE and name != "fill"}  # nothing flows back

# What these make of rewards or advantages are still rewards or advantages.
SCORE_KEEPERS = SHIFTS | SUMS | SPREADS | _family("abs amax amin clamp clamp_min div log log1p max min mul sort sqrt topk where")


_SIZES = {  # which arguments say how many elements, or which: others say along which dimension
    **dict.fromkeys(_family("_unsafe_view constant_pad_nd expand repeat reshape split split_with_sizes view"), (1,)),
    **dict.fromkeys(_family("narrow slice"), (2, 3)),
    **dict.fromkeys(_family("select"), (2,)),
}
_EVERY = range(8)


@lru_cache(maxsize=4096)  # asked of every call
def sizes_of(name: str) -> Sequence[int]:
    """Return which arguments of an operator are numbers that may be others in each step of a loop, as its batches have other lengths."""
    by_number = FLOW.get(name.rstrip("_")) in (Flow.POINTWISE, Flow.CREATE)
    return _EVERY if by_number else _SIZES.get(name, ())


@lru_cache(maxsize=1024)  # asked at every turn of every walk
def base_name(op: str) -> str:
    """Return the bare operator name: `aten.exp.default` is `exp`."""
    return op.split(".")[1] if "." in op else op


def carries(op: str) -> bool:
    """Are the elements of the result those of an argument, at most in another place or dtype?"""
    return base_name(op) in COPIES or flow_of(op) is Flow.MOVE


def not_read(name: str, args: Sequence[object]) -> tuple[int, ...]:
    """Return which arguments of a call have no part in what it makes. name: of the operator, as it stands in the tables."""
    trains = name in BATCH_NORMS and (name == "_batch_norm_with_update" or (len(args) > IN_TRAINING and args[IN_TRAINING] is True))
    return RUNNING_STATISTICS if trains else ()


def flow_of(op: str) -> Flow | None:
    """Return how elements flow through `op`, None if the operator is not in the table."""
    return FLOW.get(base_name(op))
