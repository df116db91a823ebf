"""The losses of the corpus, each from its formula: networks that make logits, criteria that go wrong, and what mends them.

The lines that hold a bug are named by their text in subjects.py. Shapes: images [rows, pixels] or [rows, 1, height, width], logits [rows, classes].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Criterion = Callable[[Tensor, Tensor], Tensor]  # of logits and labels


def on(network: Callable[..., Tensor], criterion: Criterion) -> Callable[..., Tensor]:
    """The criterion of what the network makes of the other tensors."""

    def loss(labels: Tensor, **tensors: Tensor) -> Tensor:
        return criterion(network(**tensors), labels)

    return loss


# networks


def linear(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return images @ weight + bias


def given(logits: Tensor) -> Tensor:
    """The logits themselves are the variable."""
    return logits


def perceptron(images: Tensor, weight: Tensor, bias: Tensor, **hidden: Tensor) -> Tensor:
    """Layers of ReLUs before the last one."""
    signal = images
    for layer in range(1, len(hidden) // 2 + 1):
        signal = torch.relu(signal @ hidden[f"hidden{layer}_weight"] + hidden[f"hidden{layer}_bias"])
    return signal @ weight + bias


def sigmoid_perceptron(images: Tensor, hidden_weight: Tensor, weight: Tensor) -> Tensor:
    return torch.sigmoid(images @ hidden_weight) @ weight


def convolutional(images: Tensor, hidden_weight: Tensor, hidden_bias: Tensor, weight: Tensor, bias: Tensor, **filters: Tensor) -> Tensor:
    """Convolutions with ReLU and 2 × 2 pooling, a hidden layer, logits."""
    signal = images
    for layer in range(1, len(filters) // 2 + 1):
        signal = torch.relu(F.conv2d(signal, filters[f"conv{layer}_weight"], filters[f"conv{layer}_bias"], padding="same"))
        signal = F.max_pool2d(signal, 2)
    hidden = torch.relu(signal.flatten(1) @ hidden_weight + hidden_bias)
    return hidden @ weight + bias


def spatial_transformer(
    images: Tensor, where_weight: Tensor, where_bias: Tensor, turn_weight: Tensor, turn_bias: Tensor, **rest: Tensor
) -> Tensor:
    """A small network says how the image is to be turned and moved; the convolutions see the result."""
    glance = torch.tanh(images.flatten(1) @ where_weight + where_bias)
    affine = torch.tanh(glance @ turn_weight + turn_bias).view(-1, 2, 3)
    turned = F.grid_sample(images, F.affine_grid(affine, list(images.shape), align_corners=False), align_corners=False)
    return convolutional(turned, **rest)


def value_iteration(
    maze: Tensor, rows: Tensor, columns: Tensor, see: Tensor, see_bias: Tensor, reward: Tensor, act: Tensor, expect: Tensor, weight: Tensor
) -> Tensor:
    """A value iteration network: convolutions as Bellman updates, read out at one state of each maze [mazes, 2, height, width]."""
    rewards = F.conv2d(F.conv2d(maze, see, see_bias, padding=1), reward)
    worth = F.conv2d(rewards, act, padding=1)
    for _ in range(3):
        values = worth.amax(dim=1, keepdim=True)
        worth = F.conv2d(torch.cat((rewards, values), dim=1), torch.cat((act, expect), dim=1), padding=1)
    return worth[torch.arange(len(maze)), :, rows, columns] @ weight


def u_net(images: Tensor, down: Tensor, deep: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One level down, one up, joined; logits of every pixel [rows · height · width, classes]."""
    outer = torch.relu(F.conv2d(images, down, padding=1))
    inner = torch.relu(F.conv2d(F.max_pool2d(outer, 2), deep, padding=1))
    joined = torch.cat((outer, F.conv_transpose2d(inner, up, stride=2)), dim=1)
    return joined.permute(0, 2, 3, 1).flatten(0, 2) @ weight + bias


# cross entropy of a softmax


def summed(rows: Tensor) -> Tensor:
    return rows.sum()


def averaged(rows: Tensor) -> Tensor:
    return rows.mean()


def log_of_softmax(reduce: Callable[[Tensor], Tensor]) -> Criterion:
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        probabilities = torch.softmax(logits, dim=1)
        return reduce(-(labels * torch.log(probabilities)).sum(dim=1))

    return criterion


def log_softmax(reduce: Callable[[Tensor], Tensor]) -> Criterion:
    return lambda logits, labels: reduce(-(labels * F.log_softmax(logits, dim=1)).sum(dim=1))


