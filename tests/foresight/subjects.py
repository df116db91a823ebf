"""The corpus that foresight is held against: the 63 programs with 79 numerical bugs of GRIST (ESEC/FSE 2021), re-expressed in torch.

The facts come from the repository Jacob-yen/GRIST (programs, and what its search drives to the edge: that names operator and variable), from
RANUM's study of the same programs (ICSE 2023, llylly/RANUM, empirical_study: where each is kept, and whether its authors mended it), from
ForeverZyh/TensorFlow-Program-Bugs (bugs and fixes of the eight oldest) and from the projects themselves. Formulas and code are our own.

What differs from the originals. Shapes are small: a few rows, 16 or 64 pixels, narrow layers. Bounds of the weights are wider in return, so that
logits reach no further than the original width does with weights of about ±0.5. Inputs are within the range of the data, as in the search; where
the search moves them freely, within ±100. Dropout is left out, as in the search. Many subjects are copies of one tutorial: each has its row, and
they share a formula. Letters are in the order of the repository's run_all.py (RANUM's 28a to 28d are 28d, 28c, 28a, 28b here, its 11a to 11c are
11c, 11a, 11b).

The stored copies of three subjects (4, 5, 13) have another operator than the project: a logarithm where it has an exponential, a root where it has
a logarithm. The 79 rows hold the project's formula, which the search's objective fits; the copies' are in EXTRAS. In five autoencoders (35, 36,
39, 43, 49) the copy clips the log-variance at -100, which is an edge only where subnormal numbers are flushed to zero, as TensorFlow does on a
CPU; here it has no lower clip, as in the authors' own programs.

Where only the gradient tells: 8 bugs never reach the loss (a clip or a root hides them), and 47 more have batches with a finite loss and a ruined
gradient, most of them because 1 / p overflows some 15 nats of logits before log(p) does. GRIST's search reads the loss of each step, so it meets
such a bug one step late, in the weights; RANUM and DEBAR look at what an operator is given, and say nothing of a derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from foresight import formulas as f
from foresight.corpus import Batch, Bug, Kind, Loss, Program, Subject, Trigger, driven, healthy, setting
from torch import Tensor

PIXELS, ROWS, CLASSES = 16, 6, 10
OURS = "log_softmax (ours)"
NAIVE_LOG = "return reduce(-(labels * torch.log(probabilities)).sum(dim=1))"
LAST_LOG = "return -(labels * torch.log(probabilities)).sum(dim=1).mean()"
FREE = (-100.0, 100.0)  # inputs that the search moves as it likes


def within(batch: Callable[[], Batch], weights: float, inputs: tuple[float, float] = (0.0, 1.0)) -> dict[str, tuple[float, float]]:
    """± `weights` of what is learnt, `inputs` of every other tensor of floats but labels."""
    floats = {name: tensor for name, tensor in batch().items() if tensor.is_floating_point() and name != "labels"}
    return {name: (-weights, weights) if tensor.requires_grad else inputs for name, tensor in floats.items()}


def softmax_bug(name: str, line: str = NAIVE_LOG, inputs: float = 1.0) -> Bug:
    """The logarithm of a softmax that underflows. Unseen: of one that is subnormal, log(p) is finite and 1 / p is not."""
    return Bug(name, "log", Kind.LOG_OF_ZERO, line, driven(80.0, -80.0, inputs=inputs), unseen=driven(48.0, -48.0, inputs=inputs))


def program(
    script: str,
    loss: Loss,
    mended: Loss,
    fix: str,
    batch: Callable[[], Batch],
    *bugs: Bug,
    weights: float = 20.0,
    inputs: tuple[float, float] = (0.0, 1.0),
) -> Program:
    return Program(script, loss, mended, fix, batch, within(batch, weights, inputs), bugs)


def classifier(
    name: str,
    script: str,
    network: Loss,
    batch: Callable[[], Batch],
    reduce: Callable[[Tensor], Tensor],
    mended: f.Criterion | None = None,
    fix: str = OURS,
    *,
    reached: float = 1.0,
    weights: float = 20.0,
    inputs: tuple[float, float] = (0.0, 1.0),
) -> tuple[Program]:
    """Cross entropy as one-hot labels times the logarithm of a softmax. reached: what the trigger sets the inputs to."""
    loss, twin = f.on(network, f.log_of_softmax(reduce)), f.on(network, mended or f.log_softmax(reduce))
    return (program(script, loss, twin, fix, batch, softmax_bug(name, inputs=reached), weights=weights, inputs=inputs),)


# healthy batches

IMAGES = healthy({"images": (ROWS, PIXELS)}, {"weight": (PIXELS, CLASSES), "bias": (CLASSES,)}, labels=CLASSES)
HEAD = {"hidden_weight": (16, 16), "hidden_bias": (16,), "weight": (16, CLASSES), "bias": (CLASSES,)}
ONE = {"conv1_weight": (1, 1, 5, 5), "conv1_bias": (1,)}
TWO = {"conv1_weight": (4, 1, 5, 5), "conv1_bias": (4,), "conv2_weight": (4, 4, 5, 5), "conv2_bias": (4,)}
THREE = TWO | {"conv3_weight": (16, 4, 5, 5), "conv3_bias": (16,)}
WHERE = {"where_weight": (64, 4), "where_bias": (4,), "turn_weight": (4, 6), "turn_bias": (6,)}
PICTURES, WITH_ONE, WITH_THREE, TURNED = (
    healthy({"images": (ROWS, 1, 8, 8)}, layers | HEAD, labels=CLASSES) for layers in (TWO, ONE, THREE, TWO | WHERE)
)
LAST = {"weight": (16, CLASSES), "bias": (CLASSES,)}
HIDDEN1 = {"hidden1_weight": (PIXELS, 16), "hidden1_bias": (16,)}
HIDDEN2 = {"hidden2_weight": (16, 16), "hidden2_bias": (16,)}
ONE_HIDDEN = healthy({"images": (ROWS, PIXELS)}, HIDDEN1 | LAST, labels=CLASSES)
TWO_HIDDEN = healthy({"images": (ROWS, PIXELS)}, HIDDEN1 | HIDDEN2 | LAST, labels=CLASSES)
MEASURES = healthy({"images": (ROWS, 2)}, {"weight": (2, 3), "bias": (3,)}, labels=3)
TABLE = healthy({"images": (8, 4)}, {"weight": (4, 3), "bias": (3,)}, labels=3, within=(1.0, 7.0))
LOGITS = healthy({}, {"logits": (3, 5)}, labels=5)


def yes_no_table(columns: int, *labels: float) -> Callable[[], Batch]:
    shapes = {"weight": (columns, 1), "bias": (1,)}
    return healthy({"images": (len(labels), columns)}, shapes, within=(0.0, 6.0), more={"labels": torch.tensor([labels]).T.float()})


# formulas that many subjects share


def regression(
    name: str, script: str, reduce: Callable[[Tensor], Tensor] = f.averaged, mended: f.Criterion | None = None, fix: str = OURS
) -> tuple[Program]:
    """A linear layer on the pixels, the first program of the TensorFlow tutorial."""
    return classifier(name, script, f.linear, IMAGES, reduce, mended, fix)


def two_convolutions(
    name: str, script: str, reduce: Callable[[Tensor], Tensor] = f.summed, mended: f.Criterion | None = None, fix: str = OURS
) -> tuple[Program]:
    """Two convolutions with pooling and a hidden layer, the second program of the TensorFlow tutorial."""
    return classifier(name, script, f.convolutional, PICTURES, reduce, mended, fix)


def measures(name: str, script: str) -> tuple[Program]:
    return classifier(name, script, f.linear, MEASURES, f.summed, weights=100.0)


def table(name: str, script: str, reduce: Callable[[Tensor], Tensor] = f.averaged) -> tuple[Program]:
    return classifier(name, script, f.linear, TABLE, reduce, reached=10.0, inputs=FREE)


def logits_alone(name: str, script: str) -> tuple[Program]:
    def apart(margin: float) -> Trigger:
        return setting(logits=torch.tensor([margin, 0, 0, 0, 0]), labels=torch.eye(5)[1])

    bug = Bug(name, "log", Kind.LOG_OF_ZERO, NAIVE_LOG, apart(150.0), unseen=apart(96.0))
    naive, twin = f.on(f.given, f.log_of_softmax(f.averaged)), f.on(f.given, f.log_softmax(f.averaged))
    return (program(script, naive, twin, OURS, LOGITS, bug, weights=200.0),)


YES, NO = "yes = labels * torch.log(hypothesis)", "no = (1 - labels) * torch.log(1 - hypothesis)"


def logistic(name: str, script: str, batch: Callable[[], Batch]) -> tuple[Program]:
    """One logit a row. The search drives the sigmoid to 0; of the sigmoid of -95, 0 is left in single precision, and nothing subnormal before."""
    bug = Bug(name, "log", Kind.LOG_OF_ZERO, YES, driven(-150.0, label=None, inputs=10.0))
    naive, twin = f.on(f.linear, f.yes_or_no(torch.sigmoid)), f.on(f.linear, f.yes_or_no_of_logits)
    return (program(script, naive, twin, "binary_cross_entropy_with_logits (ours)", batch, bug, inputs=FREE),)


def boltzmann(name: str, script: str) -> tuple[Program]:
    """A restricted Boltzmann machine: log(exp(x) + 1) of the field at every hidden unit."""
    batch = healthy(
        {"images": (ROWS, PIXELS), "draws_hidden": (ROWS, 8), "draws_visible": (ROWS, PIXELS)},
        {"weight": (PIXELS, 8), "visible_bias": (PIXELS,), "hidden_bias": (8,)},
    )
    bug = Bug(name, "exp", Kind.EXP_OVERFLOW, "return field.exp().add(1).log()", setting(images=1.0, weight=10.0))
    return (program(script, f.free_energy(f.log_one_plus_exp), f.free_energy(F.softplus), "softplus (ours)", batch, bug),)


SOFTPLUS_OF_ONE = math.log1p(math.e)  # what reaches a last layer whose hidden layers have weights of 0 and biases of 1


def autoencoder(number: int, script: str, *, conditional: bool = False) -> tuple[Program, Program]:
    """A variational autoencoder with two bugs, each of which the search has in a copy of its own.

    The authors mended the logarithm of 35 (an epsilon of 1e-7); the others have it still.
    """
    told, hidden, latent = CLASSES if conditional else 0, 6, 2
    layers = {
        "encode1": (PIXELS + told, hidden), "encode2": (hidden, hidden), "mean": (hidden, latent), "spread": (hidden, latent),
        "decode1": (latent + told, hidden), "decode2": (hidden, hidden),
    }  # fmt: skip
    learnt = {f"{name}_weight": shape for name, shape in layers.items()} | {f"{name}_bias": shape[1:] for name, shape in layers.items()}
    learnt |= {"weight": (hidden, PIXELS), "bias": (PIXELS,)}
    batch = healthy({"images": (ROWS, PIXELS), "noise": (ROWS, latent)}, learnt, labels=told)
    bright = driven(40.0, label=None, features=SOFTPLUS_OF_ONE)  # every pixel is painted white: a sigmoid of 1
    sure = setting(
        encode1_weight=0.0, encode1_bias=1.0, encode2_weight=0.0, encode2_bias=1.0, spread_weight=-130 / (hidden * SOFTPLUS_OF_ONE)
    )
    line_of_log, line_of_root = "light = (1 - images) * torch.log(1e-10 + 1 - picture)", "deviation = torch.sqrt(variance)"
    bugs = (
        (script, f.bound_with_lost_epsilon, Bug(f"{number}a", "log", Kind.LOG_OF_ZERO, line_of_log, bright)),
        (f"{script}_sqrt", f.bound_with_root_of_exp, Bug(f"{number}b", "sqrt", Kind.SQRT_OF_ZERO, line_of_root, sure, silent=True)),
    )
    twin = f.autoencoder(f.bound_mended, conditional=conditional)
    whose = "the authors' 1e-7, and our" if number == 35 else "1e-7 as the authors of 35 have it, and our"
    first, second = (
        program(f"{path}_grist.py", f.autoencoder(bound, conditional=conditional), twin, f"{whose} exp(log-variance / 2)", batch, bug)
        for path, bound, bug in bugs
    )
    return first, second


# programs of one subject


def softmax_as_yes_and_no() -> tuple[Program, ...]:
    """A softmax whose probabilities are each taken as a yes or no."""
    tie, near_tie = driven(80.0, -80.0, 80.0, -80.0), driven(48.0, -48.0, 48.0, -48.0)  # two classes share: 1 - p is 0.5
    bugs = (
        Bug("2a", "log", Kind.LOG_OF_ZERO, YES, tie, unseen=near_tie),
        Bug("2b", "log", Kind.LOG_OF_ZERO, NO, driven(20.0, -20.0)),
    )
    loss, twin = f.on(f.linear, f.yes_or_no(f.softmax)), f.on(f.linear, f.yes_or_no_clipped(f.softmax))
    return (program("ID_2/models/logistic_regression", loss, twin, "both clipped at 1e-10 (the authors')", IMAGES, *bugs),)


def sigmoid_network() -> tuple[Program, ...]:
    batch = healthy({"images": (ROWS, PIXELS)}, {"hidden_weight": (PIXELS, 8), "weight": (8, CLASSES)}, labels=CLASSES)
    bugs = (
        Bug("9a", "log", Kind.LOG_OF_ZERO, NO, driven(40.0, label=None, features=0.5)),
        Bug("9b", "log", Kind.LOG_OF_ZERO, YES, driven(-150.0, label=None, features=0.5)),
    )
    loss, twin = f.on(f.sigmoid_perceptron, f.yes_or_no(torch.sigmoid)), f.on(f.sigmoid_perceptron, f.yes_or_no_clipped(torch.sigmoid))
    return (program("ID_9/soips7_grist.py", loss, twin, "both clipped at 1e-10 (the answer's)", batch, *bugs, weights=50.0),)


def softmax_by_hand(script: str, criterion: f.Criterion, bug: Bug) -> Program:
    """exp by sum of exp, on two hidden layers: TensorFuzz, and a study of it that has three variants."""
    twin = f.on(f.perceptron, f.log_softmax(f.averaged))
    return program(script, f.on(f.perceptron, criterion), twin, OURS, TWO_HIDDEN, bug)


def overflow_below(name: str) -> Bug:
    """inf below the line: the probability is 0, is clipped to 1e-6, and the loss is 13.8 at most. Backward, exp multiplies a gradient of 0 by inf."""
    return Bug(name, "exp", Kind.EXP_OVERFLOW, "below = torch.exp(logits).sum(dim=1, keepdim=True)", driven(100.0), silent=True)


BY_SUM = "probabilities = torch.exp(logits) / torch.exp(logits).sum(dim=1, keepdim=True)"
NOTHING_BELOW = Bug(
    "11c", "div", Kind.DIVISION_BY_ZERO, "probabilities = above / below", driven(-110.0), silent=True
)  # a probability of inf is clipped to 1
NOTHING_BY_NOTHING = Bug(
    "16c",
    "div",
    Kind.DIVISION_BY_ZERO,
    "probabilities = exponentials / exponentials.sum(dim=1, keepdim=True)",
    driven(-110.0),
    unseen=driven(-95.0),
)
TENSORFUZZ = (
    softmax_by_hand("ID_11/nan_model_exp_grist.py", f.clipped_above_the_line, overflow_below("11a")),
    softmax_by_hand("ID_11/nan_model_log_grist.py", f.exp_by_sum, softmax_bug("11b", LAST_LOG)),
    softmax_by_hand("ID_11/nan_model_truediv_grist.py", f.clipped_above_the_line, NOTHING_BELOW),
)
FUZZ = (
    softmax_by_hand("ID_16/nan_model_grist.py", f.clipped_above_the_line, overflow_below("16a")),
    softmax_by_hand("ID_16/nan_model_log_grist.py", f.exp_by_sum_of_capped, softmax_bug("16b", LAST_LOG)),
    softmax_by_hand("ID_16/nan_model_truediv_grist.py", f.exp_by_sum_of_capped_and_more, NOTHING_BY_NOTHING),
)


def graph_autoencoder() -> tuple[Program, ...]:
    batch = healthy({}, {"mean": (3, 2), "log_variance": (3, 2)})
    bug = Bug(
        "4",
        "exp",
        Kind.EXP_OVERFLOW,
        "return -0.5 * (1 + log_variance - mean**2 - torch.exp(log_variance)).sum(dim=1).mean()",
        setting(log_variance=100.0),
    )
    return (
        program(
            "torch_geometric/nn/models/autoencoder.py",
            f.kl_of_encoding,
            f.kl_of_clamped_encoding,
            "log-variance of at most 10 (the authors')",
            batch,
            bug,
            weights=200.0,
        ),
    )


RANKED = torch.tensor([80.0, -80, -80, 80, -80, -80])[:, None]
RELEVANCE = {"relevance": torch.tensor([1.0, 0, 0, 0, 1, 0])[:, None]}
SCORES = healthy({}, {"scores": (6, 1)}, more=RELEVANCE)


def document_ranks() -> tuple[Program, ...]:
    line = "return -(relevance.view(-1, 3) * torch.log(ranked)).sum(dim=1).mean()"
    bug = Bug("5", "log", Kind.LOG_OF_ZERO, line, setting(scores=RANKED), unseen=setting(scores=RANKED * 0.6))
    fix = "an epsilon of 2.2e-16 (the authors')"
    return (
        program(
            "matchzoo/losses/rank_cross_entropy_loss.py",
            f.rank_cross_entropy,
            f.rank_cross_entropy_of_more,
            fix,
            SCORES,
            bug,
            weights=200.0,
        ),
    )


def nll_of_log() -> tuple[Program, ...]:
    """The label's logarithm is picked. Another class of probability 0 is not read, and has a gradient of 0 / 0."""
    batch = healthy({"images": (ROWS, PIXELS)}, HIDDEN1 | LAST, labels=CLASSES, index=True)
    bug = Bug(
        "12",
        "log",
        Kind.LOG_OF_ZERO,
        "log_probs = torch.log(torch.softmax(logits, dim=1))",
        driven(80.0, -80.0),
        unseen=driven(80.0, -80.0, label=0),
    )
    loss, twin = f.on(f.perceptron, f.picked), f.on(f.perceptron, f.picked_of_more)
    return (program("ID_12/skorch/classifier_grist.py", loss, twin, "an epsilon of 1.2e-7 (the authors')", batch, bug),)


