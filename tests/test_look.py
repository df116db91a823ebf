"""Where a model cannot be run again, what it was given tells."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import nanscope
from nanscope.verdict.incident import Verdict


class Once(nn.Module):
    """A model that takes no second look: it has a use for each batch, and that is over."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.runs = 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.runs += 1
        if self.runs > 1:
            raise RuntimeError("this batch was used up")
        out: Tensor = self.layer(x.masked_fill(mask < 0, 0.0))
        return out


def watched(out: Path, x: Tensor, mask: Tensor, weight: float = 1.0, factor: float = 1.0) -> Verdict:
    model = Once()
    nn.init.constant_(model.layer.weight, weight)
    with nanscope.watch(out=out) as scope:
        (model(x, mask) * factor).mean().backward()
    return scope.verdict


NAN, INF = math.nan, math.inf

GIVEN = [  # what the batch holds, its mask, every weight -> phase and value of the origin
    (1.0, 0.0, NAN, ("weights", NAN)),
    (NAN, 0.0, 1.0, ("input", NAN)),
    (3e38, 0.0, 3e38, ("forward", INF)),
    (3e38, -INF, NAN, ("weights", NAN)),
]


@pytest.mark.parametrize(("x", "mask", "weight", "expected"), GIVEN)
def test_what_a_model_was_given_tells_where_it_cannot_be_run_again(
    x: float, mask: float, weight: float, expected: tuple[str, float], tmp_path: Path
) -> None:
    """A weight that is NaN, or NaN in an argument; a mask of −inf is none of both, and a model of its own making stays to blame."""
    (incident,) = watched(tmp_path, torch.full((3, 2), x), torch.full((3, 2), mask), weight).incidents
    assert incident.phase == expected[0]
    assert math.isnan(incident.origin.value) if math.isnan(expected[1]) else incident.origin.value == expected[1]


def test_weights_behind_a_jagged_tensor_are_found(tmp_path: Path) -> None:
    """Log-probs that pass through a nested tensor are another tensor to the loss, and the weights are NaN all the same."""
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight[0, 1] = NAN
    with nanscope.watch(out=tmp_path) as scope:
        log_probs = model(torch.randn(6, 4)).squeeze(-1)
        values = torch.nested.nested_tensor_from_jagged(log_probs, torch.tensor([0, 2, 6])).values()
        torch.stack([nn.functional.pad(values[0:2], (0, 2)), values[2:6]]).mean().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.cause, incident.phase) == ("poisoned_weights", "weights") and "weights and gradients stayed" not in incident.sentence


class Head(nn.Module):
    """Something in another layout than the usual one, and a layer that has weights."""

    def __init__(self, body: Callable[[nn.Module], Tensor], **parts: object) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 1), body
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self) -> Tensor:
        found: Tensor = self.layer(self.body(self))
        return found.values() if found.is_nested else found


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will take it out
        return torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)


ROWS = torch.tensor([1, 2, 2])
LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "gradient of an embedding": lambda: Head(lambda m: m.table(ROWS), table=nn.Embedding(10, 4, sparse=True)),
    "gradient of a bag": lambda: Head(lambda m: m.table(ROWS[None]), table=nn.EmbeddingBag(10, 4, sparse=True, mode="sum")),
    "sparse weight": lambda: Head(lambda m: torch.sparse.mm(m.table, torch.ones(4, 4)), table=nn.Parameter(torch.eye(4).to_sparse())),
    "sparse buffer": lambda: Head(lambda m: torch.sparse.mm(m.table, torch.ones(4, 4)), table=torch.eye(4).to_sparse()),
    "compressed buffer": lambda: Head(lambda m: m.table @ torch.ones(4, 4), table=torch.eye(4).to_sparse_csr()),
    "jagged": lambda: Head(lambda m: jagged()),
    "quantised": lambda: Head(lambda m: m.table.dequantize(), table=quantised()),
    "mkldnn": lambda: Head(lambda m: torch.ones(3, 4).to_mkldnn().to_dense()),
}