def log_of_clipped(reduce: Callable[[Tensor], Tensor], low: float) -> Criterion:
    return lambda logits, labels: reduce(-(labels * torch.log(torch.softmax(logits, dim=1).clamp(min=low))).sum(dim=1))


def log_of_more(reduce: Callable[[Tensor], Tensor], eps: float) -> Criterion:
    return lambda logits, labels: reduce(-(labels * torch.log(torch.softmax(logits, dim=1) + eps)).sum(dim=1))


def log_of_relu(logits: Tensor, labels: Tensor) -> Tensor:
    """A ReLU after the softmax changes nothing."""
    probabilities = torch.relu(torch.softmax(logits, dim=1))
    return -(labels * torch.log(probabilities)).sum(dim=1).mean()


def log_beside_clip(logits: Tensor, labels: Tensor) -> Tensor:
    """The clipped probabilities are computed, and dropped."""
    probabilities = torch.softmax(logits, dim=1)
    torch.clamp(probabilities, 1e-15, 1.0)
    return -(labels * torch.log(probabilities)).sum(dim=1).mean()


def picked(logits: Tensor, labels: Tensor) -> Tensor:
    """The logarithm of every probability, and of these the label's; labels are indices [rows]."""
    log_probs = torch.log(torch.softmax(logits, dim=1))
    return F.nll_loss(log_probs, labels)


def picked_of_more(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(torch.log(torch.softmax(logits, dim=1) + torch.finfo(torch.float32).eps), labels)


def picked_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def rank_cross_entropy(scores: Tensor, relevance: Tensor) -> Tensor:
    """Every positive document stands before its two negative ones [3 · queries, 1]."""
    ranked = torch.softmax(scores.view(-1, 3), dim=1)
    return -(relevance.view(-1, 3) * torch.log(ranked)).sum(dim=1).mean()


def rank_cross_entropy_of_more(scores: Tensor, relevance: Tensor) -> Tensor:
    return -(relevance.view(-1, 3) * torch.log(torch.softmax(scores.view(-1, 3), dim=1) + torch.finfo(torch.float64).eps)).sum(dim=1).mean()


def rank_square_root(scores: Tensor, relevance: Tensor) -> Tensor:
    ranked = torch.softmax(scores.view(-1, 3), dim=1)
    return -(relevance.view(-1, 3) * torch.sqrt(ranked)).sum(dim=1).mean()


def rank_exp_of_half_logarithm(scores: Tensor, relevance: Tensor) -> Tensor:
    return -(relevance.view(-1, 3) * torch.exp(0.5 * F.log_softmax(scores.view(-1, 3), dim=1))).sum(dim=1).mean()


# cross entropy of yes and no


def yes_or_no(probability: Callable[[Tensor], Tensor]) -> Criterion:
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        hypothesis = probability(logits)
        yes = labels * torch.log(hypothesis)
        no = (1 - labels) * torch.log(1 - hypothesis)
        return -(yes + no).mean()

    return criterion


def softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=1)


def yes_or_no_clipped(probability: Callable[[Tensor], Tensor]) -> Criterion:
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        hypothesis = probability(logits)
        return -(labels * torch.log(hypothesis.clamp(min=1e-10)) + (1 - labels) * torch.log((1 - hypothesis).clamp(min=1e-10))).mean()

    return criterion


def yes_or_no_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels)


def root_mean_square(logits: Tensor, labels: Tensor) -> Tensor:
    """How far the probabilities are from the labels; 0 of a perfect fit."""
    error = torch.softmax(logits, dim=1) - labels
    return torch.sqrt(error.square().mean())


