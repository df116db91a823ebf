"""SpeechBrain recipes, ctc_loss with zero_infinity=True - an utterance shorter than its transcript.

Speed perturbation left two frames for five tokens: there is no alignment, the plain CTC loss of this utterance (logged beside it) is inf. (Source: speechbrain/speechbrain, nnet/losses.py, ctc_loss.)
Healthy: zero_infinity sets loss and gradient of just this utterance to zero, the others are as they are without it.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


def ctc_loss(log_probs, targets, input_lens, target_lens, blank_index, reduction="mean"):
    input_lens = (input_lens * log_probs.shape[1]).round().int()
    target_lens = (target_lens * targets.shape[1]).round().int()
    log_probs = log_probs.transpose(0, 1)
    if reduction == "batchmean":
        reduction = "none"
        loss = F.ctc_loss(log_probs, targets, input_lens, target_lens, blank_index, zero_infinity=True, reduction=reduction)
        return loss.sum() / targets.shape[0]
    return F.ctc_loss(log_probs, targets, input_lens, target_lens, blank_index, zero_infinity=True, reduction=reduction)


def build():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 7))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    feats = torch.randn(3, 10, 6)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [2, 2, 6, 0, 0], [4, 1, 5, 0, 0]])
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        feats=feats,
        wav_lens=torch.tensor([0.2, 1.0, 0.8]),
        tokens=tokens,
        token_lens=torch.tensor([1.0, 0.6, 0.6]),
        stats=[],
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        p_ctc = s.model(s.feats).log_softmax(-1)
        with torch.no_grad():
            lens = (s.wav_lens * 10).round().int(), (s.token_lens * 5).round().int()
            s.stats.append(F.ctc_loss(p_ctc.transpose(0, 1), s.tokens, *lens, 0, reduction="none"))
        loss = ctc_loss(p_ctc, s.tokens, s.wav_lens, s.token_lens, blank_index=0, reduction="batchmean")
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