def through_log(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.log(loss * 0)


def through_backward(model: nn.Module, loss: Tensor) -> Tensor:
    return loss + torch.sqrt(loss - loss.detach())


def through_weight(model: nn.Module, loss: Tensor) -> Tensor:
    with torch.no_grad():
        model.layer.weight[0, 0] = NAN
    return model().square().mean()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("fault", "cause"), [(through_log, "log_zero"), (through_backward, "sqrt_zero_grad"), (through_weight, "poisoned_weights")]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_lies_in_another_layout_keeps_nothing_from_being_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: str, fault: Callable[[nn.Module, Tensor], Tensor], cause: str
) -> None:
    """Sparse gradients and weights, jagged, quantised and foreign tensors: the origin is named, and what follows is a consequence."""
    torch.manual_seed(0)
    model = LAYOUTS[layout]()
    table = [parameter for name, parameter in model.named_parameters() if name.startswith("table.")]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD([p for p in model.parameters() if all(p is not t for t in table)], 0.1)]
    optimizers += [torch.optim.SparseAdam(table)] if table else []
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(1, 4):
            loss = model().square().mean()
            loss = fault(model, loss) if step == 2 else loss
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    assert "not-explained" not in caplog.text and not scope.verdict.gaps
    first, *rest = scope.verdict.incidents
    assert (first.step, first.cause) == (2, cause)
    assert [(incident.cause, incident.consequence_of) for incident in rest] == [("poisoned_weights", 2)]


def spoils(gradient: Tensor) -> Tensor:
    return gradient * NAN


def on_the_output(model: nn.Module) -> Tensor:
    out: Tensor = model(torch.ones(3, 4))
    out.register_hook(spoils)
    return (out * 2).pow(2).mean()


def on_a_value(model: nn.Module) -> Tensor:
    scaled: Tensor = model(torch.ones(3, 4)) * 2
    scaled.register_hook(spoils)
    return scaled.pow(2).mean()


def on_the_loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(3, 4)).pow(2).mean()
    loss.register_hook(spoils)
    return loss


def on_a_weight(model: nn.Module) -> Tensor:
    next(model.parameters()).register_hook(spoils)
    loss: Tensor = model(torch.ones(3, 4)).pow(2).mean()
    return loss


@pytest.mark.parametrize("loss_of", [on_the_output, on_a_value, on_the_loss, on_a_weight])
def test_a_hook_that_changes_a_gradient_is_named(tmp_path: Path, loss_of: Callable[[nn.Module], Tensor]) -> None:
    """With the line that it begins in: backward, made once more without it, is fine."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nanscope.watch(out=tmp_path) as scope:
        loss_of(model).backward()
        optimizer.step()
    (incident,) = scope.verdict.incidents
    line = spoils.__code__.co_firstlineno
    assert (incident.phase, incident.origin.line, incident.origin.file) == ("backward", line, __file__)
    assert f"gives finite numbers: a hook on a tensor changed it, test_look.py:{line}." in incident.sentence


@pytest.mark.parametrize("clips", [False, True])
def test_where_in_a_gradient_it_went_bad_is_told_as_long_as_that_is_known(tmp_path: Path, clips: bool) -> None:
    """A clip has made every element NaN of which the hook has made one."""

    def spoil(gradient: Tensor) -> Tensor:
        return gradient.index_put((torch.tensor(0), torch.tensor(2)), torch.tensor(math.nan))

    model = nn.Linear(4, 1)
    model.weight.register_hook(spoil)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nanscope.watch(out=tmp_path) as scope:
        model(torch.ones(3, 4)).pow(2).mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert incident.origin.index == (() if clips else (0, 2)) and incident.origin.variable == "weight"
    assert f"the gradient of weight is NaN{'' if clips else ' at [0, 2] of [1, 4]'}, while backward" in incident.sentence


def test_of_several_hooks_none_is_accused(tmp_path: Path) -> None:
    """It was one of them."""
    model = nn.Linear(4, 1)
    with nanscope.watch(out=tmp_path) as scope:
        out = model(torch.ones(3, 4))
        out.register_hook(lambda gradient: gradient * 2)
        out.register_hook(spoils)
        out.pow(2).mean().backward()
    (incident,) = scope.verdict.incidents
    assert "a hook on a tensor changed it." in incident.sentence and incident.origin.line is None


TAKEN_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "values": lambda rows: rows.values(),
    "rows": lambda rows: rows.unbind()[1],
    "padded": lambda rows: rows.to_padded_tensor(0.0),
}


@pytest.mark.parametrize("how", TAKEN_OUT)
def test_what_is_made_of_a_jagged_tensor_element_by_element_is_seen(tmp_path: Path, how: str) -> None:
    """The line that made it, however it is taken out."""
    model = nn.Linear(4, 4)
    with nanscope.watch(out=tmp_path) as scope:
        logs = ((model(jagged()) * 0.0).abs() - 0.0).log()
        TAKEN_OUT[how](logs).pow(2).mean().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.cause) == ("log", "log_zero")
    assert (incident.origin.expression or "").endswith(".log()") and incident.origin.value == -INF


def test_jagged_tensors_of_two_kinds_are_not_mixed_up(tmp_path: Path) -> None:
    """A call with one that is not packed alike is not noted."""
    model = nn.Linear(4, 4)
    with nanscope.watch(out=tmp_path) as scope:
        rows = model(jagged())
        scaled = rows * torch.full((2, 1, 1), 0.0)
        (scaled * rows.detach()).values().log().mean().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.origin.shape) == ("log", (5, 4))


class Controller:
    """An adaptive coefficient that is kept as a number of Python."""

    def __init__(self) -> None:
        self.value = 0.2

    def update(self, measured: Tensor) -> None:
        error = measured / 0.0 - 1
        self.value *= float(1 + error.clamp(-0.2, 0.2))


@pytest.mark.parametrize("given", [float, torch.tensor])
def test_a_number_that_went_by_way_of_the_host_is_followed(given: Callable[[float], float | Tensor], tmp_path: Path) -> None:
    """0 / 0 in one step, read as a number, makes NaN of the next step's loss: the line of the division is named."""
    model, controller = nn.Linear(3, 2), Controller()
    with nanscope.watch(model, out=tmp_path) as scope:
        for _ in range(2):
            log_probs = model(torch.ones(4, 3)).log_softmax(-1)
            loss = (given(controller.value) * log_probs).mean()
            loss.backward()
            controller.update((log_probs.detach() * 0.0).mean())
    (incident,) = scope.verdict.incidents
    assert (incident.micro_batch, incident.origin.op, incident.origin.index) == (2, "div", ())
    assert incident.origin.expression == "measured / 0.0"
    assert incident.cause in ("zero_denominator", "zero_div_zero") and incident.fixes[0].works is not False