def maze() -> tuple[Program, ...]:
    learnt = {"see": (4, 2, 3, 3), "see_bias": (4,), "reward": (1, 4, 1, 1), "act": (5, 1, 3, 3), "expect": (5, 1, 3, 3), "weight": (5, 8)}
    states = {"rows": torch.tensor([0, 3, 5, 7]), "columns": torch.tensor([7, 2, 5, 0])}
    batch = healthy({"maze": (4, 2, 8, 8)}, learnt, labels=8, index=True, more=states)
    here = torch.zeros(3, 3)
    here[1, 1] = 1.0

    def at(*logits: float, label: int = 1) -> Trigger:
        return lambda healthy: setting(reward=0.25, act=here)(driven(*logits, label=label)(healthy))

    line = "log_probs = torch.log(torch.softmax(logits, dim=1))"
    bug = Bug("15", "log", Kind.LOG_OF_ZERO, line, at(80.0, -80.0), unseen=at(80.0, -80.0, label=0))
    loss, twin = f.on(f.value_iteration, f.picked), f.on(f.value_iteration, f.picked_of_logits)
    return (program("ID_15/train_grist.py", loss, twin, OURS, batch, bug),)


def segmentation() -> tuple[Program, ...]:
    learnt = {"down": (4, 1, 3, 3), "deep": (4, 4, 3, 3), "up": (4, 4, 2, 2), "weight": (8, 2), "bias": (2,)}
    masks = torch.eye(2)[torch.arange(2 * 8 * 8) % 2]
    batch = healthy({"images": (2, 1, 8, 8)}, learnt, more={"labels": masks})
    bug = Bug("17", "exp", Kind.EXP_OVERFLOW, "exponentials = torch.exp(logits)", setting(images=1.0, down=1.0, weight=10.0))
    fix = "softmax from the maximum (ours; a report proposes a clip at 50)"
    return (program("ID_17/tf_unet/layers.py", f.on(f.u_net, f.dice), f.on(f.u_net, f.dice_of_softmax), fix, batch, bug),)


