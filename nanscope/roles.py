"""The vocabulary: what a tensor of a policy loss means, whatever its framework calls it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


def role_words(role: str | None) -> str:
    """Return what a role means, in one line."""
    return ROLES[Role(role)].meaning if role in set(Role) else ""


class Role(StrEnum):
    """The meaning of a tensor in a training step."""

    LOG_PROBS = "log_probs"
    OLD_LOG_PROBS = "old_log_probs"
    REF_LOG_PROBS = "ref_log_probs"
    ROLLOUT_LOG_PROBS = "rollout_log_probs"
    LOG_RATIO = "log_ratio"
    RATIO = "ratio"
    IS_WEIGHT = "is_weight"
    KL = "kl"
    ENTROPY = "entropy"
    ADVANTAGES = "advantages"
    REWARDS = "rewards"
    LOSS = "loss"
    LOGITS = "logits"
    HIDDEN = "hidden"
    ATTENTION = "attention"
    ROUTER = "router"
    GRAD = "grad"
    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    MASK = "mask"
    RESPONSE_IDS = "response_ids"


LOG_PROBS = frozenset({Role.LOG_PROBS, Role.OLD_LOG_PROBS, Role.REF_LOG_PROBS, Role.ROLLOUT_LOG_PROBS})
SCORES = frozenset({Role.ADVANTAGES, Role.REWARDS})
OF_MODEL = frozenset({Role.WEIGHTS, Role.OPTIMIZER, Role.GRAD, Role.HIDDEN, Role.ROUTER, Role.ATTENTION})  # has rows of its own
_COUNTED = SCORES | {Role.MASK, Role.RESPONSE_IDS, Role.OPTIMIZER}  # what may be integers, or true and false


@dataclass(frozen=True, slots=True)
class RoleInfo:
    """How a role is written: symbol, usual shape (B rows, T response tokens, V vocabulary), unit, and one line of meaning."""

    symbol: str
    shape: str
    unit: str
    meaning: str


ROLES: dict[Role, RoleInfo] = {
    Role.LOG_PROBS: RoleInfo("ℓ", "[B, T]", "nat", "log-probability of the sampled token under the policy being trained"),
    Role.OLD_LOG_PROBS: RoleInfo("ℓ_old", "[B, T]", "nat", "the same under the policy before this batch's updates"),
    Role.REF_LOG_PROBS: RoleInfo("ℓ_ref", "[B, T]", "nat", "the same under the frozen reference model"),
    Role.ROLLOUT_LOG_PROBS: RoleInfo("ℓ_roll", "[B, T]", "nat", "the same as reported by the engine that sampled"),
    Role.LOG_RATIO: RoleInfo("Δ", "[B, T]", "nat", "difference of two log-probabilities of one token"),
    Role.RATIO: RoleInfo("r", "[B, T]", "1", "importance ratio, exp Δ"),
    Role.IS_WEIGHT: RoleInfo("ρ", "[B, T]", "1", "correction weight between trainer and rollout engine"),
    Role.KL: RoleInfo("KL", "[B, T]", "nat", "estimate of the divergence from the reference"),
    Role.ENTROPY: RoleInfo("H", "[B, T]", "nat", "entropy of the policy at a token"),
    Role.ADVANTAGES: RoleInfo("A", "[B] or [B, T]", "1", "how much better a completion was than expected"),
    Role.REWARDS: RoleInfo("R", "[B]", "1", "score of a completion"),
    Role.LOSS: RoleInfo("L", "[] or [B, T]", "1", "what is minimised, per token or reduced"),
    Role.LOGITS: RoleInfo("z", "[B, T, V]", "nat", "unnormalised log-probabilities over the vocabulary"),
    Role.HIDDEN: RoleInfo("h", "[B, T, D]", "1", "activation inside the model"),
    Role.ATTENTION: RoleInfo("a", "[B, H, T, T]", "1", "attention scores or weights"),
    Role.ROUTER: RoleInfo("g", "[B, T, E]", "1", "mixture-of-experts routing"),
    Role.GRAD: RoleInfo("g", "of a weight", "1", "gradient"),
    Role.WEIGHTS: RoleInfo("w", "of a weight", "1", "parameter of the model"),
    Role.OPTIMIZER: RoleInfo("m, v", "of a weight", "1", "state or update of the optimizer"),
    Role.MASK: RoleInfo("m", "[B, T]", "0 or 1", "which tokens the loss counts"),
    Role.RESPONSE_IDS: RoleInfo("y", "[B, T]", "token id", "the sampled tokens"),
}


_LOGP = r"(log_?p(rob)?s?|logps|logprobs?|(?<![a-z])lps?(?![a-z]))"


def _logp_of(whose: str) -> str:
    """Log-probs in whose name one of these words stands, before or behind: `ref_logps`, `log_probs_base`, `base_action_log_probs`."""
    return rf"^(?=.*(^|_)({whose})(_|$)).*{_LOGP}"


_ATTACKED = r"(x|data|delta|emb(ed(ding)?)?s?|examples?|images?|imgs?|inputs?|noise|pert\w*|samples?)"

# Names as people write them, first match wins. A name is matched on its last word: `inputs["ref_logps"]` is `ref_logps`.
_PATTERNS: tuple[tuple[str, Role | None], ...] = (
    (r"(^|_)(aspect|clip|compression|drop|hit|keep|mask(ing)?|mlp|noise|trust|win)_ratios?$", None),  # of no probabilities
    (r"(^|_)adv(ersarial)?_loss|loss_adv", Role.LOSS),  # of an adversary
    (rf"(^|_)(adv_{_ATTACKED}|{_ATTACKED}_adv)($|_)", Role.HIDDEN),  # what an adversary makes of it
    (r"scores?_?(match|fn|func|net|model)|denois", Role.HIDDEN),  # of a generative model: the gradient of its log-density
    (r"(^|_)(cosine|dice|f\d|f_?beta|[cdg]?iou|jaccard|similarity|tversky)_(coef\w*|index|scores?)($|_)", None),  # how much two overlap
    (r"response_ids|completion_ids|response_tokens", Role.RESPONSE_IDS),
    (r"(mask$|_mask_|masks$|^keep|keep_|^(is_)?valid(_tokens)?$)", Role.MASK),
    (rf"{_LOGP}_?(diff|delta|gap)|(diff|delta)_(\w+_)?{_LOGP}", Role.LOG_RATIO),
    (r"((^|_)log_(\w+_)?(ratios?|weights?|rho)|logratio|^logr$|neg(ative)?_approx_kl)", Role.LOG_RATIO),
    (r"^(ppo_kl|approx_kl)$", Role.LOG_RATIO),
    (_logp_of(r"ref(erence)?(log\w*?)?|base|frozen"), Role.REF_LOG_PROBS),
    (_LOGP + r"ref|^ref$", Role.REF_LOG_PROBS),
    (
        r"(rollout|inference|sampling|sampler|generation|generator|engine|vllm|sglang|infer|actor_worker|serving).*" + _LOGP,
        Role.ROLLOUT_LOG_PROBS,
    ),
    (_logp_of(r"rollout|inference|sampler|generation|generator|engine|vllm|sglang|infer|serving"), Role.ROLLOUT_LOG_PROBS),
    (_logp_of(r"old\w*?|prev\w*?|behav\w*?|prox\w*?"), Role.OLD_LOG_PROBS),
    (_LOGP + r"old|^old$", Role.OLD_LOG_PROBS),
    (
        r"(is_weight|is_ratio|^(token|seq|sequence)_is$|importance_sampling_ratio|(importance|imp)_(sampling_)?weight|^(tis|icepop|mis)$|tis_|rhos?$|(^|_)priorit(y|ies)($|_)|propensity)",
        Role.IS_WEIGHT,
    ),
    (r"(^|_)(ratios?|coef_1|coef_2|importance_ratio|is_ratio)($|_)|^coef$", Role.RATIO),
    (r"(^|_)(kl|k1|k2|k3|kld|kl_div|kls)($|_)", Role.KL),
    (r"cross_entropy", Role.LOSS),
    (r"entrop|(^|_)p_?log_?p($|_)", Role.ENTROPY),
    (r"(^|_)adv(antages?)?($|_)", Role.ADVANTAGES),
    (r"(attn|attention)", Role.ATTENTION),
    (r"(reward|score|return)s?|(^|_)rews?($|_)", Role.REWARDS),
    (r"(logits?)", Role.LOGITS),
    (_LOGP + r"|(^|_)(log_?q|log_?(abs_?)?det|ldj)($|_)|(^|_)(density|densities|likelihoods?)($|_)", Role.LOG_PROBS),
    (r"(^|_)(router|gates?(?!d)|gating|expert|load_balanc|aux_loss)|^load$|imbalance", Role.ROUTER),
    (
        r"(hidden|activation|embed|latents?($|_)|(^|_)(t?emb|feat(ure)?s?|obs(ervations?)?|pixel_values|images?|coords?|x_?[0t])($|_))",
        Role.HIDDEN,
    ),
    (r"loss(es)?|(^|_)(nll|b?ce|mse|elbo)($|_)", Role.LOSS),
    (r"(^|_)grad", Role.GRAD),
)

_COMPILED = tuple((re.compile(pattern), role) for pattern, role in _PATTERNS)


_HUMP = re.compile(
    r"(?<=[a-z\d])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z]{2})|(?<=[A-Z])(?=[A-Z][a-z])"
)  # `AdaptiveKLController`: adaptive, KL, controller
_DOTTED = re.compile(r"[\w.]+")  # the path of a weight, `layers.0.weight`
_LONGEST = 500  # characters of an expression that is taken apart
_SAME_THING = {"unsqueeze", "squeeze", "view", "reshape", "float", "to", "detach", "expand", "bool", "int", "long", "clone", "contiguous"}


@lru_cache(maxsize=4096)
def last_word(name: str) -> str:
    """Return what a source expression calls the thing: `inputs["old_logps"]`, `self.old_logps` and `old_logps` are all `old_logps`.

    What has no name, such as the result of a call, is called as it is written.
    """
    text = name.strip()
    if len(text) > _LONGEST:
        return text
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text.rsplit(".", 1)[-1] if _DOTTED.fullmatch(text) else text
    while True:
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Subscript(slice=ast.Constant(value=str(word))):
                return word
            case ast.Subscript(value=inner):
                node = inner
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in _SAME_THING:
                node = inner
            case _:
                return ast.unparse(node)


@lru_cache(maxsize=4096)
def picked_word(name: str) -> str:
    """Return the same with the index that picks a part of it: `batch["old_logps"][rows]` is `old_logps[rows]`, whose elements have other
    numbers."""
    try:
        node = ast.parse(name.strip()[:_LONGEST], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return last_word(name)
    match node:
        case ast.Subscript(slice=ast.Constant(value=str())):
            return last_word(name)
        case ast.Subscript(value=whole, slice=which):
            return f"{last_word(ast.unparse(whole))}[{ast.unparse(which)}]"
    return last_word(name)


def fitting(role: Role | None, real: bool) -> Role | None:
    """Return the role that a tensor can have: whatever its name says, integers are no log-probabilities. real: of floats."""
    return role if real or role in _COUNTED else None


def in_words(name: str) -> str:
    """Return a name with its words apart: `DuelCritic` is `duel_critic`."""
    return _HUMP.sub("_", name).lower()


@lru_cache(maxsize=4096)  # a walk asks for the same names again and again
def role_of(name: str | None) -> Role | None:
    """Return the role that a variable name tells, None if it tells none."""
    if not name:
        return None
    word = in_words(last_word(name))
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", word):
        return None
    for pattern, role in _COMPILED:
        if pattern.search(word):
            return role
    return None