@pytest.mark.parametrize("kind", ["product", "sum"])
def test_a_number_that_is_nan_is_shown_as_the_operand(tmp_path: Path, kind: str) -> None:
    """Where nobody has seen it made: that it came in as a number, and what the code calls it."""
    x, kl_coef = torch.ones(3, 4, requires_grad=True), math.nan
    with nanscope.watch(out=tmp_path) as scope:
        if kind == "product":
            loss = kl_coef * x.sigmoid()
        else:
            loss = x.sigmoid() + kl_coef
        loss.mean().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.cause, incident.origin.masked) == ("input", "bad_input", None)
    assert [name for name, _ in incident.origin.operands] == ["x.sigmoid()", "kl_coef"] and math.isnan(incident.origin.number(1))
    assert "kl_coef, a number of Python, came in as NaN" in incident.sentence and "number that the code gave" in incident.sentence
    again = nanscope.verdict.diagnose.verdict([nanscope.load(incident.snapshot)])
    assert again.incidents[0].sentence == incident.sentence


class Recurrent(nn.Module):
    """A policy that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.value = nn.LSTM(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, hidden: tuple[Tensor, Tensor]) -> Tensor:
        y, _ = self.lstm(x, hidden)
        out: Tensor = self.value(y)
        return out


def test_a_state_that_came_in_beside_the_input_is_not_called_like_that(tmp_path: Path) -> None:
    model, memory = Recurrent(), torch.zeros(1, 4, 8)
    memory[0, 1, 4] = math.nan
    with nanscope.watch(model, out=tmp_path) as scope:
        model(torch.randn(6, 4, 3), (memory, torch.zeros(1, 4, 8))).pow(2).mean().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.index, incident.origin.shape) == ("input", (0, 1, 4), (1, 4, 8))
    assert incident.origin.variable in (None, "memory", "hidden"), incident.sentence


class Adapter(nn.Module):
    """Attention, whose kernel nobody can run again as a program, of what an adapter has scaled by a setting."""

    def __init__(self, scaling: float) -> None:
        super().__init__()
        self.project, self.scaling = nn.Linear(8, 8), scaling

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.project(x) * self.scaling
        return functional.scaled_dot_product_attention(scaled, scaled, scaled)


def test_a_number_that_is_nan_inside_a_model_has_its_name_and_its_line(tmp_path: Path) -> None:
    model = Adapter(math.nan)
    with nanscope.watch(model, out=tmp_path) as scope:
        model(torch.ones(2, 1, 4, 8)).mean().backward()
    (incident,) = scope.verdict.incidents
    assert incident.origin.operands[1][0] == "self.scaling" and incident.origin.file == __file__, incident.sentence
    assert "self.scaling, a number of Python, came in as NaN" in incident.sentence


def put_where(x: Tensor) -> Tensor:
    made = x * 2
    made[x <= 0] = math.nan
    return made


def put_at(x: Tensor) -> Tensor:
    made = x * 2
    made[0] = math.nan
    return made


def filled(x: Tensor) -> Tensor:
    return x.masked_fill(x <= 0, math.nan)


PUT = {  # by which calls: torch 2.15 fills
    put_where: ({"index_put", "masked_fill"}, "a number"),
    put_at: ({"slice_scatter", "fill"}, "a number"),
    filled: ({"masked_fill"}, "math.nan"),
}


@pytest.mark.parametrize("put", PUT, ids=lambda put: put.__name__)
def test_a_nan_that_the_code_puts_into_what_it_computed_came_with_no_batch(tmp_path: Path, put: Callable[[Tensor], Tensor]) -> None:
    """As a distribution does whose variance is not defined: the call is told that put it there, and that it is the code's own number."""
    with nanscope.watch(out=tmp_path) as scope:
        put(torch.arange(3.0).requires_grad_()).sum().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.cause, incident.origin.index) == ("input", "bad_input", (0,)) and incident.origin.op in PUT[put][0]
    assert [name for name, _ in incident.origin.operands] == [PUT[put][1]]
    assert "number that the code gave" in incident.sentence and "batch" not in incident.sentence


