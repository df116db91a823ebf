"""A diffusion policy is improved through its own denoising chain (Diffusion-QL). The noise schedule was rescaled to zero terminal SNR while
the network still predicts epsilon: at the last timestep alpha_bar is 0 and the predicted action is x / 0. clip_sample turns the infinities
into +-1, so samples, Q values and the loss look fine; the backward of the division is 0 / 0 and every actor gradient is NaN.

Source: https://github.com/huggingface/diffusers/issues/3851 (epsilon with rescale_betas_zero_snr, "clip_sample=True hides the issue").
Heals: do not combine the two (v-prediction, or the schedule as it was), or keep alpha_bar above 0 in the divisor. nan_to_num on the
predicted sample does not: the forward value was finite already after the clip.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "zero_denominator"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("hidden", "logits"),
    fix=(
        "validate_config",
        "clamp_denominator",
        "representable_eps",
        "avoid_singular_op",
        "where_on_detached",
        "fix_upstream",
        "clamp_input",
    ),
    variable=("pred_original_sample",),
    line=("pred_original_sample = (sample - beta_prod_t**0.5 * model_output) / alpha_prod_t**0.5",),
)


def rescale_zero_terminal_snr(betas):
    alphas_bar_sqrt = (1.0 - betas).cumprod(0).sqrt()
    first, last = alphas_bar_sqrt[0].clone(), alphas_bar_sqrt[-1].clone()
    alphas_bar_sqrt = (alphas_bar_sqrt - last) * first / (first - last)
    alphas_bar = alphas_bar_sqrt**2
    alphas = torch.cat([alphas_bar[:1], alphas_bar[1:] / alphas_bar[:-1]])
    return 1.0 - alphas


class DDPMScheduler:
    def __init__(self, num_train_timesteps=8, rescale_betas_zero_snr=False, clip_sample=True):
        betas = torch.linspace(0.02, 0.4, num_train_timesteps)
        if rescale_betas_zero_snr:
            betas = rescale_zero_terminal_snr(betas)
        self.alphas = 1.0 - betas
        self.alphas_cumprod = self.alphas.cumprod(0)
        self.clip_sample = clip_sample
        self.timesteps = list(reversed(range(num_train_timesteps)))

    def add_noise(self, original, noise, timesteps):
        abar = self.alphas_cumprod[timesteps].unsqueeze(-1)
        return abar.sqrt() * original + (1 - abar).sqrt() * noise

    def step(self, model_output, t, sample, noise):
        alpha_prod_t = self.alphas_cumprod[t]
        alpha_prod_t_prev = self.alphas_cumprod[t - 1] if t > 0 else torch.tensor(1.0)
        beta_prod_t, beta_prod_t_prev = 1 - alpha_prod_t, 1 - alpha_prod_t_prev
        pred_original_sample = (sample - beta_prod_t**0.5 * model_output) / alpha_prod_t**0.5
        if self.clip_sample:
            pred_original_sample = pred_original_sample.clamp(-1.0, 1.0)
        original_coeff = alpha_prod_t_prev**0.5 * (1 - self.alphas[t]) / beta_prod_t
        sample_coeff = self.alphas[t] ** 0.5 * beta_prod_t_prev / beta_prod_t
        variance = (beta_prod_t_prev / beta_prod_t * (1 - self.alphas[t])).clamp(min=1e-20)
        prev = original_coeff * pred_original_sample + sample_coeff * sample
        return prev + variance**0.5 * noise if t > 0 else prev


class NoisePredictor(nn.Module):
    def __init__(self, obs_dim=6, act_dim=2, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.net = nn.Sequential(nn.Linear(obs_dim + act_dim + 8, hidden), nn.Mish(), nn.Linear(hidden, act_dim))

    def forward(self, action, timesteps, obs):
        return self.net(torch.cat([action, self.embed(timesteps), obs], -1))


def sample_actions(actor, scheduler, obs, act_dim=2):
    action = torch.randn(obs.shape[0], act_dim)
    for t in scheduler.timesteps:
        eps = actor(action, torch.full((obs.shape[0],), t), obs)
        action = scheduler.step(eps, t, action, torch.randn_like(action))
    return action


def build():
    torch.manual_seed(3851)
    actor = NoisePredictor()
    critic = nn.Sequential(nn.Linear(8, 32), nn.Mish(), nn.Linear(32, 1)).requires_grad_(False)
    obs, actions = torch.randn(16, 6), torch.rand(16, 2) * 2 - 1
    return SimpleNamespace(
        model=actor,
        critic=critic,
        obs=obs,
        actions=actions,
        scheduler=DDPMScheduler(rescale_betas_zero_snr=True),
        eta=1.0,
        optimizer=torch.optim.Adam(actor.parameters(), lr=3e-4),
    )


def run(s=None):
    s = s or build()
    timesteps = torch.randint(0, 8, (16,))
    noise = torch.randn_like(s.actions)
    noisy = s.scheduler.add_noise(s.actions, noise, timesteps)
    bc_loss = (s.model(noisy, timesteps, s.obs) - noise).pow(2).mean()
    q = s.critic(torch.cat([s.obs, sample_actions(s.model, s.scheduler, s.obs)], -1))
    loss = bc_loss - s.eta * q.mean() / q.abs().mean().detach()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