def adversaries() -> tuple[Program, ...]:
    learnt = HIDDEN1 | HIDDEN2 | {"weight": (16, 1), "bias": (1,)}
    batch = healthy({"real": (ROWS, PIXELS), "fake": (ROWS, PIXELS)}, learnt, within=(-1.0, 1.0))
    line = "return -(torch.log(says_real) + torch.log(1.0 - says_fake + 1e-8)).mean()"
    bug = Bug("31", "log", Kind.LOG_OF_ZERO, line, driven(-150.0, label=None))
    fix = "an epsilon of 1e-2 (in the authors' file, as a comment)"
    return (program("ID_31/GAN_MNIST_grist.py", f.discriminator, f.discriminator_of_more, fix, batch, bug, inputs=(-1.0, 1.0)),)


def segments() -> tuple[Program, ...]:
    batch = healthy({"values": (6,)}, {"scores": (6,)})
    bug = Bug("13", "exp", Kind.EXP_OVERFLOW, "exponentials = torch.exp(scores)", setting(scores=100.0))
    fix = "from the maximum of the node (the authors')"
    return (
        program(
            "torch_geometric/utils/softmax.py", f.attention_of_edges, f.attention_of_edges_from_maximum, fix, batch, bug, weights=200.0
        ),
    )


def stochastic(script: str, penalty: Callable[[Tensor], Tensor], gains: tuple[int, int], by_gain: str, by_sum: str) -> Program:
    """The gains of both layers are learnt; the search drives one to 0, and in the other copy the weights that lead to one unit."""
    learnt = {
        "hidden_weight": (PIXELS, 8),
        "hidden_bias": (8,),
        "hidden_gain": gains[:1],
        "weight": (8, CLASSES),
        "bias": (CLASSES,),
        "gain": gains[1:],
    }
    batch = healthy({"images": (ROWS, PIXELS)}, learnt, labels=CLASSES, around={"hidden_gain": 8.0, "gain": 8.0})
    shrunk, scale = (
        "shrunk = (signal * (scale / largest)) @ weight / columns",
        "return (shrunk * gain).clamp(-1, 1), largest * columns / (gain + eps_gain)",
    )
    bugs = (
        Bug(by_gain, "div", Kind.DIVISION_BY_ZERO, scale, setting(hidden_gain=0.0), unseen=setting(hidden_gain=1e-25)),
        Bug(by_sum, "div", Kind.DIVISION_BY_ZERO, shrunk, setting(hidden_weight=0.0), number=2),
    )
    loss, twin = f.stochastic_computing(penalty), f.stochastic_computing(penalty, eps_sum=1e-7, eps_gain=1e-6)
    made = program(script, loss, twin, "1e-6 added to the gain (the authors'), 1e-7 to the sum (ours)", batch, *bugs, weights=5.0)
    made.bounds.update(hidden_gain=(0.0, 16.0), gain=(0.0, 16.0))
    return made


