"""Formulas of the field as their repositories write them, and what the values in them mean: `test_meanings.py` asks for each.

What is marked is text of the function, and the roles that are fair for what it makes, the best one first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Formula:
    """A loss. arguments: a letter each (see `tensor`). roles: text of an expression → roles that are fair."""

    source: str
    function: Callable[..., Tensor]
    arguments: str
    roles: dict[str, str]


SHAPES = {"p": (4, 3), "h": (4, 6), "l": (4, 3, 5), "d": (4, 3), "w": (4, 6), "m": (4, 3), "s": (), "v": (4,), "u": (4,), "i": (4, 3, 1)}


def tensor(letter: str) -> Tensor:
    """p, h, l, u: what a model makes, [B, T], [B, D], [B, T, V] and [B]; d, w, v, s: data of the first, second and last shape, and a scalar;
    m: a mask; i: tokens."""
    shape = SHAPES[letter]
    if letter == "i":
        return torch.zeros(shape, dtype=torch.long)
    if letter == "m":
        return torch.ones(shape)
    found = torch.rand(shape) * 0.8 + 0.1
    return found.requires_grad_() if letter in "phlu" else found


FORMULAS: list[Formula] = []


def formula(source: str, arguments: str, roles: dict[str, str]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def listed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        FORMULAS.append(Formula(source, function, arguments, roles))
        return function

    return listed


# The first forty.


@formula("TRL", "pddm", {"new_logprobs - mb_logprobs": "log_ratio", "torch.exp(logprobs_diff)": "ratio", "-mb_advantage * ratio": "loss"})
def trl_ppo(new_logprobs, mb_logprobs, mb_advantage, mask):
    logprobs_diff = new_logprobs - mb_logprobs
    ratio = torch.exp(logprobs_diff)
    pg_losses = -mb_advantage * ratio
    pg_losses2 = -mb_advantage * torch.clamp(ratio, 0.8, 1.2)
    pg_loss_max = torch.max(pg_losses, pg_losses2)
    return (pg_loss_max * mask).sum() / mask.sum()


@formula(
    "TRL",
    "uuvv",
    {
        "chosen_logps - rejected_logps": "log_ratio",
        "logratios - ref_logratios": "logits log_ratio",
        "F.logsigmoid(0.1 * logits)": "loss log_probs",
    },
)
def trl_dpo(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
    logratios = chosen_logps - rejected_logps
    ref_logratios = ref_chosen_logps - ref_rejected_logps
    logits = logratios - ref_logratios
    losses = -F.logsigmoid(0.1 * logits) * 0.9 - F.logsigmoid(-0.1 * logits) * 0.1
    return losses.mean()


@formula(
    "TRL",
    "uu",
    {
        "torch.exp(policy_chosen_logps)": "log_probs",
        "torch.log1p(-torch.exp(policy_chosen_logps))": "log_probs log_ratio",
        "torch.log(sig_ratio)": "loss log_probs log_ratio ratio",
    },
)
def trl_orpo(policy_chosen_logps, policy_rejected_logps):
    policy_chosen_logps, policy_rejected_logps = -policy_chosen_logps, -policy_rejected_logps
    log_odds = (policy_chosen_logps - policy_rejected_logps) - (
        torch.log1p(-torch.exp(policy_chosen_logps)) - torch.log1p(-torch.exp(policy_rejected_logps))
    )
    sig_ratio = torch.sigmoid(log_odds)
    ratio = torch.log(sig_ratio)
    return -(0.1 * ratio).mean()


@formula(
    "TRL",
    "uuvv",
    {
        "policy_KL_logps - reference_KL_logps": "kl log_ratio",
        "1 - torch.sigmoid(0.1 * (chosen_logratios - kl))": "loss",
        "chosen_logratios - kl": "log_ratio kl rewards",
    },
)
def trl_kto(policy_chosen_logps, policy_KL_logps, reference_chosen_logps, reference_KL_logps):
    kl = (policy_KL_logps - reference_KL_logps).mean().detach().clamp(min=0)
    chosen_logratios = policy_chosen_logps - reference_chosen_logps
    chosen_losses = 1 - torch.sigmoid(0.1 * (chosen_logratios - kl))
    return chosen_losses.mean()


@formula("TRL", "pdd", {"torch.exp(ref_per_token_logps - per_token_logps)": "kl ratio", "per_token_loss * mask": "loss"})
def trl_grpo_kl(per_token_logps, ref_per_token_logps, mask):
    per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
    per_token_loss = -torch.exp(per_token_logps - per_token_logps.detach()) + 0.04 * per_token_kl
    return (per_token_loss * mask).sum() / mask.sum()


@formula(
    "TRL",
    "pd",
    {
        "rewards.std(dim=1, keepdim=True)": "rewards advantages",
        "(rewards - mean_grouped) / (std_grouped + 1e-4)": "advantages rewards",
        "std_grouped + 1e-4": "rewards advantages",
    },
)
def trl_grpo_advantages(per_token_logps, rewards):
    mean_grouped = rewards.mean(dim=1, keepdim=True)
    std_grouped = rewards.std(dim=1, keepdim=True)
    x = (rewards - mean_grouped) / (std_grouped + 1e-4)
    return -(torch.exp(per_token_logps - per_token_logps.detach()) * x).mean()


class AdaptiveKLController:
    def __init__(self, value, target, horizon):
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, current, n_steps):
        proportional_error = torch.clamp(current / self.target - 1, -0.2, 0.2)
        mult = 1 + proportional_error * n_steps / self.horizon
        self.value = self.value * mult


@formula("TRL", "ps", {"current / self.target": "kl", "proportional_error * n_steps / self.horizon": "kl"})
def trl_adaptive_controller(per_token_logps, observed):
    controller = AdaptiveKLController(0.1, 6.0, 100.0)
    controller.update(observed, 4)
    return -(per_token_logps * controller.value).mean()


@formula("verl", "pdm", {"torch.exp(kl)": "kl ratio", "ratio - kl - 1": "kl"})
def verl_low_var_kl(logprob, ref_logprob, mask):
    kl = ref_logprob - logprob
    kl = torch.clamp(kl, min=-20, max=20)
    ratio = torch.exp(kl)
    kld = (ratio - kl - 1).contiguous()
    return (torch.clamp(kld, min=-10, max=10) * mask).sum() / mask.sum()


@formula(
    "verl", "pdmv", {"torch.sum(delta * mask, dim=-1)": "log_ratio", "torch.exp(x)": "ratio", "-adv.unsqueeze(-1) * r": "loss advantages"}
)
def verl_gspo(log_prob, old_log_prob, mask, adv):
    delta = log_prob - old_log_prob
    seq = torch.sum(delta * mask, dim=-1) / mask.sum(dim=-1).clamp(min=1)
    x = log_prob - log_prob.detach() + seq.detach().unsqueeze(-1)
    x = torch.clamp(x, max=10.0)
    r = torch.exp(x)
    out = torch.maximum(-adv.unsqueeze(-1) * r, -adv.unsqueeze(-1) * r.clamp(0.8, 1.2))
    return (out * mask).sum() / mask.sum()


def entropy_from_logits(logits):
    pd = torch.nn.functional.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(pd * logits, dim=-1)


@formula("verl", "l", {"pd * logits": "entropy", "torch.logsumexp(logits, dim=-1)": "entropy log_probs logits"})
def verl_entropy(logits):
    return -0.01 * entropy_from_logits(logits).mean()


def masked_whiten(values, mask):
    mean = (values * mask).sum() / mask.sum()
    var = ((values - mean) ** 2 * mask).sum() / mask.sum()
    return (values - mean) * torch.rsqrt(var + 1e-8)


@formula(
    "verl",
    "pdm",
    {"torch.rsqrt(var + 1e-8)": "advantages rewards", "(values - mean) ** 2": "advantages rewards", "values - mean": "advantages rewards"},
)
def verl_whiten(log_prob, advantages, mask):
    advantages = masked_whiten(advantages, mask)
    return -(log_prob * advantages * mask).sum() / mask.sum()


@formula("OpenRLHF", "pdd", {"(values_clipped - returns) ** 2": "loss", "(values - returns) ** 2": "loss"})
def openrlhf_value_loss(values, old_values, returns):
    values_clipped = old_values + (values - old_values).clamp(-0.2, 0.2)
    surr1 = (values_clipped - returns) ** 2
    surr2 = (values - returns) ** 2
    return 0.5 * torch.max(surr1, surr2).mean()


@formula(
    "OpenRLHF",
    "pdd",
    {"rewards[:, t] + 0.99 * nextvalues - values[:, t]": "advantages rewards", "delta + 0.95 * lastgaelam": "advantages rewards"},
)
def openrlhf_gae(log_probs, rewards, values):
    lastgaelam, reversed_ = 0, []
    for t in reversed(range(3)):
        nextvalues = values[:, t + 1] if t < 2 else 0.0
        delta = rewards[:, t] + 0.99 * nextvalues - values[:, t]
        lastgaelam = delta + 0.95 * lastgaelam
        reversed_.append(lastgaelam)
    a = torch.stack(reversed_[::-1], dim=1)
    return -(log_probs * a).mean()


@formula(
    "CleanRL",
    "uuvvv",
    {"logratio.exp()": "ratio", "(newvalue - b_returns) ** 2": "loss", "(b_adv - b_adv.mean()) / (b_adv.std() + 1e-8)": "advantages"},
)
def cleanrl_ppo(newlogprob, newvalue, b_logprobs, b_returns, b_adv):
    logratio = newlogprob - b_logprobs
    ratio = logratio.exp()
    mb = (b_adv - b_adv.mean()) / (b_adv.std() + 1e-8)
    pg_loss = torch.max(-mb * ratio, -mb * torch.clamp(ratio, 0.8, 1.2)).mean()
    v_loss = 0.5 * ((newvalue - b_returns) ** 2).mean()
    return pg_loss + v_loss * 0.5


@formula(
    "CleanRL",
    "hhw",
    {
        "log_std.exp()": "hidden",
        "torch.log(1 - y_t.pow(2))": "log_probs",
        "(x_t - mean) ** 2 / (2 * std**2)": "log_probs",
        "mean + std * noise": "hidden",
    },
)
def cleanrl_sac_actor(mean, log_std, noise):
    std = log_std.exp()
    x_t = mean + std * noise
    y_t = torch.tanh(x_t)
    log_prob = -((x_t - mean) ** 2 / (2 * std**2)) - log_std - math.log(math.sqrt(2 * math.pi))
    log_prob -= torch.log(1 - y_t.pow(2))
    return (0.2 * log_prob.sum(1) - y_t.sum(1)).mean()


@formula("SB3", "pdddm", {"rewards + (1 - dones) * 0.99 * next_q": "rewards", "F.smooth_l1_loss(current_q, y)": "loss"})
def sb3_dqn(current_q, next_q, rewards, dones, unused):
    y = rewards + (1 - dones) * 0.99 * next_q
    return F.smooth_l1_loss(current_q, y)


@formula("tianshou", "hw", {"torch.log(curr_dist + 1e-8)": "log_probs loss", "target_dist * torch.log(curr_dist + 1e-8)": "loss log_probs"})
def tianshou_c51(out, target_dist):
    curr_dist = torch.softmax(out, dim=-1)
    cross = -(target_dist * torch.log(curr_dist + 1e-8)).sum(1)
    return cross.mean()


@formula("tianshou", "hwv", {"(target - curr).abs()": "loss", "u * (tau - (target - curr < 0).float()).abs()": "loss"})
def tianshou_qrdqn(curr, target, weight):
    tau = torch.linspace(0.1, 0.9, 6)
    u = (target - curr).abs()
    huber = (u * (tau - (target - curr < 0).float()).abs()).sum(-1)
    return (huber * weight).mean()


@formula("AWAC", "udd", {"torch.exp(adv / 0.3)": "is_weight advantages", "adv / 0.3": "advantages"})
def awac_actor(log_pi, q, v):
    adv = (q - v).mean(-1)
    w = torch.exp(adv / 0.3).clamp(max=100.0)
    return -(w * log_pi).mean()


@formula("rl_games", "hhwvv", {"torch.exp(old_neglogp - neglogp)": "ratio", "((x - mean) / std) ** 2": "log_probs"})
def rl_games_ppo(mean, logstd, x, old_neglogp, advantage):
    std = torch.exp(logstd)
    neglogp = 0.5 * (((x - mean) / std) ** 2).sum(dim=-1) + 0.5 * math.log(2.0 * math.pi) * 6 + logstd.sum(dim=-1)
    r = torch.exp(old_neglogp - neglogp)
    return torch.max(-advantage * r, -advantage * r.clamp(0.8, 1.2)).mean()


def policy_kl(p0_mu, p0_sigma, p1_mu, p1_sigma):
    c1 = torch.log(p1_sigma / p0_sigma + 1e-5)
    c2 = (p0_sigma**2 + (p1_mu - p0_mu) ** 2) / (2.0 * (p1_sigma**2 + 1e-5))
    return (c1 + c2 - 0.5).sum(dim=-1)


@formula(
    "rl_games",
    "hhww",
    {"torch.log(p1_sigma / p0_sigma + 1e-5)": "kl", "(p0_sigma**2 + (p1_mu - p0_mu) ** 2) / (2.0 * (p1_sigma**2 + 1e-5))": "kl"},
)
def rl_games_kl(mu, sigma, old_mu, old_sigma):
    return policy_kl(mu, sigma, old_mu, old_sigma).mean()


@formula(
    "diffusers",
    "hwv",
    {"alphas_cumprod / (1 - alphas_cumprod)": "hidden is_weight", "torch.clamp(snr, max=5.0) / snr": "is_weight loss hidden"},
)
def diffusers_min_snr(model_pred, target, alphas_cumprod):
    snr = alphas_cumprod / (1 - alphas_cumprod)
    loss = F.mse_loss(model_pred, target, reduction="none").mean(1)
    w = torch.clamp(snr, max=5.0) / snr
    return (loss * w).mean()


@formula("diffusers", "hwwv", {"(sample - (1 - a).sqrt() * model_output) / a.sqrt()": "hidden", "(1 - a).sqrt()": "hidden"})
def diffusers_pred_original(model_output, sample, clean, alpha_prod_t):
    a = alpha_prod_t[:, None]
    pred_original_sample = (sample - (1 - a).sqrt() * model_output) / a.sqrt()
    return F.mse_loss(pred_original_sample, clean)


@formula(
    "fairseq",
    "li",
    {"lprobs.gather(dim=-1, index=target)": "log_probs loss", "lprobs.sum(dim=-1, keepdim=True)": "log_probs loss"},
)
def fairseq_label_smoothing(net_output, target):
    lprobs = F.log_softmax(net_output, dim=-1)
    nll = -lprobs.gather(dim=-1, index=target)
    smooth = -lprobs.sum(dim=-1, keepdim=True)
    return (0.9 * nll + 0.02 * smooth).mean()


@formula(
    "fairseq",
    "l",
    {
        "torch.log(avg_probs + 1e-7)": "entropy log_probs",
        "torch.sum(avg_probs * torch.log(avg_probs + 1e-7), dim=-1)": "entropy",
    },
)
def fairseq_gumbel_diversity(x):
    avg_probs = torch.softmax(x, dim=-1).mean(dim=0)
    prob_perplexity = torch.exp(-torch.sum(avg_probs * torch.log(avg_probs + 1e-7), dim=-1)).sum()
    return (15 - prob_perplexity) / 15


@formula("GAN", "uu", {"torch.log(d_real + 1e-8)": "loss log_probs", "torch.log(1 - d_fake)": "loss log_probs"})
def gan_minimax(real, fake):
    d_real, d_fake = torch.sigmoid(real), torch.sigmoid(fake)
    return -(torch.log(d_real + 1e-8) + torch.log(1 - d_fake)).mean()


@formula(
    "SupContrast",
    "hm",
    {
        "torch.exp(logits)": "logits",
        "torch.log(exp_logits.sum(1, keepdim=True))": "logits log_probs",
        "(pairs * log_prob).sum(1) / pairs.sum(1)": "log_probs loss",
        "F.normalize(features, dim=1)": "hidden",
    },
)
def supcon(features, mask):
    features = F.normalize(features, dim=1)
    logits = torch.matmul(features, features.T) / 0.07
    pairs = 1 - torch.eye(4)
    exp_logits = torch.exp(logits) * pairs
    log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))
    mean_log_prob_pos = (pairs * log_prob).sum(1) / pairs.sum(1)
    return -mean_log_prob_pos.mean()


@formula(
    "Barlow Twins",
    "hh",
    {"(z1 - z1.mean(0)) / z1.std(0)": "hidden", "z1.std(0)": "hidden", "(c - torch.eye(6)).pow(2)": "loss"},
)
def barlow_twins(z1, z2):
    a = (z1 - z1.mean(0)) / z1.std(0)
    b = (z2 - z2.mean(0)) / z2.std(0)
    c = a.T @ b / 4
    return (c - torch.eye(6)).pow(2).sum()


@formula(
    "VAE",
    "hhww",
    {"torch.exp(0.5 * logvar)": "hidden", "logvar.exp()": "kl hidden", "1 + logvar - mu.pow(2) - logvar.exp()": "kl"},
)
def vae(mu, logvar, noise, x):
    std = torch.exp(0.5 * logvar)
    z = mu + noise * std
    recon = F.mse_loss(z, x)
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return recon + KLD


@formula("VQ-VAE", "hw", {"F.softmax(-distances, dim=1)": "hidden logits log_probs", "(flat.unsqueeze(1) - codebook).pow(2)": "hidden"})
def vq_vae(flat, codebook):
    distances = (flat.unsqueeze(1) - codebook).pow(2).sum(-1)
    soft = F.softmax(-distances, dim=1)
    quantized = soft @ codebook
    return F.mse_loss(quantized, flat.detach()) + 0.25 * F.mse_loss(flat, quantized.detach())


@formula("flow matching", "hwwv", {"(x1 - xt) / (1 - t)": "hidden", "(v - ut) ** 2": "loss"})
def flow_matching(v, x0, x1, t):
    t = t[:, None]
    xt = (1 - t) * x0 + t * x1
    ut = (x1 - xt) / (1 - t)
    return ((v - ut) ** 2).mean()


@formula("RealNVP", "hhw", {"torch.log(scale.abs())": "log_probs hidden", "(x - shift) / scale": "hidden", "0.5 * z**2": "log_probs"})
def affine_flow(shift, scale, x):
    z = (x - shift) / scale
    log_det = -torch.log(scale.abs()).sum(-1)
    prior = -(0.5 * z**2).sum(-1) - 3 * math.log(2 * math.pi)
    return -(prior + log_det).mean()


@formula(
    "score SDE",
    "hwwv",
    {"-(perturbed - samples) / sigma**2": "hidden grad", "score - target": "hidden loss", "(score - target) ** 2": "loss"},
)
def denoising_score_matching(score, perturbed, samples, sigmas):
    sigma = sigmas[:, None]
    target = -(perturbed - samples) / sigma**2
    return (0.5 * ((score - target) ** 2).sum(dim=-1) * sigmas**2).mean()


@formula("DreamerV3", "pdd", {"(target - offset) / scale": "advantages rewards", "torch.clamp(high - low, min=1.0)": "rewards advantages"})
def dreamer_actor(log_pi, returns, value):
    low, high = torch.quantile(returns, 0.05), torch.quantile(returns, 0.95)
    scale, offset = torch.clamp(high - low, min=1.0), low
    target = returns
    adv = (target - offset) / scale - (value - offset) / scale
    return -(log_pi * adv.detach()).mean()


def scalar_transform(x, eps=0.001):
    return torch.sign(x) * (torch.sqrt(torch.abs(x) + 1) - 1) + eps * x


@formula("MuZero", "hw", {"torch.sqrt(torch.abs(x) + 1)": "rewards", "torch.abs(x)": "rewards"})
def muzero_reward(logits, target_rewards):
    transformed = scalar_transform(target_rewards)
    return F.mse_loss(logits, transformed)


@formula(
    "MPO",
    "uds",
    {
        "torch.exp(q / eta)": "is_weight rewards logits",
        "torch.log(torch.exp(q / eta).mean(dim=-1))": "loss rewards logits",
        "q / eta": "rewards logits advantages",
    },
)
def mpo_dual(log_pi, q, eta):
    dual = eta * 0.1 + eta * torch.log(torch.exp(q / eta).mean(dim=-1)).mean()
    return dual - log_pi.mean()


@formula(
    "V-trace",
    "pdddd",
    {
        "torch.exp(log_rhos)": "is_weight ratio",
        "clipped_rhos * (rewards + discounts * next_values - 0.5)": "advantages rewards",
        "torch.clamp(rhos, max=1.0)": "is_weight ratio",
    },
)
def vtrace(target_logp, behaviour_logp, rewards, discounts, next_values):
    log_rhos = (target_logp - behaviour_logp).detach()
    rhos = torch.exp(log_rhos)
    clipped_rhos = torch.clamp(rhos, max=1.0)
    deltas = clipped_rhos * (rewards + discounts * next_values - 0.5)
    return -(target_logp * deltas).mean()


def gumbel_loss(pred, label, beta):
    z = (label - pred) / beta
    z = torch.clamp(z, max=5.0)
    return torch.exp(z) - z - 1


@formula("XQL", "uv", {"torch.exp(z)": "loss advantages ratio", "(label - pred) / beta": "advantages loss rewards"})
def xql_value(v, target_q):
    return gumbel_loss(v, target_q, 2.0).mean()


@formula("RLOO", "pd", {"(rewards.sum(0) - rewards) / 3": "rewards advantages", "rewards - baseline": "advantages rewards"})
def rloo(logp, rewards):
    baseline = (rewards.sum(0) - rewards) / 3
    x = rewards - baseline
    return -(x * logp).mean()


@formula(
    "TRL",
    "ll",
    {
        "torch.logsumexp(torch.stack([s + math.log(0.5), t + math.log(0.5)]), dim=0)": "log_probs",
        "F.kl_div(mixture, t, reduction='none', log_target=True)": "kl",
    },
)
def trl_gkd(student_logits, teacher_logits):
    s = F.log_softmax(student_logits / 2.0, dim=-1)
    t = F.log_softmax(teacher_logits.detach() / 2.0, dim=-1)
    mixture = torch.logsumexp(torch.stack([s + math.log(0.5), t + math.log(0.5)]), dim=0)
    jsd = 0.5 * F.kl_div(mixture, t, reduction="none", log_target=True) + 0.5 * F.kl_div(mixture, s, reduction="none", log_target=True)
    return jsd.sum() / 4


@formula("distillation", "ll", {"p * (log_p - log_q)": "kl", "torch.log(q)": "log_probs ref_log_probs"})
def reverse_kl(student, teacher):
    q = torch.softmax(teacher.detach(), -1)
    log_q = torch.log(q)
    log_p = torch.log_softmax(student, -1)
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1).mean()


@formula(
    "ST-MoE",
    "l",
    {"torch.logsumexp(router_logits, dim=-1)": "router logits", "torch.logsumexp(router_logits, dim=-1) ** 2": "router logits loss"},
)
def router_z(router_logits):
    return (torch.logsumexp(router_logits, dim=-1) ** 2).mean()


@formula("focal loss", "uv", {"torch.exp(-ce)": "log_probs loss", "(1 - pt) ** 2.0": "loss is_weight log_probs"})
def focal(inputs, targets):
    ce = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
    pt = torch.exp(-ce)
    return ((1 - pt) ** 2.0 * ce).mean()


@formula("dice loss", "hw", {"(2 * inter + 1) / (union + 1)": "loss"})
def dice(inputs, targets):
    x = inputs.sigmoid()
    inter, union = (x * targets).sum(-1), x.sum(-1) + targets.sum(-1)
    return (1 - (2 * inter + 1) / (union + 1)).mean()


@formula(
    "CLIP",
    "hh",
    {"image.norm(dim=1, keepdim=True)": "hidden", "image / image.norm(dim=1, keepdim=True)": "hidden", "image @ text.t()": "logits"},
)
def clip(image, text):
    image = image / image.norm(dim=1, keepdim=True)
    text = text / text.norm(dim=1, keepdim=True)
    similarity = 14.0 * (image @ text.t())
    return F.cross_entropy(similarity, torch.arange(4))


@formula("reward model", "uu", {"chosen - rejected": "rewards logits advantages", "F.logsigmoid(chosen - rejected)": "loss log_probs"})
def bradley_terry(chosen_rewards, rejected_rewards):
    chosen, rejected = chosen_rewards.float(), rejected_rewards.float()
    return -F.logsigmoid(chosen - rejected).mean()


# Twenty more, written when the first forty were understood.


@formula("tianshou", "ps", {"(ent - target) * log_alpha": "entropy loss", "log_alpha.exp()": "weights entropy hidden loss"})
def tianshou_alpha(log_prob, log_alpha):
    target = -3.0
    ent = -log_prob.detach()
    alpha = log_alpha.exp()
    return (alpha * log_prob).mean() - ((ent - target) * log_alpha).mean()


@formula(
    "TRL",
    "uuvv",
    {"(logits - 1 / (2 * 0.1)) ** 2": "loss", "torch.relu(1 - 0.1 * logits)": "loss", "chosen - rejected": "log_ratio logits"},
)
def trl_ipo_hinge(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
    chosen = chosen_logps - ref_chosen_logps
    rejected = rejected_logps - ref_rejected_logps
    logits = chosen - rejected
    return (torch.relu(1 - 0.1 * logits) + (logits - 1 / (2 * 0.1)) ** 2).mean()


@formula(
    "TRL",
    "uu",
    {"gap / beta": "rewards log_ratio logits loss", "(chosen / lengths - rejected / lengths) - 0.5": "log_ratio logits rewards log_probs"},
)
def simpo(chosen, rejected):
    lengths = torch.tensor([3.0, 4.0, 5.0, 6.0])
    beta = 0.5
    gap = (chosen / lengths - rejected / lengths) - 0.5
    return -F.logsigmoid(gap / beta).mean()


@formula(
    "verl",
    "pdddm",
    {"torch.exp(log_prob - rollout_log_probs)": "ratio is_weight", "torch.exp((old - rollout_log_probs).sum(-1))": "is_weight ratio"},
)
def verl_tis(log_prob, old, rollout_log_probs, advantages, mask):
    a = torch.exp(log_prob - rollout_log_probs)
    w = torch.exp((old - rollout_log_probs).sum(-1)).clamp(max=2.0)
    return -(a * w[:, None] * advantages * mask).sum() / mask.sum()


@formula("verl", "pdm", {"torch.exp(x - y)": "ratio", "torch.square(x - y)": "kl log_ratio loss"})
def k2_without_names(x, y, z):
    a = torch.exp(x - y)
    penalty = 0.5 * torch.square(x - y)
    return ((penalty - a) * z).sum() / z.sum()


class FixedRewardScaler:
    def __init__(self, decay=0.9):
        self.decay, self.var = decay, torch.zeros(())

    def scale(self, x):
        self.var = self.decay * self.var + (1 - self.decay) * x.var()
        return x / torch.sqrt(self.var)


@formula("OpenRLHF", "pd", {"torch.sqrt(self.var)": "rewards advantages", "x / torch.sqrt(self.var)": "rewards advantages"})
def reward_scaling(log_probs, rewards):
    return -(log_probs * FixedRewardScaler().scale(rewards)).mean()


@formula("OpenRLHF", "lim", {"probs * log_probs": "entropy", "log_probs.gather(-1, labels)": "log_probs"})
def masked_entropy(logits, labels, mask):
    log_probs = F.log_softmax(logits, dim=-1)
    probs = log_probs.exp()
    h = -(probs * log_probs).sum(-1)
    lp = log_probs.gather(-1, labels).squeeze(-1)
    return (-(lp + 0.01 * h) * mask).sum() / mask.sum()


@formula(
    "SB3",
    "hhwv",
    {
        "torch.log(std)": "log_probs entropy hidden",
        "((actions - mu) / std).pow(2)": "log_probs",
        "0.5 + 0.5 * math.log(2 * math.pi) + torch.log(std)": "entropy",
    },
)
def sb3_gaussian(mu, raw, actions, adv):
    std = F.softplus(raw)
    log_prob = (-0.5 * ((actions - mu) / std).pow(2) - torch.log(std)).sum(-1)
    entropy = (0.5 + 0.5 * math.log(2 * math.pi) + torch.log(std)).sum(-1)
    return -(log_prob * adv).mean() - 0.01 * entropy.mean()


@formula("SB3", "pddd", {"torch.logsumexp(q, dim=1)": "loss logits rewards", "q - backup": "loss rewards advantages"})
def cql(q, rewards, next_v, dones):
    backup = rewards + 0.99 * (1 - dones) * next_v
    conservative = torch.logsumexp(q, dim=1).mean() - q.mean()
    return ((q - backup) ** 2).mean() + 5.0 * conservative


@formula("tianshou", "pdd", {"torch.exp(td / 2.0)": "is_weight ratio advantages", "torch.where(td > 0, 0.7, 0.3) * td**2": "loss"})
def iql(log_pi, q_target, value):
    td = q_target - value.detach()
    w = torch.exp(td / 2.0).clamp(max=100.0)
    return (torch.where(td > 0, 0.7, 0.3) * td**2).mean() - (w * log_pi).mean()


@formula("PER", "pdv", {"p**0.6 / (p**0.6).sum()": "is_weight", "(4 * prob) ** -0.4": "is_weight", "(q - target).pow(2)": "loss"})
def prioritized_replay(q, target, p):
    prob = p**0.6 / (p**0.6).sum()
    w = (4 * prob) ** -0.4
    w = w / w.max()
    return ((q - target).pow(2).mean(1) * w).mean()


@formula("diffusers", "hwwv", {"(latents - noisy) / (sigma + 0.1)": "hidden", "sigma**-2": "is_weight hidden loss"})
def edm(denoised, latents, noisy, sigma):
    sigma = sigma[:, None]
    d = (latents - noisy) / (sigma + 0.1)
    weighting = sigma**-2
    return (weighting * (denoised - d) ** 2).mean()


@formula("StyleGAN", "uuh", {"grads.pow(2).sum(1).sqrt()": "grad hidden loss", "F.softplus(fake)": "loss", "(norm - 1) ** 2": "loss grad"})
def wgan_gp(real, fake, grads):
    norm = grads.pow(2).sum(1).sqrt()
    return F.softplus(fake).mean() + F.softplus(-real).mean() + 10 * ((norm - 1) ** 2).mean()


@formula(
    "MoCo",
    "hhw",
    {"query.norm(dim=1, keepdim=True)": "hidden", "torch.cat([pos, neg], dim=1) / 0.07": "logits", "q @ queue.T": "logits hidden"},
)
def moco(query, key, queue):
    q = query / query.norm(dim=1, keepdim=True)
    k = key / key.norm(dim=1, keepdim=True)
    pos = (q * k).sum(1, keepdim=True)
    neg = q @ queue.T
    out = torch.cat([pos, neg], dim=1) / 0.07
    return F.cross_entropy(out, torch.zeros(4, dtype=torch.long))


@formula("VICReg", "hh", {"torch.sqrt(x.var(dim=0) + 1e-4)": "hidden loss", "x - x.mean(dim=0)": "hidden", "F.relu(1 - std_x)": "loss"})
def vicreg(x, y):
    repr_loss = F.mse_loss(x, y)
    x = x - x.mean(dim=0)
    std_x = torch.sqrt(x.var(dim=0) + 1e-4)
    cov_x = (x.T @ x) / 3
    return repr_loss + F.relu(1 - std_x).mean() + cov_x.pow(2).sum() / 6


@formula(
    "beta-VAE", "hhhh", {"q_logvar.exp() / p_logvar.exp()": "kl", "(q_mu - p_mu) ** 2 / p_logvar.exp()": "kl", "p_logvar - q_logvar": "kl"}
)
def vae_kl_of_two(q_mu, q_logvar, p_mu, p_logvar):
    kl = 0.5 * (p_logvar - q_logvar + q_logvar.exp() / p_logvar.exp() + (q_mu - p_mu) ** 2 / p_logvar.exp() - 1)
    return kl.sum(-1).mean()


@formula("PyTorch Geometric", "hw", {"(x[:, None] - x[None]).norm(dim=-1)": "hidden", "1 / (1e-3 + dist)": "hidden"})
def pairwise_energy(x, target):
    dist = (x[:, None] - x[None]).norm(dim=-1)
    inverse = 1 / (1e-3 + dist)
    return F.mse_loss(inverse @ x, target)


@formula("detection", "hw", {"inter / union": "loss", "torch.log(iou)": "loss"})
def iou_loss(pred, boxes):
    inter = torch.minimum(pred, boxes).prod(-1)
    union = pred.prod(-1) + boxes.prod(-1) - inter
    iou = inter / union
    return -torch.log(iou).mean()


@formula("Lagrangian PPO", "uvs", {"lam / (1 + lam)": "is_weight hidden loss weights", "(adv - lam * cost_adv) / (1 + lam)": "advantages"})
def ppo_lagrangian(logp, adv, lam):
    cost_adv = adv.flip(0)
    mixed = (adv - lam * cost_adv) / (1 + lam)
    return -(torch.exp(logp - logp.detach()) * mixed).mean() + (lam / (1 + lam)).detach()


@formula(
    "DeepSpeed-Chat",
    "uuvv",
    {
        "torch.sigmoid(reward_chosen - reward_rejected)": "loss log_probs rewards",
        "-torch.log(torch.sigmoid(reward_chosen - reward_rejected))": "loss",
    },
)
def deepspeed_reward(c, r, reward_mean, unused):
    reward_chosen, reward_rejected = c - reward_mean, r - reward_mean
    return (-torch.log(torch.sigmoid(reward_chosen - reward_rejected))).mean()


@formula(
    "GRPO",
    "pdv",
    {
        "torch.exp(a - b)": "ratio",
        "(score - score.mean()) / (score.std() + 1e-6)": "advantages rewards",
        "score.std()": "rewards advantages",
    },
)
def grpo_without_names(a, b, score):
    c = (score - score.mean()) / (score.std() + 1e-6)
    d = torch.exp(a - b)
    return -torch.min(d * c[:, None], d.clamp(0.8, 1.2) * c[:, None]).mean()


# Nine more: what e is raised to, what shares out, and what weighs a loss.


@formula("chi-PO", "uv", {"torch.exp(logratios)": "ratio", "torch.exp(logratios) + logratios": "ratio log_ratio logits loss"})
def chi_link(policy_chosen, ref_chosen_logps):
    logratios = policy_chosen - ref_chosen_logps
    chosen = torch.exp(logratios) + logratios
    return -F.logsigmoid(0.1 * (chosen - chosen.flip(0))).mean()


@formula("lambda-GRPO", "pdmv", {"h**0.5": "is_weight loss", "(n - n.mean()) / (n.std() + 1e-8)": "is_weight loss"})
def length_weights(log_prob, old_log_prob, mask, adv):
    n = mask.sum(-1)
    h = 1 + (n - n.mean()) / (n.std() + 1e-8)
    share = 4 * torch.softmax(h**0.5, dim=-1)
    ratio = torch.exp(log_prob - old_log_prob)
    parts = share.unsqueeze(-1) * torch.minimum(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None])
    return -(parts * mask).sum() / mask.sum()


@formula("DAPO", "pdmv", {"1.0 / torch.sqrt(order)": "is_weight loss", "torch.sqrt(order)": "is_weight loss"})
def rank_weights(log_prob, old_log_prob, mask, order):
    ratio = torch.exp(log_prob - old_log_prob)
    decay = 1.0 / torch.sqrt(order)
    return -(decay[:, None] * ratio.clamp(0.8, 1.2) * mask).sum() / mask.sum()


@formula("DINO", "hw", {"torch.exp(teacher_output / 0.04)": "logits hidden", "teacher_output / 0.04": "logits hidden"})
def sinkhorn_teacher(student_output, teacher_output):
    q = torch.exp(teacher_output / 0.04).t()
    q = q / torch.sum(q)
    return -torch.sum(q.t() * F.log_softmax(student_output / 0.1, dim=-1), dim=-1).mean()


@formula("NFT", "pddv", {"(1.0 - rate[:, None] * r) / (1.0 - rate[:, None])": "ratio", "torch.exp(log_prob - old)": "ratio"})
def implicit_negative(log_prob, old, advantages, rate):
    r = ratio = torch.exp(log_prob - old)
    proxy = (1.0 - rate[:, None] * r) / (1.0 - rate[:, None])
    return (torch.log(proxy.clamp(min=0.1)) - torch.log(ratio)).mean()


@formula("SQL", "hv", {"torch.exp(x / 0.1)": "logits rewards", "x / 0.1": "logits rewards hidden"})
def soft_value(x, target):
    return (0.1 * torch.exp(x / 0.1).mean(dim=-1).log() - target).square().mean()


@formula("gflownet", "lm", {"outflow * torch.logical_not(done)": "logits log_probs", "torch.logsumexp(logits, dim=-1)": "logits log_probs"})
def flow_matching_of_states(logits, finished):
    done = finished > 2
    outflow = torch.logsumexp(logits, dim=-1)
    outflow = outflow * torch.logical_not(done)
    return (outflow - 0.5).pow(2).mean()


@formula("noisy or", "hw", {"torch.log1p(-p.clamp(max=1 - 1e-6))": "log_probs", "none.sum(-1).exp()": "log_probs hidden ratio"})
def noisy_or(x, target):
    p = x.sigmoid()
    none = torch.log1p(-p.clamp(max=1 - 1e-6))
    return (1.0 - none.sum(-1).exp() - target[:, 0]).square().mean()


@formula("Megatron", "l", {"share * logits": "entropy", "top + total.log()": "entropy logits log_probs"})
def parallel_entropy(logits):
    top = logits.max(dim=-1, keepdim=True).values
    raised = (logits - top).exp()
    total = raised.sum(dim=-1, keepdim=True)
    share = raised / total
    return -0.01 * (top + total.log() - (share * logits).sum(dim=-1, keepdim=True)).mean()


@formula("TRL", "pddm", {"rho.clamp(0.8, 3.0) / rho": "is_weight ratio", "log_ratio.exp()": "ratio is_weight"})
def gated_policy(logps, sampling_logps, advantages, mask):
    log_ratio = logps - sampling_logps
    with torch.no_grad():
        rho = log_ratio.exp()
        gate = rho.clamp(0.8, 3.0) / rho
    return -(gate * log_ratio.exp() * advantages * mask).sum() / mask.sum()


@formula("Mixtral", "lw", {"logits.softmax(-1)": "router", "gate * 2.0": "router"})
def gated_experts(logits, x):
    gate = logits.softmax(-1)
    gate = gate * 2.0
    return (gate.mean((0, 1)) ** 2).sum()


@formula("MuZero", "ld", {"target_policy.log()": "log_probs ref_log_probs kl"})
def of_visits(policy_logits, visits):
    log_prob = F.log_softmax(policy_logits[..., :3], dim=-1)
    target_policy = visits[:, None] / 3
    log_target = target_policy.log()
    return (log_prob.exp() * (log_prob - log_target)).sum(-1).mean()


@formula("SAC", "pd", {"torch.log(1 - action.pow(2) + 1e-6)": "log_probs entropy"})
def squashed(log_prob, action):
    correction = torch.log(1 - action.pow(2) + 1e-6)
    return (log_prob - correction).mean()


# What is normalised by a statistic of its own, what a model is held against, and what critics, routers and heads are about.


@formula(
    "miles",
    "pdm",
    {
        "torch.rsqrt(var + 1e-8)": "advantages rewards",
        "total_sq / count - centre**2": "advantages rewards",
        "x**2 * mask": "advantages rewards",
        "(x - centre) * torch.rsqrt(var + 1e-8)": "advantages rewards",
    },
)
def whitened_in_one_pass(log_prob, x, mask):
    total, total_sq, count = (x * mask).sum(), (x**2 * mask).sum(), mask.sum()
    centre = total / count
    var = total_sq / count - centre**2
    white = (x - centre) * torch.rsqrt(var + 1e-8)
    ratio = torch.exp(log_prob - log_prob.detach())
    return -(ratio * white * mask).sum() / mask.sum()


@formula("OpenRLHF", "pd", {"torch.sqrt(v)": "advantages rewards", "(x - m) / (torch.sqrt(v) + 1e-8)": "advantages rewards"})
def whitened_by_var_mean(logp, x):
    v, m = torch.var_mean(x)
    y = (x - m) / (torch.sqrt(v) + 1e-8)
    return -(y * logp).mean()


@formula("PopArt", "pdv", {"torch.sqrt(second - first**2)": "rewards advantages", "(returns - first) / sigma": "rewards advantages"})
def popart(values, returns, unused):
    first, second = returns.mean(), (returns * returns).mean()
    sigma = torch.sqrt(second - first**2)
    return F.mse_loss(values, (returns - first) / sigma)


@formula("gym", "pd", {"returns.var()": "rewards advantages", "rewards / torch.sqrt(returns.var() + 1e-8)": "rewards advantages"})
def scaled_by_returns(logp, rewards):
    returns = rewards.cumsum(-1)
    scaled = rewards / torch.sqrt(returns.var() + 1e-8)
    return -(scaled * logp).mean()


@formula(
    "keras",
    "hw",
    {"torch.rsqrt(square_sum)": "hidden", "torch.sum(torch.square(x), dim=-1, keepdim=True)": "hidden", "normed @ images.T": "logits"},
)
def l2_normalised_by_rsqrt(x, images):
    square_sum = torch.sum(torch.square(x), dim=-1, keepdim=True)
    inverse = torch.rsqrt(square_sum)
    normed = x * torch.minimum(inverse, torch.full_like(inverse, 1e12))
    logits = 10.0 * (normed @ images.T)
    return F.cross_entropy(logits, torch.arange(4))


@formula("SimCLR", "hh", {"(a * a).sum(-1, keepdim=True).sqrt()": "hidden", "a / na": "hidden", "za @ zb.T / 0.07": "logits"})
def nt_xent(a, b):
    na = (a * a).sum(-1, keepdim=True).sqrt()
    nb = (b * b).sum(-1, keepdim=True).sqrt()
    za, zb = a / na, b / nb
    return F.cross_entropy(za @ zb.T / 0.07, torch.arange(4))


@formula("cosine", "hw", {"x.norm(dim=-1)": "hidden", "(x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))": "hidden loss logits"})
def cosine_by_hand(x, y):
    similarity = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    return (1 - similarity).mean()


@formula("LLaMA", "hww", {"torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)": "hidden", "x.pow(2).mean(-1, keepdim=True)": "hidden"})
def rms_norm_and_head(x, weight, y):
    z = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.cross_entropy(z @ weight.T, torch.arange(4))


@formula("LogitNorm", "hv", {"logits.norm(dim=-1, keepdim=True)": "logits", "logits / norms": "logits"})
def logit_norm(logits, unused):
    norms = logits.norm(dim=-1, keepdim=True) + 1e-7
    return F.cross_entropy(logits / norms / 0.04, torch.arange(4))


@formula(
    "DiffSinger", "hwm", {"f0": "hidden", "f0.log2()": "hidden", "F.mse_loss(pitch[:, :3], f0.log2()[:, :3], reduction='none')": "loss"}
)
def pitch_loss(pitch, f0, uv):
    error = F.mse_loss(pitch[:, :3], f0.log2()[:, :3], reduction="none")
    return (error * uv).sum() / uv.sum()


@formula("FastSpeech", "hw", {"torch.log(durations + 1)": "hidden", "durations": "hidden"})
def duration_loss(out, durations):
    return F.l1_loss(out, torch.log(durations + 1))


@formula(
    "depth estimation",
    "hw",
    {"torch.log(gt)": "hidden", "torch.log(depth)": "hidden", "torch.log(depth) - torch.log(gt)": "hidden loss", "g.pow(2)": "loss"},
)
def scale_invariant_depth(depth, gt):
    g = torch.log(depth) - torch.log(gt)
    return torch.sqrt(g.pow(2).mean() - 0.85 * g.mean().pow(2))


@formula("regression", "uv", {"y": "hidden", "(y - x) ** 2": "loss", "y - x": "hidden loss"})
def squares_of_data(x, y):
    return ((y - x) ** 2).mean()


@formula("forecasting", "hw", {"y / scale": "hidden", "y.abs().mean(dim=-1, keepdim=True)": "hidden", "(x - y / scale).abs()": "loss"})
def scaled_target(x, y):
    scale = y.abs().mean(dim=-1, keepdim=True)
    return (x - y / scale).abs().mean()


@formula("DDPG", "udv", {"r + 0.99 * target_q": "rewards advantages", "F.mse_loss(q, y)": "loss", "target_q": "rewards"})
def ddpg_critic(q, rewards, target_q):
    r = rewards[:, 0]
    y = r + 0.99 * target_q
    return F.mse_loss(q, y)


@formula("TD(λ)", "pdd", {"rewards + 0.99 * next_values - values.detach()": "advantages rewards loss", "td_error.pow(2)": "loss"})
def td_error_of_critic(values, rewards, next_values):
    td_error = rewards + 0.99 * next_values - values.detach()
    td_error = td_error + (values.detach() - values)
    return 0.5 * td_error.pow(2).mean()


@formula("DreamerV3", "pd", {"torch.sign(x) * torch.log1p(torch.abs(x))": "rewards", "torch.log1p(torch.abs(x))": "rewards"})
def symlog_critic(value_pred, returns):
    def symlog(x):
        return torch.sign(x) * torch.log1p(torch.abs(x))

    return F.mse_loss(value_pred, symlog(returns))


@formula("QR-DQN", "hw", {"target_quantiles.unsqueeze(1) - quantiles.unsqueeze(2)": "loss rewards advantages", "delta.abs()": "loss"})
def quantile_huber(quantiles, target_quantiles):
    delta = target_quantiles.unsqueeze(1) - quantiles.unsqueeze(2)
    tau = (torch.arange(6) + 0.5) / 6
    return (delta.abs() * (tau[:, None] - (delta.detach() < 0).float()).abs()).mean()


@formula(
    "SAC",
    "hww",
    {"log_std.exp()": "hidden", "-3.5 * (torch.tanh(x) + 1) - 2": "hidden", "0.5 + 0.5 * math.log(2 * math.pi) + log_std": "entropy"},
)
def squashed_deviation(x, noise, y):
    log_std = -3.5 * (torch.tanh(x) + 1) - 2
    action = noise * log_std.exp()
    entropy = 0.5 + 0.5 * math.log(2 * math.pi) + log_std
    return F.mse_loss(action, y) - 0.01 * entropy.mean()


@formula(
    "Switch", "lm", {"probs * torch.log(probs)": "entropy router", "router_logits.softmax(-1)": "router", "share * density": "router loss"}
)
def load_of_experts(router_logits, unused):
    probs = router_logits.softmax(-1)
    entropy = -(probs * torch.log(probs)).sum(-1).mean()
    density = probs.mean((0, 1))
    share = (probs > 0.2).float().mean((0, 1))
    return 5 * (share * density).sum() - 0.01 * entropy


@formula("attention", "hhh", {"q @ k.transpose(-2, -1) / math.sqrt(6)": "attention", "torch.softmax(scores, dim=-1)": "attention hidden"})
def plain_attention(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(6)
    weights = torch.softmax(scores, dim=-1)
    return F.mse_loss(weights @ v, torch.ones(4, 6))


@formula("head", "hw", {"h @ w.T": "logits", "h @ w.T / 0.7": "logits", "torch.logsumexp(z, dim=-1)": "log_probs logits"})
def head_and_loss(h, w):
    z = h @ w.T / 0.7
    return (torch.logsumexp(z, dim=-1) - z.diagonal()).mean()


@formula("class weights", "lim", {"counts.sum() / counts": "is_weight loss", "w[target] * nll": "loss"})
def balanced_classes(logits, target, mask):
    counts = torch.bincount(target.flatten(), minlength=5).float() + 1e-3
    w = counts.sum() / counts
    nll = -F.log_softmax(logits, dim=-1).gather(-1, target)
    return (w[target] * nll).mean()


@formula("uncertainty weighting", "hwd", {"torch.exp(-s)": "is_weight hidden loss weights", "torch.exp(-s) * error": "loss"})
def heteroscedastic(out, y, unused):
    x, s = out[:, :3], out[:, 3:]
    error = (x - y[:, :3]) ** 2
    return (torch.exp(-s) * error + s).mean()


@formula("GRU-D", "hwm", {"torch.sigmoid(g)": "hidden router", "z * x[:, :3] + (1 - z) * h[:, :3]": "hidden"})
def gated_state(h, x, m):
    g = h[:, :3] * 2
    z = torch.sigmoid(g)
    new = z * x[:, :3] + (1 - z) * h[:, :3]
    return F.mse_loss(new, m)


@formula("sequence mean", "pm", {"1 / mask.sum(-1)": "mask loss is_weight", "(x * mask).sum(-1) / mask.sum(-1)": "loss log_probs"})
def mean_of_sequences(x, mask):
    per_sequence = (x * mask).sum(-1) / mask.sum(-1)
    return (per_sequence * (1 / mask.sum(-1))).mean()


@formula("categorical KL", "ll", {"p * (p.log() - q.log())": "kl", "p.log() - q.log()": "log_ratio kl"})
def kl_of_categoricals(x, y):
    p, q = x.softmax(-1), y.softmax(-1)
    return (p * (p.log() - q.log())).sum(-1).mean()


@formula("TD-MPC", "hd", {"low + (high - low) / 2": "rewards advantages", "torch.quantile(returns, 0.95)": "rewards advantages"})
def percentile_scale(x, returns):
    low, high = torch.quantile(returns, 0.05), torch.quantile(returns, 0.95)
    middle = low + (high - low) / 2
    return F.mse_loss(x[:, :3], (returns - middle) / (high - low))


@formula("ensemble", "hw", {"x.var(dim=0)": "hidden loss rewards", "(x - y) ** 2 / v": "loss"})
def ensemble_of_models(x, y):
    v = x.var(dim=0) + 1e-6
    return ((x - y) ** 2 / v + torch.log(v)).mean()


# Twelve more, asked when those were understood.


@formula("RND", "hw", {"y.std(dim=0)": "hidden", "(y - y.mean(dim=0)) / (y.std(dim=0) + 1e-8)": "hidden", "error.sqrt()": "loss rewards"})
def novelty(predicted, y):
    target = (y - y.mean(dim=0)) / (y.std(dim=0) + 1e-8)
    error = (predicted - target).pow(2).mean(-1)
    return error.sqrt().mean()


@formula("BYOL", "hw", {"F.normalize(z, dim=-1)": "hidden", "2 - 2 * (p * t).sum(-1)": "loss"})
def byol(x, z):
    p, t = F.normalize(x, dim=-1), F.normalize(z, dim=-1)
    return (2 - 2 * (p * t).sum(-1)).mean()


@formula("observation normaliser", "uww", {"torch.sqrt(var + 1e-8)": "hidden", "(obs - mean) / torch.sqrt(var + 1e-8)": "hidden"})
def normalised_observation(v, obs, head):
    mean, var = obs.mean(0), obs.var(0)
    x = (obs - mean) / torch.sqrt(var + 1e-8)
    return F.mse_loss((x * head).sum(-1) * v, torch.zeros(4))


@formula("critic", "uv", {"torch.log1p(y)": "rewards", "y": "rewards"})
def log_target_of_critic(critic_value, y):
    return F.smooth_l1_loss(critic_value, torch.log1p(y))


@formula("distillation", "hw", {"teacher / 2.0": "logits hidden", "teacher.pow(2).sum(-1, keepdim=True).sqrt()": "hidden"})
def feature_distillation(student, teacher):
    return F.mse_loss(student, teacher / teacher.pow(2).sum(-1, keepdim=True).sqrt()) + (student - teacher / 2.0).abs().mean()


@formula(
    "linear attention",
    "hhh",
    {"q @ (k.T @ v)": "attention hidden", "q @ k.sum(0)": "attention hidden", "num / den.unsqueeze(-1)": "attention hidden"},
)
def linear_attention(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    num = q @ (k.T @ v)
    den = q @ k.sum(0)
    return F.mse_loss(num / den.unsqueeze(-1), torch.ones(4, 6))


@formula("attention", "hhh", {"a.masked_fill(torch.ones(4, 4) == 0, -1e9)": "attention", "q @ k.T": "attention"})
def masked_attention(q, k, v):
    a = q @ k.T
    a = a.masked_fill(torch.ones(4, 4) == 0, -1e9)
    return F.mse_loss(F.softmax(a / 2.4, dim=-1) @ v, torch.ones(4, 6))


@formula("GRPO", "pdm", {"x.std(dim=1, keepdim=True)": "rewards advantages", "(x - x.mean(dim=1, keepdim=True)) / s": "advantages rewards"})
def grouped_by_hand(lp, x, mask):
    s = x.std(dim=1, keepdim=True)
    a = (x - x.mean(dim=1, keepdim=True)) / s
    return -(torch.exp(lp - lp.detach()) * a * mask).sum() / mask.sum()


@formula("REINFORCE", "pdm", {"(g - b) / s": "advantages rewards", "(((g - b) ** 2 * m).sum() / m.sum()).sqrt()": "advantages rewards"})
def masked_baseline(lp, g, m):
    b = (g * m).sum() / m.sum()
    s = (((g - b) ** 2 * m).sum() / m.sum()).sqrt()
    return -(lp * ((g - b) / s) * m).sum() / m.sum()


@formula("energy", "uu", {"torch.logsumexp(-x, dim=0)": "logits log_probs loss", "x - y": "logits loss hidden rewards"})
def contrastive_energy(x, y):
    return (torch.logsumexp(-x, dim=0) + torch.relu(x - y)).mean()


@formula(
    "spectral",
    "hw",
    {"x.abs() / y.abs()": "hidden loss", "torch.log(x.abs() + 1e-7)": "hidden loss", "torch.log(y.abs() + 1e-7)": "hidden"},
)
def log_spectral_distance(x, y):
    return (torch.log(x.abs() + 1e-7) - torch.log(y.abs() + 1e-7)).abs().mean() + (x.abs() / y.abs()).mean() * 0


@formula("MAPE", "hw", {"(x - y).abs() / y.abs()": "loss", "((x - y) / y).pow(2)": "loss"})
def relative_error(x, y):
    return ((x - y).abs() / y.abs()).mean() + ((x - y) / y).pow(2).mean()