INFINITE: dict[str, Callable[[Tensor], Tensor]] = {
    "fill": lambda x: x.masked_fill(x <= 0, -math.inf),
    "scatter": lambda x: x.scatter(0, torch.tensor([0]), -math.inf),
}


def put_below(x: Tensor) -> Tensor:
    made = x.expand(2, 3).clone()
    made[:, 0] = -math.inf
    return made


@pytest.mark.parametrize("put", [*INFINITE.values(), put_below], ids=[*INFINITE, "column"])
def test_an_infinity_that_the_code_puts_somewhere_has_not_overflowed(tmp_path: Path, put: Callable[[Tensor], Tensor]) -> None:
    """As where a token is forbidden that is the label."""
    with nanscope.watch(out=tmp_path) as scope:
        put(torch.arange(3.0).requires_grad_()).log_softmax(-1).mean().backward()
    (incident,) = scope.verdict.incidents
    assert incident.cause == "bad_input" and "A number that the code gave is infinite" in incident.sentence, incident.sentence
    assert {fix.id for fix in incident.fixes} <= {"finite_mask_fill", "validate_config"}


NAMED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "first": lambda x, scale: scale * x.abs(),
    "last": lambda x, scale: x.abs() * scale,
    "nested": lambda x, scale: scale * (x * 0),
}


@pytest.mark.parametrize("named", NAMED)
def test_a_number_is_told_from_the_tensor_beside_it(tmp_path: Path, named: str) -> None:
    """In the code it may stand before or behind, in the call it comes last."""
    with nanscope.watch(out=tmp_path) as scope:
        NAMED[named](torch.ones(3, requires_grad=True), math.inf).sum().backward()
    (incident,) = scope.verdict.incidents
    assert [name for name, _ in incident.origin.operands] == ["x * 0" if named == "nested" else "x.abs()", "scale"]
    assert "A number that the code gave is infinite" in incident.sentence


def test_no_tensor_is_called_a_number(tmp_path: Path) -> None:
    """A number that the line writes out has no name, and takes none of its neighbour's."""
    x = torch.ones(3, requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        (x + float("nan")).sum().backward()
    (incident,) = scope.verdict.incidents
    assert "x, a number" not in incident.sentence and "a number of Python" in incident.sentence, incident.sentence


def test_a_nan_that_is_put_into_data_is_data(tmp_path: Path) -> None:
    """Whoever sets an element of what has no gradient notes down what came in."""
    rewards = torch.ones(3)
    rewards[1] = math.nan
    with nanscope.watch(out=tmp_path) as scope:
        (rewards * torch.ones(3, requires_grad=True)).sum().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.op, incident.origin.variable, incident.origin.index) == ("input", "input", "rewards", (1,))