STOCHASTIC = (
    stochastic("ID_28/sc_train_creg_grist.py", f.beyond_one, (8, CLASSES), "28a", "28b"),
    stochastic("ID_28/sc_train_l2reg_grist.py", f.half_square, (1, 1), "28c", "28d"),
)


def one_criterion(name: str, script: str, criterion: f.Criterion) -> tuple[Program, ...]:
    twin = f.on(f.linear, f.log_softmax(f.averaged))
    return (program(script, f.on(f.linear, criterion), twin, OURS, IMAGES, softmax_bug(name, LAST_LOG)),)


STUDY = "https://github.com/ForeverZyh/TensorFlow-Program-Bugs/tree/master/"
TUTORIAL = "https://github.com/aymericdamien/TensorFlow-Examples/blob/master/examples/2_BasicModels/logistic_regression.py"
START = "https://github.com/HyundongHwang/PyTorchDeepLearningStart/blob/master/"
NIKOLENKO = "https://github.com/iusaspb/deep_learning_Nikolenko_and_Co/blob/master/"
ZERO_TO_ALL = "https://github.com/hunkim/DeepLearningZeroToAll/blob/master/"
BMI = "https://github.com/kaneshirok/ml-plactice/blob/master/src/ch5/"
GESTURE = "https://github.com/Joooey/Tensorflow_gesture/blob/master/Demo/Mnist.py"
HOMEWORK = "https://github.com/yannJu/Data-Science"
SIX, FOUR = yes_no_table(2, 0, 0, 0, 1, 1, 1), yes_no_table(2, 0, 1, 1, 0)
MNIST, CONVOLUTIONS = "softmax regression on digits", "two convolutions on digits"
LOGISTIC, CARDS, SOFTMAX = (
    "logistic regression on six points",
    "softmax regression on eight rows of a table",
    "the cost of a softmax, as a lesson",
)
VAE, CVAE, RBM = (
    "variational autoencoder of digits",
    "conditional variational autoencoder of digits",
    "restricted Boltzmann machine on digits",
)