def root_mean_square_of_more(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.sqrt((torch.softmax(logits, dim=1) - labels).square().mean() + 1e-12)


def discriminator(real: Tensor, fake: Tensor, **layers: Tensor) -> Tensor:
    """Of a GAN; only the second logarithm has an epsilon."""
    says_real = torch.sigmoid(perceptron(real, **layers))
    says_fake = torch.sigmoid(perceptron(fake, **layers))
    return -(torch.log(says_real) + torch.log(1.0 - says_fake + 1e-8)).mean()


def discriminator_of_more(real: Tensor, fake: Tensor, **layers: Tensor) -> Tensor:
    says_real = torch.sigmoid(perceptron(real, **layers))
    says_fake = torch.sigmoid(perceptron(fake, **layers))
    return (-torch.log(says_real + 1e-2) - torch.log(1.0 - says_fake + 1e-2)).mean()


# a softmax of one's own


def clipped_above_the_line(logits: Tensor, labels: Tensor) -> Tensor:
    """The numerator is clipped, the sum below it is not; what comes out is clipped before its logarithm."""
    above = torch.exp(logits.clamp(-87.0, 87.0))
    below = torch.exp(logits).sum(dim=1, keepdim=True)
    probabilities = above / below
    return -(labels * torch.log(probabilities.clamp(1e-6, 1.0))).sum(dim=1).mean()


def exp_by_sum(logits: Tensor, labels: Tensor) -> Tensor:
    probabilities = torch.exp(logits) / torch.exp(logits).sum(dim=1, keepdim=True)
    return -(labels * torch.log(probabilities)).sum(dim=1).mean()


def exp_by_sum_of_capped(logits: Tensor, labels: Tensor) -> Tensor:
    return exp_by_sum(logits.clamp(max=87.0), labels)


def exp_by_sum_of_capped_and_more(logits: Tensor, labels: Tensor) -> Tensor:
    exponentials = torch.exp(logits.clamp(max=87.0))
    probabilities = exponentials / exponentials.sum(dim=1, keepdim=True)
    return -(labels * torch.log(probabilities.abs() + 1e-6)).sum(dim=1).mean()


def dice(logits: Tensor, labels: Tensor) -> Tensor:
    exponentials = torch.exp(logits)
    prediction = exponentials / exponentials.sum(dim=1, keepdim=True)
    return -2 * (prediction * labels).sum() / (1e-5 + prediction.sum() + labels.sum())


def dice_of_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    prediction = torch.softmax(logits, dim=1)
    return -2 * (prediction * labels).sum() / (1e-5 + prediction.sum() + labels.sum())


NODES = torch.tensor([0, 0, 0, 1, 1, 1])  # the node that each of six edges leads to


def attention_of_edges(scores: Tensor, values: Tensor) -> Tensor:
    """A softmax over the edges of each node [edges], and the values that it weighs."""
    exponentials = torch.exp(scores)
    weights = exponentials / torch.zeros(2).index_add(0, NODES, exponentials)[NODES]
    return (weights * values).sum()


def attention_of_edges_from_maximum(scores: Tensor, values: Tensor) -> Tensor:
    maximum = torch.zeros(2).scatter_reduce(0, NODES, scores.detach(), "amax", include_self=False)
    exponentials = torch.exp(scores - maximum[NODES])
    return (exponentials / (torch.zeros(2).index_add(0, NODES, exponentials)[NODES] + 1e-16) * values).sum()


def logarithms_of_edges(scores: Tensor, values: Tensor) -> Tensor:
    logarithms = torch.log(scores)
    weights = logarithms / torch.zeros(2).index_add(0, NODES, logarithms)[NODES]
    return (weights * values).sum()


# free energies and variational bounds


def free_energy(softplus: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A restricted Boltzmann machine, one step of contrastive divergence: the free energy of the data less that of its reconstruction.

    draws_hidden, draws_visible: uniform, what the samples of the two layers are drawn with.
    """

    def loss(
        images: Tensor, draws_hidden: Tensor, draws_visible: Tensor, weight: Tensor, visible_bias: Tensor, hidden_bias: Tensor
    ) -> Tensor:
        def energy(visible: Tensor) -> Tensor:
            return (-softplus(visible @ weight + hidden_bias).sum(dim=1) - visible @ visible_bias).mean()

        hidden = torch.relu(torch.sign(torch.sigmoid(images @ weight + hidden_bias) - draws_hidden))
        again = torch.relu(torch.sign(torch.sigmoid(hidden @ weight.T + visible_bias) - draws_visible))
        return energy(images) - energy(again)

    return loss


def log_one_plus_exp(field: Tensor) -> Tensor:
    return field.exp().add(1).log()


def kl_of_encoding(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Of a variational graph autoencoder [nodes, channels]."""
    return -0.5 * (1 + log_variance - mean**2 - torch.exp(log_variance)).sum(dim=1).mean()


def kl_of_clamped_encoding(mean: Tensor, log_variance: Tensor) -> Tensor:
    return kl_of_encoding(mean, log_variance.clamp(max=10.0))


def kl_with_logarithm(mean: Tensor, log_variance: Tensor) -> Tensor:
    return -0.5 * (1 + log_variance - mean**2 - torch.log(log_variance)).sum(dim=1).mean()


def autoencoder(bound: Callable[..., Tensor], *, conditional: bool = False) -> Callable[..., Tensor]:
    """A variational autoencoder: two softplus layers each way; a conditional one is told the class on both sides.

    noise [rows, latent]: what the latent is sampled with. bound: of image, logits of its reconstruction, mean, log-variance.
    """

    def loss(
        images: Tensor,
        noise: Tensor,
        mean_weight: Tensor,
        mean_bias: Tensor,
        spread_weight: Tensor,
        spread_bias: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor | None = None,
        **layers: Tensor,
    ) -> Tensor:
        def two_layers(signal: Tensor, side: str) -> Tensor:
            if conditional and labels is not None:
                signal = torch.cat((signal, labels), dim=1)
            for layer in (1, 2):
                signal = F.softplus(signal @ layers[f"{side}{layer}_weight"] + layers[f"{side}{layer}_bias"])
            return signal

        encoded = two_layers(images, "encode")
        mean, spread = encoded @ mean_weight + mean_bias, encoded @ spread_weight + spread_bias
        return bound(images, noise, mean, spread, lambda latent: two_layers(latent, "decode") @ weight + bias)

    return loss


def bound_with_lost_epsilon(images: Tensor, noise: Tensor, mean: Tensor, spread: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
    """An epsilon of 1e-10 is lost when it is added to 1 in single precision."""
    spread = spread.clamp(-87.0, 87.0)
    picture = torch.sigmoid(decode(mean + torch.sqrt(torch.exp(spread)) * noise))
    dark = images * torch.log(picture + 1e-10)
    light = (1 - images) * torch.log(1e-10 + 1 - picture)
    divergence = -0.5 * (1 + spread - mean.square() - torch.exp(spread)).sum(dim=1)
    return (divergence - (dark + light).sum(dim=1)).mean()


def bound_with_root_of_exp(images: Tensor, noise: Tensor, mean: Tensor, spread: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
    """The deviation is the root of a variance that may underflow to 0."""
    variance = torch.exp(spread.clamp(max=87.0))
    deviation = torch.sqrt(variance)
    picture = torch.sigmoid(decode(mean + deviation * noise))
    dark = images * torch.log(picture.clamp(1e-6, 1.0))
    light = (1 - images) * torch.log((1 - picture).clamp(1e-6, 1.0))
    divergence = -0.5 * (1 + spread - mean.square() - variance).sum(dim=1)
    return (divergence - (dark + light).sum(dim=1)).mean()


def bound_mended(images: Tensor, noise: Tensor, mean: Tensor, spread: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
    """An epsilon that single precision keeps beside 1, and half of the exponent instead of a root."""
    spread = spread.clamp(-30.0, 30.0)
    picture = torch.sigmoid(decode(mean + torch.exp(0.5 * spread) * noise))
    likelihood = images * torch.log(picture + 1e-7) + (1 - images) * torch.log(1e-7 + 1 - picture)
    divergence = -0.5 * (1 + spread - mean.square() - torch.exp(spread)).sum(dim=1)
    return (divergence - likelihood.sum(dim=1)).mean()


# stochastic computing


def stochastic_computing(penalty: Callable[[Tensor], Tensor], *, eps_sum: float = 0.0, eps_gain: float = 0.0) -> Callable[..., Tensor]:
    """Two layers whose signals stay within ±1; the scale that was divided out is carried beside them, and multiplied back at the end."""

    def product(signal: Tensor, scale: Tensor, weight: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        largest = scale.max()
        columns = weight.abs().sum(dim=0) + eps_sum
        shrunk = (signal * (scale / largest)) @ weight / columns
        return (shrunk * gain).clamp(-1, 1), largest * columns / (gain + eps_gain)

    def add(signal: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return (signal + bias / scale).clamp(-1, 1)

    def loss(
        images: Tensor,
        labels: Tensor,
        hidden_weight: Tensor,
        hidden_bias: Tensor,
        hidden_gain: Tensor,
        weight: Tensor,
        bias: Tensor,
        gain: Tensor,
    ) -> Tensor:
        signal, scale = product(images, torch.ones(images.shape[1]), hidden_weight, hidden_gain)
        signal, scale = product(add(signal, scale, hidden_bias), scale, weight, gain)
        logits = add(signal, scale, bias) * scale
        entropy = F.cross_entropy(logits, labels)
        return entropy + sum(penalty(tensor) for tensor in (hidden_weight, hidden_bias, weight, bias))

    return loss


def beyond_one(tensor: Tensor) -> Tensor:
    return 0.25 * (2 * (tensor.abs() - tensor.abs().clamp(-1, 1))).sum()


def half_square(tensor: Tensor) -> Tensor:
    return 0.0006 * tensor.square().sum()