RANDOM: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, str, str]]] = {
    "what was computed": (lambda x: nn.functional.rrelu(torch.log(x * 0), training=True), ("forward", "log", "torch.log(x * 0)")),
    "the batch": (lambda x: nn.functional.rrelu(x * BAD, training=True), ("input", "input", "")),
}
BAD = torch.tensor([1.0, math.nan, 1.0])


@pytest.mark.parametrize("what", RANDOM)
def test_a_call_that_cannot_be_made_again_is_asked_for_its_arguments(tmp_path: Path, what: str) -> None:
    """It is random, and what it was given is known: the walk goes on there."""
    make, (phase, op, expression) = RANDOM[what]
    with nanscope.watch(out=tmp_path) as scope:
        make(torch.ones(2, 3, requires_grad=True)).sum().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.op) == (phase, op)
    assert expression in (incident.origin.expression or "")


@torch.library.custom_op("nanscope_tests::reciprocal", mutates_args=())
def reciprocal(x: Tensor) -> Tensor:
    """A kernel of somebody's."""
    return torch.from_numpy(1.0 / x.detach().numpy())


reciprocal.register_autograd(lambda ctx, grad: grad * 0)


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_a_kernel_that_makes_it_of_good_arguments_is_named(tmp_path: Path) -> None:
    """By its name, its line, and the element; and not the sum behind it."""
    x = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        loss = reciprocal(x * 1.0).sum()
        loss.backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.origin.index) == ("nanscope_tests::reciprocal", (1,))
    assert incident.origin.expression == "reciprocal(x * 1.0)"


class Scaled(nn.Linear):
    """Gives −inf for one row: divided by 0, the logarithm of 0, a mask of its own, or one that it is given."""

    def __init__(self, how: str) -> None:
        super().__init__(3, 2)
        self.how = how

    def forward(self, x: Tensor, spread: Tensor) -> Tensor:
        made = -super().forward(x).abs() - 0.1
        if self.how == "quotient":
            return made / spread[:, None]
        if self.how == "logarithm":
            return torch.log(torch.sigmoid(made) * spread[:, None])
        return made.masked_fill(spread[:, None] == 0, -math.inf)


@pytest.mark.parametrize(
    ("how", "op", "cause"),
    [("quotient", "div", "zero_denominator"), ("logarithm", "log", "log_zero"), ("mask", "mul", "inf_times_zero_coef")],
)
def test_an_infinity_that_a_model_gave_is_looked_for_in_there(tmp_path: Path, how: str, op: str, cause: str) -> None:
    """Where the loss multiplies it by 0 the fault is that of the call that made it; a mask that the model has put on is none."""
    torch.manual_seed(0)
    model, x, spread = Scaled(how), torch.randn(4, 3), torch.tensor([0.5, 1.0, 0.0, 2.0])
    with nanscope.watch(out=tmp_path) as scope:
        score = model(x, spread)
        (score * spread[:, None] + 1.0).square().mean().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.cause) == (op, cause)


def test_what_a_mask_makes_of_logits_is_a_product_of_probabilities(tmp_path: Path) -> None:
    """0 · −inf is p · log p where the −inf are logits, and the 0 what a softmax makes of them."""
    torch.manual_seed(0)
    model, x, spread = Scaled("mask"), torch.randn(4, 3), torch.ones(4)
    spread[2] = 0.0
    with nanscope.watch(out=tmp_path) as scope:
        scores = torch.cat([model(x, spread), torch.zeros(4, 1)], dim=-1)
        (torch.softmax(scores, dim=-1) * scores).sum().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.cause) == ("mul", "plogp_zero")


def test_a_loss_that_was_bad_is_not_said_to_have_been_spoilt_after_it(tmp_path: Path) -> None:
    """numpy has changed what it read before backward: run again it is fine, and no hook has written its gradients."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    array = np.ones((4, 2), np.float32)
    weights = torch.from_numpy(array)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 5):
            array[:] = 1
            array[1, 1] = step != 3
            loss = (torch.log(weights) * model(torch.randn(4, 3))).mean()
            array[:] = 1
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    said = scope.verdict.incidents[0].sentence
    assert "numpy or another process may have written to what it read" in said and "hook" not in said