SUBJECTS = (
    Subject(1, "GitHub-IPS-1", "spatial transformer on cluttered digits", STUDY + "Github/IPS-1",
            classifier("1", "ID_1/ghips1_grist.py", f.spatial_transformer, TURNED, f.summed, f.log_softmax(f.averaged), "log_softmax, averaged (the authors')")),
    Subject(2, "GitHub-IPS-6", "softmax regression on digits, each class a yes or no", STUDY + "Github/IPS-6", softmax_as_yes_and_no()),
    Subject(3, "GitHub-IPS-9", MNIST, STUDY + "Github/IPS-9",
            regression("3", "ID_3/ghips9_grist.py", f.summed, f.log_of_more(f.averaged, 1e-8), "an epsilon of 1e-8 (the authors')")),
    Subject(4, "Pytorch_Geometric_Fork", "KL of a variational graph autoencoder", "https://github.com/JonasSchult/pytorch_geometric_fork", graph_autoencoder()),
    Subject(5, "MatchZoo", "rank cross entropy of documents", "https://github.com/NTMC-Community/MatchZoo-py", document_ranks()),
    Subject(6, "StackOverFlow-1", CONVOLUTIONS, STUDY + "StackOverflow/IPS-1",
            two_convolutions("6", "ID_6/soips1_grist.py", f.summed, f.log_of_clipped(f.summed, 1e-10), "clipped at 1e-10 (the answer's)")),
    Subject(7, "StackOverFlow-2", CONVOLUTIONS, STUDY + "StackOverflow/IPS-2",
            two_convolutions("7", "ID_7/soips2_grist.py", f.summed, f.log_of_more(f.summed, 1e-9), "an epsilon of 1e-9 (the answer's)")),
    Subject(8, "StackOverFlow-6", CONVOLUTIONS, STUDY + "StackOverflow/IPS-6",
            two_convolutions("8", "ID_8/soips6_grist.py", f.summed, f.log_of_clipped(f.summed, 1e-10), "clipped at 1e-10 (the answer's)")),
    Subject(9, "StackOverFlow-7", "two layers of sigmoids on digits", STUDY + "StackOverflow/IPS-7", sigmoid_network()),
    Subject(10, "StackOverFlow-14", MNIST, STUDY + "StackOverflow/IPS-14",
            regression("10", "ID_10/soips14_grist.py", f.summed, f.log_softmax(f.summed), "log_softmax (ours; the answer halves the learning rate, which is no fix)")),
    Subject(11, "TensorFuzz", "a model that is there to fail", "https://github.com/brain-research/tensorfuzz/blob/master/examples/nans/nan_model.py", TENSORFUZZ),
    Subject(12, "Skorch", "NLL of log(softmax) in a classifier for scikit-learn", "https://github.com/skorch-dev/skorch", nll_of_log()),
    Subject(13, "Pytorch_Geometric", "softmax over the edges of a node", "https://github.com/pyg-team/pytorch_geometric/issues/53", segments()),
    Subject(14, "MNIST", "LeNet-5 on digits", "https://github.com/betasspace/MNIST/blob/master/v3/train.py",
            classifier("14", "ID_14/v3/train_grist.py", f.convolutional, WITH_THREE, f.summed, f.log_softmax(f.averaged), "log_softmax (the authors', as a comment)")),
    Subject(15, "Tensorflow_Value_Iteration_Networks_V1", "value iteration network on mazes", "https://github.com/OliverRichter/map-reader", maze()),
    Subject(16, "FuzzForTensorflow", "TensorFuzz's model in three variants", "https://github.com/karlxigua/FuzzForTensorFlow", FUZZ),
    Subject(17, "TF_Unet", "dice loss of a U-Net", "https://github.com/jakeret/tf_unet/issues/28", segmentation()),
    Subject(18, "Hands-On TensorFlow", MNIST, "https://github.com/tonanhngo/handon-tensorflow/blob/master/code-10-image.py", regression("18", "ID_18/code_10_image_grist.py")),
    Subject(19, "Python-Tensorflow", "softmax regression on digits, a ReLU after the softmax", "https://github.com/tangsong41/stu_py",
            one_criterion("19", "ID_19/mnist_grist.py", f.log_of_relu)),
    Subject(20, "Tensorflow-Examples", MNIST, TUTORIAL, regression("20", "ID_20/logistic_regression_grist.py")),
    Subject(21, "Tensorflow-Examples-Tutorials-MNIST", MNIST, "", regression("21", "ID_21/mnist_softmax_grist.py", f.summed)),
    Subject(22, "git1_rbm", RBM, "https://github.com/samparizi/git1_rbm/blob/master/My_pytorch1.py", boltzmann("22", "ID_22/My_pytorch1_grist.py")),
    Subject(23, "pytorch_tu", SOFTMAX, "", logits_alone("23", "ID_23/ch5.3_softmax_grist.py")),
    Subject(24, "Tensorflow_Gesture_Demo", CONVOLUTIONS, GESTURE, two_convolutions("24", "ID_24/Mnist_grist.py")),
    Subject(25, "Tensorflow_MNIST", MNIST, "", regression("25", "ID_25/mnist_grist.py")),
    Subject(26, "PyTorchDeepLearningStart.0401_logistic_regression", LOGISTIC, START + "0401_logistic_regression.py",
            logistic("26", "ID_26/0401_logistic_regression_grist.py", SIX)),
    Subject(27, "PyTorchDeepLearningStart.0503_softmax_regression_cost", SOFTMAX, START + "0503_softmax_regression_cost.py",
            logits_alone("27", "ID_27/0503_softmax_regression_cost_grist.py")),
    Subject(28, "SC_DNN", "network for stochastic computing, its scales carried along", "https://github.com/adamsolomou/SC-DNN/issues/1", STOCHASTIC),
    Subject(29, "MachineLearning", CONVOLUTIONS, "https://github.com/mevanoff24/MachineLearning", two_convolutions("29", "ID_29/temp_grist.py")),
    Subject(30, "Tensorflow_In_MachineLearning", MNIST, "", regression("30", "ID_30/softmax_grist.py", f.summed)),
    Subject(31, "GAN_MNIST", "discriminator of a GAN", "", adversaries()),
    Subject(32, "PyTorchDeepLearningStart.0504_softmax_regression", CARDS, START + "0504_softmax_regression.py",
            table("32", "ID_32/0504_softmax_regression_grist.py", f.summed)),
    Subject(33, "TodayILearned.logistic_classification", LOGISTIC, "", logistic("33", "ID_33/logistic_classification_grist.py", SIX)),
    Subject(34, "TodayILearned.softmax_classification", CARDS, "", table("34", "ID_34/softmax_classification_grist.py")),
    Subject(35, "deep_learning_Nikolenko_and_Co.ch10_04_01", VAE, NIKOLENKO + "ch10_04_01.py", autoencoder(35, "ID_35/ch10_04_01")),
    Subject(36, "deep_learning_Nikolenko_and_Co.ch10_04_03_Pic_10_05", VAE, NIKOLENKO + "ch10_04_03_Pic_10_05.py", autoencoder(36, "ID_36/ch10_04_03_Pic_10_05")),
    Subject(37, "MachineLearning.lab05", LOGISTIC, ZERO_TO_ALL + "lab-05-1-logistic_regression.py", logistic("37", "ID_37/lab-05-1-logistic_regression_grist.py", SIX)),
    Subject(38, "MachineLearning.lab09", "logistic regression on exclusive or", ZERO_TO_ALL + "lab-09-1-xor.py", logistic("38", "ID_38/lab-09-1-xor_grist.py", FOUR)),
    Subject(39, "deep_learning_Nikolenko_and_Co.ch10_04_04_Pic_10_06", VAE, NIKOLENKO + "ch10_04_04_Pic_10_06.py", autoencoder(39, "ID_39/ch10_04_04_Pic_10_06")),
    Subject(40, "ml_plactice.bmi", "softmax regression on weight and height", BMI + "bmi.py", measures("40", "ID_40/src/ch5/bmi_grist.py")),
    Subject(41, "ml_plactice.tb_bmi", "softmax regression on weight and height", BMI + "tb-bmi.py", measures("41", "ID_41/src/ch5/tb-bmi_grist.py")),
    Subject(42, "ml_plactice.tb_bmi2", "softmax regression on weight and height", BMI + "tb-bmi2.py", measures("42", "ID_42/src/ch5/tb-bmi2_grist.py")),
    Subject(43, "deep_learning_Nikolenko_and_Co.ch10_04_05_Pic_10_07", CVAE, NIKOLENKO + "ch10_04_05_Pic_10_07.py",
            autoencoder(43, "ID_43/ch10_04_05_Pic_10_07", conditional=True)),
    Subject(44, "CNNRelationExtraction", "one convolution, of relations or digits", "https://github.com/hadyelsahar/CNN-RelationExtraction/issues/8",
            classifier("44", "ID_44/CNN_grist.py", f.convolutional, WITH_ONE, f.summed)),
    Subject(45, "DataStructure", "softmax regression, and two convolutions, on digits", "",
            regression("45a", "ID_45/MNIST_Digit_classification_using_CNN_grist.py")
            + two_convolutions("45b", "ID_45/MNIST_Digit_classification_using_CNN2_grist.py", f.averaged)),
    Subject(46, "Study.torch20_softmax", SOFTMAX, "", logits_alone("46", "ID_46/torch20_softmax_grist.py")),
    Subject(47, "Study.torch21_Softmax_Reg1", CARDS, "", table("47", "ID_47/torch21_Softmax_Reg1_grist.py")),
    Subject(48, "Dive_python", "a hidden layer, and softmax regression, on digits", "https://github.com/MarsTuxz/Dive_python/blob/master/tensorflow_learn/day01.py",
            classifier("48a", "ID_48/day01_grist.py", f.perceptron, ONE_HIDDEN, f.averaged) + regression("48b", "ID_48/day01_2_grist.py")),
    Subject(49, "deep_learning_Nikolenko_and_Co.ch10_04_06_Pic_10_08", CVAE, NIKOLENKO + "ch10_04_06_Pic_10_08.py",
            autoencoder(49, "ID_49/ch10_04_06_Pic_10_08", conditional=True)),
    Subject(50, "ImportantProjects", MNIST, "", regression("50", "ID_50/DL_1L_grist.py")),
    Subject(51, "RBM", RBM, "", boltzmann("51", "ID_51/rbm_grist.py")),
    Subject(52, "karch", MNIST, "", regression("52", "ID_52/5_mnist_full_connection_grist.py", f.summed)),
    Subject(53, "DataScience.h02", "logistic regression on a line of points", HOMEWORK, logistic("53", "ID_53/h02_20191644_grist.py", yes_no_table(1, 1, 1, 1, 0, 0, 0))),
    Subject(54, "DataScience.h03", CARDS, HOMEWORK, table("54", "ID_54/h03_20191644_grist.py")),
    Subject(55, "practice", CONVOLUTIONS, "", two_convolutions("55", "ID_55/logistic_regression_grist.py", f.averaged)),
    Subject(56, "start_beginner_kaggle.01", LOGISTIC, "", logistic("56", "ID_56/01_Logistic_Regression_grist.py", SIX)),
    Subject(57, "start_beginner_kaggle.03", SOFTMAX, "", logits_alone("57", "ID_57/03_softmax_cost_grist.py")),
    Subject(58, "pytest", CONVOLUTIONS, "", two_convolutions("58", "ID_58/test_grist.py")),
    Subject(59, "tensorflow_book", "softmax regression on digits, a clip computed and dropped", "", one_criterion("59", "ID_59/code_06_grist.py", f.log_beside_clip)),
    Subject(60, "tensorflow_test", MNIST, "", regression("60", "ID_60/simple_saveAndReloadModel_grist.py", f.summed)),
    Subject(61, "tensorflow_project", "a hidden layer on digits", "https://github.com/2033329616/tensorflow_project",
            classifier("61", "ID_61/multi_layer_perceptron_grist.py", f.perceptron, ONE_HIDDEN, f.summed)),
    Subject(62, "gongdols.denoising_RBM", RBM, "", boltzmann("62", "ID_62/denoising_RBM_grist.py")),
    Subject(63, "gongdols.main", RBM, "", boltzmann("63", "ID_63/main_grist.py")),
)  # fmt: skip

