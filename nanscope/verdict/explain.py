"""The explanations: for every cause why it happens, a snippet that shows it, the same snippet mended, and what does not help.

The snippets are text, so that a report can print them and this file needs no torch. Each starts with `import torch`, runs as it stands, and
leaves a variable `loss`:

    import torch
    log_ratio = torch.tensor([0.1, 99.0], requires_grad=True)
    mask = torch.tensor([1.0, 0.0])  # the second token is padding
    ratio = torch.exp(log_ratio)  # [1.1, inf]
    loss = -(ratio * mask).sum() / mask.sum()  # inf · 0 = NaN
    loss.backward()
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

from nanscope.causes import Cause


@dataclass(frozen=True, slots=True)
class Explanation:
    """What somebody who did not write the loss needs to know about one cause.

    mechanism: why the values go wrong, in three to six sentences.
    broken:    the smallest snippet that goes wrong, at most 8 lines.
    mended:    the same snippet with the fix that suits it.
    right:     the fix classes that help, each by its id, in the order of `causes.CAUSES`.
    wrong:     what is tried often, and why it does not help.
    links:     public threads in which this cause was met; empty if none is known.
    """

    mechanism: str
    broken: str
    mended: str
    right: str
    wrong: str
    links: tuple[str, ...] = ()


def _snippet(text: str) -> str:
    """Take the indentation of this file off a snippet."""
    return dedent(text).strip() + "\n"


EXPLANATIONS: dict[Cause, Explanation] = {
    Cause.EXP_OVERFLOW: Explanation(
        mechanism=(
            "An importance ratio is the exp of a difference of two log-probabilities, and exp leaves the range of float32 and bfloat16 "
            "above 88.72 and that of float16 above 11.09. A difference of that size needs no broken model: one token with a stale, badly "
            "logged or badly matched log-probability of −95 is enough. The token counts, so the loss is infinite. The derivative of exp is "
            "exp itself, so the gradient of this token is infinite as well, and softmax turns it into NaN for its whole row of logits."
        ),
        broken=_snippet("""
            import torch
            log_probs = torch.tensor([-2.0, -3.0], requires_grad=True)
            old_log_probs = torch.tensor([-2.0, -95.0])  # the second one is stale
            ratio = torch.exp(log_probs - old_log_probs)  # exp(92) = inf
            loss = -ratio.mean()
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            log_probs = torch.tensor([-2.0, -3.0], requires_grad=True)
            old_log_probs = torch.tensor([-2.0, -95.0])  # the second one is stale
            ratio = torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0))  # clamp before exp
            loss = -ratio.mean()
            loss.backward()
        """),
        right=(
            "clamp_exponent: clamp the log-ratio before exp, to ±20 for instance; a clamped token gets the gradient 0, all others keep "
            "theirs. exp(20) is still 4.9e8, so truncate or clip the ratio after that as well, and find out where the stale "
            "log-probability comes from."
        ),
        wrong=(
            "Clamping the ratio after exp makes the loss finite and the gradient NaN, because backward multiplies the 0 of the clamp by "
            "the inf of exp. nan_to_num has the same flaw. bfloat16 has the exponent range of float32 and overflows at the same place; "
            "expm1 is more accurate near 0 and has no wider range."
        ),
        links=(
            "https://github.com/PrimeIntellect-ai/prime-rl/issues/2972",
            "https://github.com/PrimeIntellect-ai/prime-rl/pull/2973",
            "https://github.com/PrimeIntellect-ai/prime-rl/pull/1329",
            "https://github.com/huggingface/trl/pull/6637",
            "https://github.com/huggingface/trl/pull/6550",
            "https://github.com/huggingface/trl/pull/5984",
            "https://github.com/NVIDIA-NeMo/RL/issues/874",
        ),
    ),
    Cause.SEQ_RATIO_OVERFLOW: Explanation(
        mechanism=(
            "The ratio of a whole sequence is the exp of the sum of its token log-ratios, so the exponent grows with the length. Sixty "
            "tokens that differ by 1.5 nat each have harmless ratios of 4.5, but their sum is 90, and exp overflows above 88.72 in float32 "
            "and bfloat16, above 11.09 in float16. A run therefore works on short answers and breaks when the answers get longer or more "
            "off-policy. The derivative of exp is its value, so the gradient of every token of that sequence is infinite too."
        ),
        broken=_snippet("""
            import torch
            log_probs = torch.full((60,), -1.0, requires_grad=True)
            old_log_probs = torch.full((60,), -2.5)
            log_ratio = (log_probs - old_log_probs).sum()  # 60 tokens · 1.5 nat = 90 nat
            loss = -torch.exp(log_ratio)
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            log_probs = torch.full((60,), -1.0, requires_grad=True)
            old_log_probs = torch.full((60,), -2.5)
            log_ratio = (log_probs - old_log_probs).sum().clamp(-20.0, 20.0)  # clamp the sum
            loss = -torch.exp(log_ratio)
            loss.backward()
        """),
        right=(
            "clamp_exponent: clamp the summed log-ratio before exp. Where the algorithm allows it, take the mean over the tokens instead "
            "of the sum, as GSPO defines its ratio; the exponent then no longer grows with the length."
        ),
        wrong=(
            "Clamping each token's log-ratio does not bound their sum: 60 tokens at a limit of 2 still make 120. Clamping or truncating "
            "the ratio after exp leaves 0 · inf = NaN in the gradient. Shorter answers only postpone it."
        ),
    ),
    Cause.INF_TIMES_ZERO_MASK: Explanation(
        mechanism=(
            "A token that does not count, padding, a prompt or a rejected sample, has no meaningful log-probabilities, so its log-ratio "
            "can be anything, and exp overflows above 88.72 in float32 and bfloat16 and above 11.09 in float16. The mask is applied by "
            "multiplication afterwards. In floating point inf · 0 is not 0 but NaN, so the mask turns a value that nobody wanted into one "
            "that nobody can remove. The sum over the tokens spreads it to the loss."
        ),
        broken=_snippet("""
            import torch
            log_ratio = torch.tensor([0.1, 99.0], requires_grad=True)
            mask = torch.tensor([1.0, 0.0])  # the second token is padding
            ratio = torch.exp(log_ratio)  # [1.1, inf]
            loss = -(ratio * mask).sum() / mask.sum()  # inf · 0 = NaN
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            log_ratio = torch.tensor([0.1, 99.0], requires_grad=True)
            mask = torch.tensor([1.0, 0.0])  # the second token is padding
            ratio = torch.exp(log_ratio.masked_fill(mask == 0, 0.0))  # the mask comes first
            loss = -(ratio * mask).sum() / mask.sum()
            loss.backward()
        """),
        right=(
            "mask_before_op: fill the log-ratio with 0 where the mask is 0, before exp sees it; the ratio is 1 there and the mask removes "
            "it. "
            "clamp_exponent: clamp the log-ratio to ±20 before exp; this also protects the tokens that count. "
            "finite_mask_fill: where the infinity is a log-probability or a mask that was written on purpose, make it a large finite "
            "number."
        ),
        wrong=(
            "torch.where, masked_fill, boolean indexing or nan_to_num on the ratio or on the product repair the loss only: backward sends "
            "a zero gradient into exp, which multiplies it by inf, and the weights get NaN under a loss that looks healthy. Multiplying "
            "the log-ratio by the mask works while it is finite, and fails as soon as it is infinite or NaN itself."
        ),
        links=(
            "https://github.com/PrimeIntellect-ai/prime-rl/pull/2084",
            "https://github.com/PrimeIntellect-ai/prime-rl/pull/2085",
        ),
    ),
    Cause.NAN_TIMES_ZERO_MASK: Explanation(
        mechanism=(
            "A slot that the mask excludes holds NaN: nobody computed a log-probability, a value or a target there. The loss is formed for "
            "every slot first, so the NaN passes through the subtraction and exp. Then the mask multiplies it by 0, and NaN · 0 is NaN. "
            "One such slot is enough, since a sum that contains NaN is NaN."
        ),
        broken=_snippet("""
            import torch
            log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
            old_log_probs = torch.tensor([-1.1, torch.nan])  # nobody computed the padded one
            mask = torch.tensor([1.0, 0.0])
            log_ratio = log_probs - old_log_probs
            loss = -(torch.exp(log_ratio) * mask).sum() / mask.sum()  # NaN · 0 = NaN
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
            old_log_probs = torch.tensor([-1.1, torch.nan])  # nobody computed the padded one
            mask = torch.tensor([1.0, 0.0])
            log_ratio = (log_probs - old_log_probs).masked_fill(mask == 0, 0.0)  # the mask comes first
            loss = -(torch.exp(log_ratio) * mask).sum() / mask.sum()
            loss.backward()
        """),
        right=(
            "mask_before_op: fill the masked slots with 0 before the first op whose derivative depends on its value, here before exp; "
            "filling the stored tensor when the batch is made is better still."
        ),
        wrong=(
            "Clamping the log-ratio changes nothing, because clamp passes NaN on. torch.where or nan_to_num on the product gives a finite "
            "loss, but backward still computes 0 · NaN in exp. Multiplying earlier does not help either: NaN · 0 is NaN wherever it is "
            "done."
        ),
        links=("https://github.com/OpenRLHF/OpenRLHF/pull/1240",),
    ),
    Cause.INF_TIMES_ZERO_COEF: Explanation(
        mechanism=(
            "The ratio of a token that counts overflows, since exp is infinite above 88.72 in float32 and bfloat16 and above 11.09 in "
            "float16, and the number that multiplies it is exactly 0. In GRPO that is the normal case: when all answers to a prompt score "
            "the same, their advantages are 0. The same happens to a KL or entropy term whose coefficient is set to 0 or is still warming "
            "up. One would expect the product to be 0, but inf · 0 is NaN. The clipped branch of PPO is finite and does not help, because "
            "min and max pass NaN on."
        ),
        broken=_snippet("""
            import torch
            log_ratio = torch.tensor([0.1, 99.0], requires_grad=True)
            advantages = torch.tensor([1.0, 0.0])  # all answers to the second prompt scored the same
            ratio = torch.exp(log_ratio)  # [1.1, inf]
            loss = -(ratio * advantages).mean()  # inf · 0 = NaN
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            log_ratio = torch.tensor([0.1, 99.0], requires_grad=True)
            advantages = torch.tensor([1.0, 0.0])  # all answers to the second prompt scored the same
            ratio = torch.exp(log_ratio.clamp(-20.0, 20.0))  # [1.1, 4.9e8]
            loss = -(ratio * advantages).mean()
            loss.backward()
        """),
        right=(
            "clamp_exponent: clamp the log-ratio before exp; a finite ratio times 0 is 0 in forward and in backward. "
            "finite_mask_fill: where the infinity is a log-probability or a mask that was written on purpose, make it a large finite "
            "number. "
            "skip_disabled_term: do not compute a term whose coefficient is 0 in the settings."
        ),
        wrong=(
            "Setting the product to 0 with torch.where wherever the advantage is 0 repairs the loss and leaves 0 · inf in the gradient of "
            "exp. Adding a small number to the advantage turns the NaN into inf. Relying on a coefficient of 0 to switch a term off is the "
            "mistake itself."
        ),
        links=(
            "https://github.com/radixark/miles/pull/1363",
            "https://github.com/THUDM/slime/pull/2198",
        ),
    ),
    Cause.INF_MINUS_INF: Explanation(
        mechanism=(
            "A log-probability of −inf is legitimate: top-k, top-p and vocabulary masks give it to tokens that may not be sampled. Trouble "
            "starts when two of them are subtracted, because −inf − (−inf) has no value and is NaN. It happens when the trainer filters "
            "with its own top-k and the sampled token falls outside: new and old log-probability are then both −inf. A log-softmax written "
            "by hand does the same when it subtracts the maximum of a row that is entirely −inf, and the backward of logsumexp forms "
            "exp(−inf + inf). A float16 sum below −65504 makes such an infinity too."
        ),
        broken=_snippet("""
            import torch
            logits = torch.tensor([[2.0, 1.0], [2.0, 1.0]], requires_grad=True)
            banned = torch.tensor([False, True])  # the trainer keeps the top 1
            filtered = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
            log_probs = filtered[[0, 1], [0, 1]]  # [0, −inf]: the second row sampled the other token
            loss = -torch.exp(log_probs - log_probs.detach()).mean()  # −inf − (−inf) = NaN
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            logits = torch.tensor([[2.0, 1.0], [2.0, 1.0]], requires_grad=True)
            banned = torch.tensor([False, True])  # the trainer keeps the top 1
            filtered = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
            log_probs = filtered[[0, 1], [0, 1]]  # [0, −inf]: the second row sampled the other token
            log_probs = log_probs[log_probs.isfinite()]  # leave it out before subtracting
            loss = -torch.exp(log_probs - log_probs.detach()).mean()
            loss.backward()
        """),
        right=(
            "mask_before_op: narrow the mask to the tokens whose log-probabilities are finite, and fill or leave out the others before "
            "they are subtracted. "
            "drop_invalid_sample: drop the sample if its tokens cannot come from the policy as the trainer sees it. "
            "finite_mask_fill: mask logits with torch.finfo(dtype).min instead of −inf; the difference is then a number."
        ),
        wrong=(
            "Multiplying the difference by a mask gives NaN · 0 = NaN, and clamping passes NaN on. nan_to_num on the difference does make "
            "the step finite, but it gives the ratio 1 to a token that the policy cannot produce and hides that trainer and sampler "
            "disagree."
        ),
        links=(
            "https://github.com/NVIDIA-NeMo/RL/pull/2053",
            "https://github.com/NVIDIA-NeMo/RL/pull/4154",
            "https://github.com/NVIDIA-NeMo/RL/pull/3551",
            "https://github.com/PrimeIntellect-ai/prime-rl/pull/2601",
            "https://github.com/voidful/TextRL/issues/21",
            "https://github.com/pytorch/pytorch/issues/31829",
            "https://github.com/pytorch/pytorch/issues/49724",
        ),
    ),
    Cause.WHERE_GRAD_TRAP: Explanation(
        mechanism=(
            "torch.where, masked_fill, indexing, min, max, clamp and nan_to_num choose between values that have all been computed already. "
            "In forward the bad one is dropped and the loss is finite. In backward the dropped branch receives a gradient of 0, and the "
            "chain rule multiplies it by the derivative of the op that went wrong: inf for exp above 88.72, for log at 0, for a division "
            "by 0. 0 · inf is NaN, so the gradients are NaN under a healthy loss. PPO contains this trap: for a positive advantage min "
            "takes the clipped branch, and the infinite ratio still takes part in backward."
        ),
        broken=_snippet("""
            import torch
            log_ratio = torch.tensor([0.1, 99.0], requires_grad=True)
            keep = torch.tensor([True, False])
            ratio = torch.exp(log_ratio)  # [1.1, inf]
            loss = -torch.where(keep, ratio, 0.0).sum()  # −1.1, looks healthy
            loss.backward()  # 0 · inf = NaN
        """),
        mended=_snippet("""
            import torch
            log_ratio = torch.tensor([0.1, 99.0], requires_grad=True)
            keep = torch.tensor([True, False])
            ratio = torch.exp(torch.where(keep, log_ratio, 0.0))  # choose before exp: [1.1, 1]
            loss = -torch.where(keep, ratio, 0.0).sum()
            loss.backward()
        """),
        right=(
            "mask_before_op: put a harmless operand where the result will be dropped, before the op; the second where may stay. "
            "clamp_exponent: if the op is exp, clamp its exponent. "
            "clamp_denominator: if it is a division, keep the denominator away from 0 before dividing. "
            "stable_function: if it is a log of a sigmoid or a softmax, use logsigmoid or log_softmax. "
            "safe_softmax: if it is a softmax over a row that is entirely −inf, give that row finite scores first. "
            "clamp_input: if it is log, sqrt or acos, clamp the operand into the inside of its domain."
        ),
        wrong=(
            "Every selection after the op fails alike, torch.where, masked_fill, indexing with a boolean mask, clamp and nan_to_num, "
            "because none of them removes the op from the graph. Watching the loss does not find it: the loss is finite. Gradient clipping "
            "makes it worse, since a NaN norm turns every gradient into NaN."
        ),
        links=(
            "https://github.com/PrimeIntellect-ai/prime-rl/pull/2084",
            "https://github.com/PrimeIntellect-ai/prime-rl/pull/2085",
            "https://github.com/MakazhanAlpamys/Soup/issues/342",
            "https://github.com/MakazhanAlpamys/Soup/pull/1084",
            "https://github.com/MakazhanAlpamys/Soup/pull/994",
            "https://github.com/huggingface/trl/pull/7252",
            "https://github.com/huggingface/trl/pull/7251",
            "https://github.com/pytorch/pytorch/issues/4132",
            "https://github.com/pytorch/pytorch/issues/128796",
            "https://github.com/pytorch/pytorch/issues/36923",
        ),
    ),
    Cause.LOG_ZERO: Explanation(
        mechanism=(
            "The logarithm of 0 is −inf, and its derivative 1/x is infinite there. Probabilities reach 0 by rounding: in float32 nothing "
            "below 1.4e-45 exists, so a softmax entry 104 nat below the largest is 0, and a sigmoid computed as 1 / (1 + exp(−x)) is 0 "
            "from −89 on. At the other end, 1 − p is 0 as soon as p rounds to 1, which in bfloat16 happens above 0.998, and log1p(−p) is "
            "−inf. The sigmoid has the slope 0 there, so the gradient is inf · 0 = NaN."
        ),
        broken=_snippet("""
            import torch
            margin = torch.tensor([-120.0], requires_grad=True)
            prob = torch.sigmoid(margin)  # rounds to 0
            loss = -torch.log(prob).mean()  # inf
            loss.backward()  # inf · 0 = NaN
        """),
        mended=_snippet("""
            import torch
            margin = torch.tensor([-120.0], requires_grad=True)
            loss = -torch.nn.functional.logsigmoid(margin).mean()  # 120, one stable function
            loss.backward()
        """),
        right=(
            "stable_function: compute the logarithm without the probability: logsigmoid, log_softmax, binary_cross_entropy_with_logits, "
            "and log1mexp for log(1 − p). "
            "clamp_input: where only the probability is known, clamp it away from 0 before log, with a bound that the dtype can hold."
        ),
        wrong=(
            "nan_to_num on the logarithm gives −3.4e38 and leaves 0/0 in backward. Adding 1e-8 inside the logarithm is finite, but the "
            "gradient of the sigmoid is still 0, so the worst examples teach nothing; and in float16 1e-8 rounds to 0. Replacing only the "
            "outer log(sigmoid) does not help if an inner log1p(−p) is left."
        ),
        links=(
            "https://github.com/huggingface/trl/issues/1473",
            "https://github.com/huggingface/trl/issues/2564",
            "https://github.com/huggingface/trl/issues/3237",
            "https://github.com/axolotl-ai-cloud/axolotl/pull/3910",
            "https://github.com/deepspeedai/DeepSpeedExamples/issues/423",
            "https://github.com/deepspeedai/DeepSpeedExamples/pull/501",
        ),
    ),
    Cause.PLOGP_ZERO: Explanation(
        mechanism=(
            "Entropy and KL divergence sum p · log p, and a token that cannot be sampled adds nothing: the limit of p · log p at 0 is 0. "
            "The computer does not take limits. A suppressed token has the logit −inf, so p is 0 and log p is −inf, and 0 · (−inf) is NaN. "
            "This needs no bad data: any vocabulary mask together with an entropy bonus does it, and so does an unused expert of a router."
        ),
        broken=_snippet("""
            import torch
            logits = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
            banned = torch.tensor([False, False, True])
            log_probs = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
            loss = (log_probs.exp() * log_probs).sum()  # 0 · −inf = NaN
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            logits = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
            banned = torch.tensor([False, False, True])
            log_probs = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
            loss = (log_probs.exp() * log_probs.masked_fill(banned, 0.0)).sum()  # 0 · 0
            loss.backward()
        """),
        right=(
            "stable_function: set the log-probabilities that are −inf to 0 before the product; p is 0 there, so the sum does not change. "
            "finite_mask_fill: mask the logits with torch.finfo(dtype).min instead of −inf; torch.distributions.Categorical clamps its "
            "logits to that number for the entropy."
        ),
        wrong=(
            "nan_to_num or torch.where on the product repairs the entropy and not its gradient: backward multiplies 0 by −inf. "
            "torch.xlogy(p, p) gives 0 for the value and still NaN for the gradient, since the derivative of x · log x is infinite at 0."
        ),
        links=(
            "https://github.com/huggingface/trl/issues/7221",
            "https://github.com/huggingface/trl/pull/7224",
            "https://github.com/huggingface/trl/pull/7264",
        ),
    ),
    Cause.ZERO_DIV_ZERO: Explanation(
        mechanism=(
            "A normalisation divides by a spread, a norm or a sum that is 0, and its numerator is 0 for the same reason: 0/0 is NaN. In "
            "GRPO a group in which all answers score the same has centred rewards of 0 and a standard deviation of 0. Rescaling between "
            "minimum and maximum, a row of probabilities that is padding, a token whose experts were all dropped and a weight row of zeros "
            "behave alike. The division also has no usable derivative there, so selecting another value afterwards does not save the "
            "gradient."
        ),
        broken=_snippet("""
            import torch
            rewards = torch.tensor([1.0, 1.0])  # both answers are right
            advantages = (rewards - rewards.mean()) / rewards.std()  # 0 / 0 = NaN
            log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
            loss = -(advantages * log_probs).mean()
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            rewards = torch.tensor([1.0, 1.0])  # both answers are right
            advantages = (rewards - rewards.mean()) / rewards.std().clamp(min=1e-4)  # 0 / 1e-4 = 0
            log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
            loss = -(advantages * log_probs).mean()
            loss.backward()
        """),
        right=(
            "mask_before_op: where the rows that are 0 are masked anyway, put 1 into the denominator there, or leave the rows out, before "
            "dividing. "
            "clamp_denominator: elsewhere clamp the denominator to a bound that suits its scale, or add one; 0 divided by it is 0, which "
            "is what such a group should teach."
        ),
        wrong=(
            "An epsilon that the dtype rounds to 0 is no epsilon: in float16 that is anything below 3e-8. torch.where or nan_to_num after "
            "the division leaves 0/0 in backward wherever the denominator takes a gradient; on plain rewards it works, and hides rewards "
            "that were NaN before."
        ),
        links=(
            "https://github.com/verl-project/verl/pull/5216",
            "https://github.com/huggingface/peft/issues/2049",
            "https://github.com/huggingface/peft/pull/3237",
            "https://github.com/KohakuBlueleaf/LyCORIS/pull/166",
            "https://github.com/ray-project/ray/issues/8551",
        ),
    ),
    Cause.ZERO_DENOMINATOR: Explanation(
        mechanism=(
            "A setting or a scale that divides is 0: a temperature, the τ of a preference loss, a number of accumulation steps that "
            "integer division rounded down, a running deviation that has seen no data. Tensors do not raise on a division by 0: the result "
            "is ±inf. The next softmax subtracts inf from inf and gives NaN. It fails in the first step or for every request with that "
            "setting, not at random."
        ),
        broken=_snippet("""
            import torch
            temperature = 0.0  # greedy
            logits = torch.tensor([1.0, 2.0], requires_grad=True)
            log_probs = (logits / temperature).log_softmax(-1)  # [inf, inf] becomes [NaN, NaN]
            loss = -log_probs[0]
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            temperature = 0.7
            assert temperature > 0, "a policy gradient needs a temperature above 0"
            logits = torch.tensor([1.0, 2.0], requires_grad=True)
            log_probs = (logits / temperature).log_softmax(-1)
            loss = -log_probs[0]
            loss.backward()
        """),
        right=(
            "validate_config: refuse the setting when the run starts, or give 0 its intended meaning there, such as greedy decoding "
            "without a division. "
            "clamp_denominator: if the scale is learned or measured, clamp it to a small positive bound before dividing."
        ),
        wrong=(
            "Clamping or replacing the quotient makes it finite, but backward divides its zero gradient by 0 again, which is NaN. Adding "
            "1e-8 to the setting replaces inf by numbers around 1e8: softmax survives that, and the gradient is 1e8 times too large. A "
            "metric logged before the division looks healthy throughout."
        ),
        links=(
            "https://github.com/verl-project/verl/issues/405",
            "https://github.com/verl-project/verl/issues/2505",
            "https://github.com/vllm-project/vllm/issues/22180",
            "https://github.com/vllm-project/vllm/pull/24734",
        ),
    ),
    Cause.EMPTY_MASK_MEAN: Explanation(
        mechanism=(
            "A masked mean is a sum divided by the number of selected tokens. When a micro-batch, a row or a rank selects none, because "
            "every answer was truncated, filtered or ignored, this is 0/0 = NaN; the mean of an empty tensor is NaN for the same reason, "
            "and so is cross_entropy when every label is the ignored one. It depends on how the batch was cut, so it strikes rarely. "
            "Backward divides by the same 0 once more, so every gradient of that micro-batch is NaN."
        ),
        broken=_snippet("""
            import torch
            log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
            mask = torch.zeros(2)  # every answer of this micro-batch was truncated
            loss = -(log_probs * mask).sum() / mask.sum()  # 0 / 0 = NaN
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
            mask = torch.zeros(2)  # every answer of this micro-batch was truncated
            loss = -(log_probs * mask).sum() / mask.sum().clamp(min=1.0)  # 0 / 1 = 0
            loss.backward()
        """),
        right=(
            "clamp_denominator: divide by mask.sum().clamp(min=1); the loss and its gradient are then 0, and a mean over one token or more "
            "does not change. "
            "guard_empty: where the mean is not written by hand, use the sum of the empty selection, which is 0 and keeps the graph; every "
            "rank must still take part in backward."
        ),
        wrong=(
            "nan_to_num or torch.where on the mean repairs the logged loss and leaves 0/0 in backward, so the gradients are NaN. Skipping "
            "the micro-batch on one rank only makes the others wait for its gradients."
        ),
        links=(
            "https://github.com/NVIDIA-NeMo/RL/issues/158",
            "https://github.com/huggingface/trl/pull/3248",
            "https://github.com/verl-project/verl/pull/782",
        ),
    ),
    Cause.STD_SINGLE: Explanation(
        mechanism=(
            "torch.std and torch.var divide by n − 1 unless told otherwise. For a group of one element that is 0/0, so the result is NaN, "
            "not 0. One completion per prompt, a group whose other answers were dropped, or a last batch of one sample is enough. The "
            "centred reward is a correct 0, but 0 divided by NaN is NaN, and the advantage takes it into the loss."
        ),
        broken=_snippet("""
            import torch
            rewards = torch.tensor([[1.0], [0.0]])  # two prompts, one answer each
            std = rewards.std(dim=1, keepdim=True)  # [NaN, NaN]
            advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (std + 1e-4)
            log_probs = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
            loss = -(advantages * log_probs).mean()
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            rewards = torch.tensor([[1.0], [0.0]])  # two prompts, one answer each
            std = rewards.std(dim=1, keepdim=True) if rewards.shape[1] > 1 else torch.zeros(2, 1)
            advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (std + 1e-4)
            log_probs = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
            loss = -(advantages * log_probs).mean()
            loss.backward()
        """),
        right=(
            "guard_small_group: take 0 as the deviation of a group of one, or do not normalise it; std(correction=0) gives that 0 too, at "
            "the price of a slightly smaller deviation for all larger groups. A group of one has the advantage 0 and teaches nothing, so "
            "refuse one completion per prompt when the run starts."
        ),
        wrong=(
            "A larger epsilon does not help: NaN plus anything is NaN. clamp(min=…) does not help either, it passes NaN on. Testing for "
            "std == 0 misses it, because NaN is equal to nothing."
        ),
        links=(
            "https://github.com/ruc-datalab/DeepAnalyze/issues/116",
            "https://github.com/axolotl-ai-cloud/axolotl/pull/3353",
        ),
    ),
    Cause.SQRT_ZERO_GRAD: Explanation(
        mechanism=(
            "The square root of 0 is a good 0, but its slope 1 / (2 · √x) is infinite there. So the loss is finite and the harm is made in "
            "backward: inf times the slope of what stands under the root, which is 0 for a square, gives NaN. Distances between equal "
            "points, the root mean square of a padding row and the deviation of a perfectly balanced router all land exactly on 0. "
            "torch.norm, torch.std and torch.cdist define the slope as 0 in that case; a root written by hand, with sqrt or ** 0.5, does "
            "not."
        ),
        broken=_snippet("""
            import torch
            hidden = torch.zeros(2, requires_grad=True)
            target = torch.zeros(2)
            loss = (hidden - target).square().sum().sqrt()  # 0, looks healthy
            loss.backward()  # inf · 0 = NaN
        """),
        mended=_snippet("""
            import torch
            hidden = torch.zeros(2, requires_grad=True)
            target = torch.zeros(2)
            loss = (hidden - target).square().sum()  # the squared distance needs no root
            loss.backward()
        """),
        right=(
            "avoid_singular_op: use the square where it serves as well, a variance instead of a deviation or a squared distance, or "
            "torch.linalg.vector_norm. "
            "clamp_input: else clamp or raise what stands under the root to a small positive number, 1e-12 for instance, before the root."
        ),
        wrong=(
            "An epsilon added after the root, or a clamp on the result, comes too late: the root itself is still taken at 0. torch.where "
            "after the root multiplies 0 by inf in backward. Clipping the gradients divides by a NaN norm."
        ),
        links=("https://github.com/google-research/vmoe/pull/218",),
    ),
    Cause.SQRT_NEGATIVE: Explanation(
        mechanism=(
            "A quantity that cannot be negative in mathematics, such as the variance E[x²] − E[x]², 1 − cos² or an expanded squared "
            "distance, is computed as a difference of nearly equal numbers. float32 keeps about 7 digits, so the difference carries a "
            "rounding error of either sign. For three rewards of 0.85 it is −1.2e-7. The square root of a negative number is NaN, however "
            "small it is."
        ),
        broken=_snippet("""
            import torch
            rewards = torch.tensor([0.85, 0.85, 0.85])
            variance = rewards.square().mean() - rewards.mean().square()  # −1.2e-7 instead of 0
            advantages = (rewards - rewards.mean()) / (variance.sqrt() + 1e-4)
            log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
            loss = -(advantages * log_probs).mean()
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            rewards = torch.tensor([0.85, 0.85, 0.85])
            variance = rewards.square().mean() - rewards.mean().square()  # −1.2e-7 instead of 0
            advantages = (rewards - rewards.mean()) / (variance.clamp(min=0.0).sqrt() + 1e-4)
            log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
            loss = -(advantages * log_probs).mean()
            loss.backward()
        """),
        right=(
            "clamp_input: clamp what stands under the root to 0, or to a small positive number if it takes a gradient, since the slope of "
            "the root at 0 is infinite. Where you can, use the form that does not cancel: rewards.std(correction=0) subtracts the mean "
            "first."
        ),
        wrong=(
            "The epsilon after the root does not help, because the root is NaN already; inside the root it must be larger than the "
            "rounding error, and 1e-8 is not. nan_to_num after the root hides it, and leaves NaN in backward if the variance takes a "
            "gradient."
        ),
        links=(
            "https://github.com/NousResearch/atropos/pull/481",
            "https://github.com/NVIDIA-NeMo/RL/pull/1423",
        ),
    ),
    Cause.CANCELLATION_SPIKE: Explanation(
        mechanism=(
            "Nothing is infinite here, and the step is ruined all the same. A denominator is a difference of nearly equal numbers, such as "
            "1 − p of an almost certain answer or the spread of rewards that agree up to rounding. In float32 the spacing of numbers just "
            "below 1 is 6e-8, so what is left is a rounding error instead of 0, and dividing by it gives 1e7 and more; the gradient grows "
            "with the square. A test for NaN or inf sees nothing. The optimizer takes one huge step, or the clip shrinks everything else "
            "to nothing."
        ),
        broken=_snippet("""
            import torch
            log_prob = torch.tensor(-1e-7, requires_grad=True)  # an almost certain answer
            prob = log_prob.exp()  # 0.9999999
            odds = prob / (1 - prob)  # 1 / 1.2e-7: two bits are left of the denominator
            loss = odds
            loss.backward()  # a gradient of 7e13
        """),
        mended=_snippet("""
            import torch
            log_prob = torch.tensor(-1e-7, requires_grad=True)  # an almost certain answer
            prob = log_prob.exp()  # 0.9999999
            odds = prob / (1 - prob).clamp(min=1e-3)  # at most 1000
            loss = odds
            loss.backward()
        """),
        right=(
            "clamp_denominator: give the denominator a floor that means something on its scale, such as 1e-3 for a probability or 1e-4 for "
            "a deviation of rewards, not one that merely prevents a division by 0."
        ),
        wrong=(
            "An epsilon of 1e-8 is smaller than the rounding error and changes nothing. float64 or expm1 makes the denominator accurate "
            "and the quotient still 1e7. Clipping the gradient norm keeps the weights, but this one element then sets the direction of the "
            "whole step."
        ),
    ),
    Cause.FULLY_MASKED_SOFTMAX: Explanation(
        mechanism=(
            "Attention masks and action masks set forbidden scores to −inf, and softmax gives them 0. That works as long as a row keeps "
            "one finite score. A row that is entirely −inf, a query inside left padding, an empty answer, a state without a legal action, "
            "has no maximum to subtract: −inf − (−inf) is NaN, and the whole row of weights is NaN. Even when the row is thrown away "
            "later, the backward of softmax multiplies its zero gradient by the NaN weights."
        ),
        broken=_snippet("""
            import torch
            scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
            mask = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])  # the second query sees no key
            weights = (scores + mask).softmax(-1)  # the second row is NaN
            loss = weights[:, 0].sum()
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
            mask = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])  # the second query sees no key
            unseen = mask.isneginf().all(-1, keepdim=True)
            weights = (scores + mask.masked_fill(unseen, 0.0)).softmax(-1).masked_fill(unseen, 0.0)
            loss = weights[:, 0].sum()
            loss.backward()
        """),
        right=(
            "safe_softmax: lift the mask in rows that see nothing and set their weights to 0 afterwards, as "
            "torch.nn.functional.scaled_dot_product_attention does. "
            "finite_mask_fill: mask with torch.finfo(dtype).min instead of −inf; such a row then gets equal weights, which is harmless if "
            "nobody reads it."
        ),
        wrong=(
            "nan_to_num on the weights, or dropping the row after softmax, gives a finite loss, and the backward of softmax still makes "
            "NaN; only where the mask was applied by masked_fill does its backward happen to stop it. Clamping the weights passes NaN on."
        ),
        links=(
            "https://github.com/pytorch/pytorch/issues/41508",
            "https://github.com/pytorch/pytorch/pull/196170",
            "https://github.com/pytorch/pytorch/issues/160064",
        ),
    ),
    Cause.FP16_OVERFLOW: Explanation(
        mechanism=(
            "float16 ends at 65504: anything that rounds beyond it is inf, while float32 and bfloat16 go on to 3.4e38. Two activations of "
            "300 multiply to 90000, a score of 128 channels or a sum over a long sequence gets there with much smaller numbers, and exp "
            "gets there at 11.09. Weights and inputs can be perfectly healthy. A norm or a softmax that follows divides inf by inf or "
            "subtracts inf from inf, and from then on it is NaN."
        ),
        broken=_snippet("""
            import torch
            gate = torch.tensor([300.0], dtype=torch.float16, requires_grad=True)
            up = torch.tensor([300.0], dtype=torch.float16)
            hidden = gate * up  # 90000 > 65504: inf
            loss = hidden.mean()
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            gate = torch.tensor([300.0], dtype=torch.float16, requires_grad=True)
            up = torch.tensor([300.0], dtype=torch.float16)
            hidden = gate.float() * up.float()  # 90000
            loss = hidden.mean()
            loss.backward()
        """),
        right=(
            "upcast_fp32: compute this op, and what follows it until the values are small again, in float32; running the model in bfloat16 "
            "gives the same range with fewer digits. Where a scale is applied afterwards, as for attention scores, apply it before the "
            "product."
        ),
        wrong=(
            "Upcasting the result comes too late: inf in float16 is inf in float32. The loss scale of mixed precision does not help, it "
            "guards small gradients and leaves forward as it is. A lower learning rate does not shrink activations."
        ),
        links=(
            "https://github.com/unslothai/unsloth/pull/5092",
            "https://github.com/unslothai/unsloth-zoo/pull/600",
            "https://github.com/unslothai/unsloth/pull/5055",
        ),
    ),
    Cause.EPS_UNDERFLOW: Explanation(
        mechanism=(
            "An epsilon protects a division or a logarithm only if the dtype can hold it. The smallest float16 above 0 is 6e-8, so 1e-8 "
            "and 1e-12 round to 0 and the protected division is 0/0 again. bfloat16 holds 1e-8, but next to 1 its step is 0.004: 1 − 1e-6 "
            "is exactly 1, and log(1 − p) is −inf. The source says eps and looks safe. Adam has the same weakness: with float16 state √v + "
            "1e-8 can be 0, and the update is non-finite although loss and gradients are finite."
        ),
        broken=_snippet("""
            import torch
            rewards = torch.tensor([1.0, 1.0], dtype=torch.float16)
            std = rewards.std() + 1e-8  # still 0 in float16
            advantages = (rewards - rewards.mean()) / std  # 0 / 0 = NaN
            log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
            loss = -(advantages * log_probs).mean()
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            rewards = torch.tensor([1.0, 1.0], dtype=torch.float16).float()
            std = rewards.std() + 1e-8
            advantages = (rewards - rewards.mean()) / std  # 0 / 1e-8 = 0
            log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
            loss = -(advantages * log_probs).mean()
            loss.backward()
        """),
        right=(
            "upcast_fp32: normalise in float32, and keep the state of the optimizer in float32. "
            "representable_eps: use an epsilon that the dtype can hold where it is added: 1e-4 in float16, and 1e-2 next to 1 in bfloat16."
        ),
        wrong=(
            "A smaller epsilon makes it worse. clamp(min=1e-8) is rounded like the sum and clamps to 0. A lower learning rate does not "
            "help when the division in the optimizer fails, because it multiplies what is NaN already."
        ),
        links=(
            "https://github.com/huggingface/diffusers/pull/13316",
            "https://github.com/pytorch/pytorch/issues/41527",
            "https://github.com/deepspeedai/DeepSpeed/issues/581",
            "https://github.com/CambioML/pykoi/pull/69",
            "https://github.com/pytorch/pytorch/issues/147437",
            "https://github.com/google-deepmind/optax/issues/1754",
        ),
    ),
    Cause.MAGNITUDE_OVERFLOW: Explanation(
        mechanism=(
            "float32 and bfloat16 end at 3.4e38. A value above 1.8e19 is an ordinary number, but its square is inf, and so are long "
            "products and stacks of squared activations. Mean squared errors, norms and variances all square. The inf is therefore only "
            "the end of a story: something grew for a while, or one target was absurd, and squaring made it visible."
        ),
        broken=_snippet("""
            import torch
            values = torch.tensor([0.5, 1e20], requires_grad=True)
            returns = torch.tensor([1.0, 0.0])
            error = values - returns
            loss = error.square().mean()  # 1e40 > 3.4e38: inf
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            values = torch.tensor([0.5, 1e20], requires_grad=True)
            returns = torch.tensor([1.0, 0.0])
            error = (values - returns).clamp(-10.0, 10.0)  # clamp before the square
            loss = error.square().mean()
            loss.backward()
        """),
        right=(
            "clamp_input: bound the value before it is squared or summed, by a clamp, a Huber loss or a normalisation, and look for the "
            "first step in which it grew."
        ),
        wrong=(
            "bfloat16 does not help, it has the same range. Clamping the square makes the loss finite and teaches nothing about the value "
            "that is off, since its gradient is then 0. Dividing after the sum, as a mean does, comes too late."
        ),
    ),
    Cause.BAD_INPUT: Explanation(
        mechanism=(
            "A NaN or an inf came with the batch, on an element that counts: a log-probability from the inference engine, a reward that "
            "could not be computed, an advantage, a decoded image. The step is innocent, it only does arithmetic with what it got. "
            "Comparisons with NaN are false, so filters such as (ratio < 0.5) | (ratio > 2) let it through, and means and standard "
            "deviations spread it to the whole group. A NaN log-probability usually means that all logits of that row were NaN when the "
            "token was sampled, so the answer itself is noise."
        ),
        broken=_snippet("""
            import torch
            rollout_log_probs = torch.tensor([-1.0, torch.nan])  # both tokens count
            log_probs = torch.tensor([-1.1, -2.0], requires_grad=True)
            ratio = torch.exp(log_probs - rollout_log_probs)
            loss = -ratio.mean()
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            rollout_log_probs = torch.tensor([-1.0, torch.nan])  # both tokens count
            log_probs = torch.tensor([-1.1, -2.0], requires_grad=True)
            valid = rollout_log_probs.isfinite()  # and report the rows that fail
            ratio = torch.exp(log_probs[valid] - rollout_log_probs[valid])
            loss = -ratio.mean()
            loss.backward()
        """),
        right=(
            "reject_input: test what enters the loss with isfinite, refuse what fails with a message that names its source, and mend the "
            "source. "
            "drop_invalid_sample: if the run must go on, leave the whole sample out before any statistic is computed over the group, and "
            "count how often that happens."
        ),
        wrong=(
            "Bounds on the ratio do not catch it, because every comparison with NaN is false. clamp passes NaN on. nan_to_num trains on an "
            "invented number: the step is finite, and the broken engine or reward stays unnoticed."
        ),
        links=(
            "https://github.com/huggingface/trl/issues/6166",
            "https://github.com/huggingface/trl/pull/6693",
            "https://github.com/huggingface/trl/pull/6281",
            "https://github.com/huggingface/trl/pull/6297",
            "https://github.com/modelscope/ms-swift/issues/8123",
        ),
    ),
    Cause.UNINITIALIZED: Explanation(
        mechanism=(
            "torch.empty, empty_like and new_empty reserve memory and leave in it whatever was there before. Somebody was to fill it and "
            "did not: a key missing from the checkpoint, the tail of a buffer, an adapter matrix without an initialiser. Old bits read as "
            "numbers are often 0, sometimes huge and sometimes NaN, so the same script works on one machine, one day, one batch size, and "
            "fails on another. With torch.use_deterministic_algorithms(True) torch fills fresh memory with NaN, which makes the mistake "
            "show every time."
        ),
        broken=_snippet("""
            import torch
            torch.use_deterministic_algorithms(True)  # fresh memory is NaN, so this fails every time
            gain = torch.empty(2)  # a key that the checkpoint does not have
            torch.use_deterministic_algorithms(False)
            hidden = torch.tensor([1.0, 2.0], requires_grad=True)
            loss = (gain * hidden).sum()
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            torch.use_deterministic_algorithms(True)  # fresh memory is NaN, so this fails every time
            gain = torch.empty(2).fill_(1.0)  # written before it is read
            torch.use_deterministic_algorithms(False)
            hidden = torch.tensor([1.0, 2.0], requires_grad=True)
            loss = (gain * hidden).sum()
            loss.backward()
        """),
        right=(
            "initialise_memory: allocate with zeros, ones or full, or write every element before the first read; treat keys that a "
            "checkpoint does not have as an error, and run once with torch.use_deterministic_algorithms(True)."
        ),
        wrong=(
            "Running again until it works changes only which bits were left over. Masking the unwritten part by multiplication does not "
            "help if it holds NaN. Printing the tensor proves nothing: it may be 0 today."
        ),
        links=(
            "https://github.com/huggingface/transformers/pull/45050",
            "https://github.com/huggingface/transformers/issues/30953",
        ),
    ),
    Cause.POISONED_WEIGHTS: Explanation(
        mechanism=(
            "The weight was non-finite before this step began, so no op of this step is to blame. An earlier optimizer step wrote it from "
            "a non-finite gradient, or it came with the checkpoint. From then on every forward pass that reads it is NaN, for any batch, "
            "and every gradient is NaN, so no later step can repair it. Sampling from such a model gives the same token again and again or "
            "an error about probabilities."
        ),
        broken=_snippet("""
            import torch
            weight = torch.ones(1, requires_grad=True)
            for features in (torch.tensor([torch.nan]), torch.tensor([1.0])):  # only the first is bad
                loss = (weight * features).square().sum()
                grad = torch.autograd.grad(loss, weight)[0]
                weight.data -= 0.1 * grad
        """),
        mended=_snippet("""
            import torch
            weight = torch.ones(1, requires_grad=True)
            for features in (torch.tensor([torch.nan]), torch.tensor([1.0])):  # only the first is bad
                loss = (weight * features).square().sum()
                grad = torch.autograd.grad(loss, weight)[0]
                if grad.isfinite().all():  # the bad step is not taken
                    weight.data -= 0.1 * grad
        """),
        right=(
            "fix_upstream: go back to the last checkpoint whose weights are finite, the state of the optimizer included, and look for the "
            "cause in the step that came after it. "
            "skip_bad_step: from then on do not step on non-finite gradients, so that one bad batch cannot destroy the run."
        ),
        wrong=(
            "Changing the batch, the learning rate or the loss does not help, because the weight itself is NaN. Clipping gradients does "
            "not either: the norm is NaN. Replacing the NaN in the weight by 0 leaves the moments of Adam poisoned, and they write it "
            "again."
        ),
        links=(
            "https://github.com/verl-project/verl/issues/747",
            "https://github.com/verl-project/verl/issues/2626",
            "https://github.com/verl-project/verl/issues/637",
            "https://github.com/hiyouga/EasyR1/issues/177",
        ),
    ),
    Cause.HW_BITFLIP: Explanation(
        mechanism=(
            "A single bit of a weight changed in memory or on the way to it. In the lower bits nobody notices. The highest exponent bit of "
            "float32 or bfloat16 multiplies a number below 1 by 2^128: 0.02 becomes 6.8e36, and its square is beyond 3.4e38, hence inf. "
            "Sometimes everything stays finite and the loss jumps to 1e36. Neither the data nor the code explains it, exactly one element "
            "differs, and the same step on another machine is healthy."
        ),
        broken=_snippet("""
            import torch
            weight = torch.tensor([0.5, 0.02], requires_grad=True)
            checkpoint = weight.detach().clone()
            bits = weight.data.view(torch.int32)
            bits[1] ^= 1 << 30  # the highest exponent bit flips: 0.02 becomes 6.8e36
            loss = weight.square().sum()  # inf
            loss.backward()
        """),
        mended=_snippet("""
            import torch
            weight = torch.tensor([0.5, 0.02], requires_grad=True)
            checkpoint = weight.detach().clone()
            bits = weight.data.view(torch.int32)
            bits[1] ^= 1 << 30  # the highest exponent bit flips: 0.02 becomes 6.8e36
            weight.data.copy_(checkpoint)  # back to the last good weights
            loss = weight.square().sum()
            loss.backward()
        """),
        right=(
            "fix_upstream: load the last good checkpoint, compare the weights of the replicas to find the element, and take the device "
            "that holds the odd one out of service until its memory errors have been read."
        ),
        wrong=(
            "Clamping activations or changing the loss treats a symptom that does not come back on healthy hardware. Waiting for the "
            "optimizer to pull the weight back takes forever: at 1e37 no update is large enough to change it. Going on with the same "
            "device invites the next flip."
        ),
    ),
    Cause.INF_GRAD_NORM_CLIP: Explanation(
        mechanism=(
            "Clipping multiplies all gradients by max_norm / norm, with one norm for all parameters. If a single gradient element is "
            "infinite, the norm is inf and the factor is 0: healthy gradients become 0 and inf · 0 becomes NaN. If an element is NaN, the "
            "factor is NaN and so is every gradient. The gradients need not even be non-finite: the norm squares, so a finite 1e20 in "
            "float32, or 256 where a hand-written clip squares in float16, gives an infinite norm and an update of exactly 0. The "
            "optimizer then steps without a word."
        ),
        broken=_snippet("""
            import torch
            healthy = torch.ones(1, requires_grad=True)
            singular = torch.zeros(1, requires_grad=True)
            loss = (healthy + singular.sqrt()).sum()  # finite; the slope of the root at 0 is inf
            loss.backward()
            torch.nn.utils.clip_grad_norm_([healthy, singular], 1.0)  # 1 · 0 = 0, inf · 0 = NaN
        """),
        mended=_snippet("""
            import torch
            healthy = torch.ones(1, requires_grad=True)
            singular = torch.zeros(1, requires_grad=True)
            loss = (healthy + singular.clamp(min=1e-6).sqrt()).sum()  # the root stays away from 0
            loss.backward()
            torch.nn.utils.clip_grad_norm_([healthy, singular], 1.0)
        """),
        right=(
            "skip_bad_step: test the norm that clipping returns and do not step when it is not finite, or pass error_if_nonfinite=True; "
            "this protects the weights while you look for the gradient that is at fault. "
            "clamp_input: then mend the op that made it, here by keeping the root away from 0. "
            "upcast_fp32: if all gradients are finite and only the norm overflows in float16, compute the norm in float32."
        ),
        wrong=(
            "A smaller max_norm does not help: anything divided by inf is 0, anything divided by NaN is NaN. Clipping is no protection "
            "against non-finite gradients, it spreads them. nan_to_num on the gradients before clipping turns inf into 3.4e38, whose "
            "square is inf again."
        ),
        links=(
            "https://github.com/pytorch/pytorch/issues/46849",
            "https://github.com/pytorch/pytorch/pull/53843",
        ),
    ),
    Cause.ALLREDUCE_NAN: Explanation(
        mechanism=(
            "Data-parallel replicas average their gradients, and sometimes rewards or other statistics. An average that contains one NaN "
            "is NaN, so one replica with a bad micro-batch poisons all the others in the same step. Their own losses are finite, and so is "
            "the loss that the logging rank prints. The origin is therefore on a rank that nobody looks at, and it is one of the ordinary "
            "causes, such as a mask that selects nothing there."
        ),
        broken=_snippet("""
            import torch
            weight = torch.ones(1, requires_grad=True)
            masks = torch.tensor([[1.0, 1.0], [0.0, 0.0]])  # two replicas; the second got no tokens
            losses = [(weight * mask).sum() / mask.sum() for mask in masks]  # [1, NaN]
            grads = [torch.autograd.grad(loss, weight)[0] for loss in losses]
            weight.grad = torch.stack(grads).mean(0)  # what an all-reduce does: (1 + NaN) / 2
            loss = losses[0]  # what rank 0 logs: 1
        """),
        mended=_snippet("""
            import torch
            weight = torch.ones(1, requires_grad=True)
            masks = torch.tensor([[1.0, 1.0], [0.0, 0.0]])  # two replicas; the second got no tokens
            losses = [(weight * mask).sum() / mask.sum().clamp(min=1.0) for mask in masks]  # [1, 0]
            grads = [torch.autograd.grad(loss, weight)[0] for loss in losses]
            weight.grad = torch.stack(grads).mean(0)
            loss = losses[0]
        """),
        right=(
            "fix_upstream: find the rank whose own loss or gradient is non-finite before the all-reduce, and mend the cause there. Let "
            "every rank evaluate the check and combine the flags with a maximum, so that all of them skip the step or none does."
        ),
        wrong=(
            "Checking the loss on rank 0 sees nothing, it is finite there. Skipping the step on the rank that found the NaN makes the "
            "replicas drift apart or wait for each other forever. nan_to_num after the all-reduce replaces everybody's gradient by 0."
        ),
        links=(
            "https://github.com/ecmwf/WeatherGenerator/pull/2718",
            "https://github.com/NVIDIA/Megatron-LM/pull/470",
        ),
    ),
}