# Beside the 79: what the stored copies of three subjects have, the other cost that subject 2 offers, and what else three formulas meet.
GRAPHS = healthy({}, {"mean": (3, 2), "log_variance": (3, 2)}, around={"log_variance": 1.0})
EDGES = healthy({"values": (6,)}, {"scores": (6,)}, around={"scores": 2.0})


def beside(program: Program, bug: Bug) -> Program:
    """The same program with another bug."""
    return replace(program, bugs=(bug,))


EXTRAS = (
    program("ID_2/models/logistic_regression", f.on(f.linear, f.root_mean_square), f.on(f.linear, f.root_mean_square_of_more), "an epsilon below the root (ours)", IMAGES,
            Bug("2, loss_func=mean_squared", "sqrt", Kind.SQRT_OF_ZERO, "return torch.sqrt(error.square().mean())", driven(80.0, -80.0, label=0), silent=True)),
    program("ID_4/torch_geometric/nn/models/autoencoder.py", f.kl_with_logarithm, f.kl_of_clamped_encoding, "the exponential again", GRAPHS,
            Bug("4, as stored", "log", Kind.LOG_OF_ZERO, "return -0.5 * (1 + log_variance - mean**2 - torch.log(log_variance)).sum(dim=1).mean()", setting(log_variance=0.0)),
            weights=200.0),
    program("ID_5/matchzoo/losses/rank_cross_entropy_loss_fgsm.py", f.rank_square_root, f.rank_exp_of_half_logarithm, "half of the logarithm (ours)", SCORES,
            Bug("5, as stored", "sqrt", Kind.SQRT_OF_ZERO, "return -(relevance.view(-1, 3) * torch.sqrt(ranked)).sum(dim=1).mean()", setting(scores=RANKED), silent=True),
            weights=200.0),
    program("ID_13/torch_geometric/utils/softmax.py", f.logarithms_of_edges, f.attention_of_edges_from_maximum, "the exponential again, from the maximum", EDGES,
            Bug("13, as stored", "log", Kind.LOG_OF_ZERO, "logarithms = torch.log(scores)", setting(scores=torch.tensor([0.0, 1, 2, 0, 1, 2]))), weights=200.0),
    # an exponential underflows where it could overflow: 0 / 0, and before that the reciprocal of a subnormal sum
    beside(segments()[0],
           Bug("13, from below", "div", Kind.DIVISION_BY_ZERO, "weights = exponentials / torch.zeros(2).index_add(0, NODES, exponentials)[NODES]", setting(scores=-110.0),
               unseen=setting(scores=-95.0))),
    beside(segmentation()[0],
           Bug("17, from below", "div", Kind.DIVISION_BY_ZERO, "prediction = exponentials / exponentials.sum(dim=1, keepdim=True)", setting(images=1.0, down=1.0, weight=-10.0))),
    # a bias divided by a tiny scale is clipped to 1: the gradient of 0 that comes back is multiplied by inf
    beside(STOCHASTIC[0],
           Bug("28, bias by scale", "div", Kind.DIVISION_BY_ZERO, "return (signal + bias / scale).clamp(-1, 1)", setting(hidden_weight=1e-25), number=2, silent=True)),
)  # fmt: skip

PROGRAMS = tuple(program for subject in SUBJECTS for program in subject.programs)
BUGS = tuple((bug, program) for program in PROGRAMS for bug in program.bugs)
BUGS_BESIDE = tuple((bug, program) for program in EXTRAS for bug in program.bugs)
