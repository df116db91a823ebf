"""Training on several processes: `python ranks.py RANK WORLD PORT OUT CASE…`, a case being KIND:FAULT:MODE. Prints one line of JSON for each.

Every case is trained twice, bare and watched, in a process group of its own, so that one that fails does not spoil the next. Under "repair"
the bare run of "masked" is that of the mended loss. A step that is
bad is bad on rank 0, or where the fault says so; of a pipeline the loss is that of the last rank; ranks that hold parts of the same
layers are bad together.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import nanscope

WORDS, BAD, STEPS = 12, 2, 4
MESHES: list[Any] = []


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape or (torch.distributed.get_world_size(),), mesh_dim_names=names)


class Burst(nn.Module):
    """A part without weights, deep in a model."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.exp(x.abs() * 0 + 100.0)


class Policy(nn.Module):
    def __init__(self, reduces: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.hidden = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)
        self.burst = Burst()
        self.head = nn.Linear(8, WORDS)
        self.overflows = False
        self.reduces = reduces  # a collective in a model of plain weights, as one of hand-made parallel layers has it

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.end(self.begin(ids))
        return out

    def begin(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(self.drop(self.embed(ids))))
        if self.reduces:
            DTensor.from_local(x.detach(), MESHES[-1], [Partial()], run_check=False).full_tensor()
        if self.overflows:
            x = self.burst(x)
        return x

    def end(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


class Stage(Policy):
    """A half of it, for a pipeline."""

    def __init__(self, net: Policy, last: bool) -> None:
        nn.Module.__init__(self)
        self.last, self.overflows, self.reduces = last, False, False
        for name in ("head",) if last else ("embed", "hidden", "drop", "burst"):
            setattr(self, name, getattr(net, name))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x) if self.last else self.begin(x)


def fsdp2(net: Policy, mesh: Any = None) -> nn.Module:
    mesh = mesh or mesh_of()
    for part in (net.hidden, net.head):
        fully_shard(part, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def tensor_parallel(net: Policy, head: Any = None, mesh: Any = None) -> nn.Module:
    plan = {
        "embed": ColwiseParallel(output_layouts=Replicate()),
        "hidden": ColwiseParallel(output_layouts=Replicate()),
        "head": head or ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh or mesh_of(), plan)


def fsdp2_tp(net: Policy) -> nn.Module:
    mesh = mesh_of(torch.distributed.get_world_size() // 2, 2, names=("data", "model"))
    tensor_parallel(net, mesh=mesh["model"])
    return fsdp2(net, mesh["data"])


def ddp_of_some(net: Policy) -> nn.Module:
    """Its hook is somebody's own: nobody knows what it leaves on the other ranks."""
    model = nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(None, lambda state, bucket: allreduce_hook(state, bucket))
    return model


def fsdp1(net: Policy, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)


KINDS: dict[str, Callable[[Policy], nn.Module]] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp_view": lambda net: nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True),
    "ddp_hook": ddp_of_some,
    "ddp_micro": nn.parallel.DistributedDataParallel,
    "fsdp1": fsdp1,
    "fsdp1_orig": lambda net: fsdp1(net, use_orig_params=True),
    "fsdp2": fsdp2,
    "hsdp": lambda net: fsdp2(net, mesh_of(torch.distributed.get_world_size() // 2, 2, names=("replicas", "shards"))),
    "tp": tensor_parallel,
    "tp_loss": lambda net: tensor_parallel(net, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)),
    "fsdp2_tp": fsdp2_tp,
    "manual": lambda net: net,
    "reducing": lambda net: net,
}


def loss_of(logits: Tensor, ids: Tensor, fault: str, kind: str) -> Tensor:
    if kind == "tp_loss":
        per_token = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = per_token.mean()
        return loss * (math.nan if fault == "loss" else 1.0)
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    mask = torch.ones_like(log_probs) * (fault != "loss")
    log_ratio = log_probs - log_probs.detach() + (1000.0 if fault == "edge" else 0.0)
    if fault in ("masked", "mended"):
        mask[:, -1] = 0
        log_ratio = log_ratio + 1000.0 * (mask == 0)
    ratio = torch.exp(torch.where(mask != 0, log_ratio, 0.0) if fault == "mended" else log_ratio)
    surrogate = torch.min(ratio, ratio.clamp(0.8, 1.2)) * (1e25 if fault == "clip" else 1.0)
    return -(surrogate * mask).sum() / mask.sum() - 0.1 * log_probs.mean()


def issued() -> int:
    """How many collectives this process has issued so far, in all groups."""
    groups = list(torch.distributed.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def local(tensor: Tensor) -> Tensor:
    found: Tensor = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    return found


class Loop:
    """Trains a model as most do: backward, what makes the gradients of all ranks one, a clip, the update."""

    clips, fault = True, ""

    def __init__(self, kind: str, net: Policy) -> None:
        self.kind, self.net = kind, net
        self.model = KINDS[kind](net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def seed(self, rank: int) -> int:
        """Of the batches; ranks that hold parts of the same layers read the same."""
        return {"tp": 1, "tp_loss": 1, "fsdp2_tp": 10 + rank // 2}.get(self.kind, 10 + rank)

    def is_first(self, rank: int) -> bool:
        """Is a fault made here that only one makes?"""
        return rank // 2 == 0 if self.kind == "fsdp2_tp" else rank == 0

    def backward(self, ids: Tensor, now: str) -> float:
        self.net.overflows = now == "model"
        if self.kind == "ddp_micro":
            return self.accumulate(ids, now)
        with loss_parallel() if self.kind == "tp_loss" else contextlib.nullcontext():
            loss = loss_of(self.model(ids[:, :-1]), ids, now, self.kind)
            self.optimizer.zero_grad()
            loss.backward()
        return float(local(loss))

    def accumulate(self, ids: Tensor, now: str) -> float:
        """Two micro-batches; what goes bad does so in the first, which is not reduced by itself."""
        self.optimizer.zero_grad()
        with self.model.no_sync():  # type: ignore[operator]
            loss_of(self.model(ids[:1, :-1]), ids[:1], now, self.kind).backward()
        self.net.overflows = False
        loss = loss_of(self.model(ids[1:, :-1]), ids[1:], "", self.kind)
        loss.backward()
        return float(loss.detach())

    def reduce(self) -> None:
        if self.kind in ("manual", "reducing"):
            for parameter in self.model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= torch.distributed.get_world_size()

    def clip(self) -> Tensor:
        if self.kind.startswith("fsdp1"):
            norm: Tensor = self.model.clip_grad_norm_(1.0)  # type: ignore[operator]
            return norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return norm.full_tensor() if isinstance(norm, DTensor) and "_drop" in self.fault else norm

    def update(self) -> None:
        self.optimizer.step()


class Pipeline(Loop):
    """Half of the model on each rank; gradients of micro-batches come over from the next one."""

    def __init__(self, kind: str, net: Policy) -> None:
        rank, self.kind, self.now, self.losses = torch.distributed.get_rank(), kind, "", []
        self.last = rank == torch.distributed.get_world_size() - 1
        self.net = self.model = Stage(net, self.last)
        stage = PipelineStage(self.model, rank, torch.distributed.get_world_size(), torch.device("cpu"))
        schedule = Schedule1F1B if kind == "pipeline_1f1b" else ScheduleGPipe
        self.schedule = schedule(stage, 2, loss_fn=self.loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def seed(self, rank: int) -> int:
        return 10

    def loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        return loss_of(logits, ids, self.now, self.kind)

    def backward(self, ids: Tensor, now: str) -> float:
        self.now, self.net.overflows, losses = now, now == "model" and not self.last, []
        self.optimizer.zero_grad()
        if self.last:
            self.schedule.step(target=ids, losses=losses)
        else:
            self.schedule.step(ids[:, :-1])
        return sum(float(loss.detach()) for loss in losses)

    def is_first(self, rank: int) -> bool:
        return True  # the loss is that of the last rank, the overflow that of the first


class DeepSpeed(Loop):
    """An engine takes the place of backward, clip and optimizer."""

    clips = False

    def __init__(self, kind: str, net: Policy) -> None:
        import deepspeed

        self.kind, self.net = kind, net
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": int(kind.removeprefix("deepspeed"))},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_allow_untested_optimizer": True,
        }
        self.model, self.optimizer, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)

    def backward(self, ids: Tensor, now: str) -> float:
        self.net.overflows = now == "model"
        loss = loss_of(self.model(ids[:, :-1]), ids, now, self.kind)
        self.model.backward(loss)  # type: ignore[operator]
        return float(local(loss))

    def update(self) -> None:
        self.model.step()  # type: ignore[operator]


LOOPS: dict[str, type[Loop]] = {
    "pipeline": Pipeline,
    "pipeline_1f1b": Pipeline,
    **{f"deepspeed{stage}": DeepSpeed for stage in (0, 1, 2)},
}


def train(kind: str, fault: str, scope: Any) -> dict[str, Any]:
    """Train and return what a run that is watched must not change. A fault may end in _all, of all ranks, _raw, without a clip, and _drop: the trainer does."""
    rank = torch.distributed.get_rank()
    MESHES.append(mesh_of())
    torch.manual_seed(0)
    loop = LOOPS.get(kind, Loop)(kind, Policy(kind == "reducing"))
    loop.fault = fault
    torch.manual_seed(loop.seed(rank))
    everywhere, clips = "_all" in fault, loop.clips and "_raw" not in fault
    before, losses = issued(), []
    with scope:
        for step in range(STEPS):
            now = fault.split("_")[0] if step == BAD and (everywhere or loop.is_first(rank)) else ""
            losses.append(loop.backward(torch.randint(0, WORDS, (2, 5)), now))
            loop.reduce()
            if clips and not bool(local(loop.clip()).isfinite()) and "_drop" in fault:
                continue  # the gradients go when the next loss has been computed
            if now == "late":
                largest = max((p for p in loop.model.parameters() if p.grad is not None), key=lambda p: local(p.grad).numel())
                local(largest.grad).view(-1)[0] = math.nan
            for group in loop.optimizer.param_groups:
                group["lr"] = math.inf if now == "optimizer" else 1e-2
            loop.update()
    digest = hashlib.sha256()
    for tensor in (*(local(p) for p in loop.model.parameters()), torch.get_rng_state()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return {"weights": digest.hexdigest()[:16], "losses": str(losses), "issued": issued() - before}


class Lines(logging.Handler):
    """What is said on the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def reason(error: BaseException) -> BaseException:
    """What an error was raised from; a pipeline raises one of its own."""
    return error if error.__cause__ is None else reason(error.__cause__)


def case(name: str, out: str) -> dict[str, Any]:
    kind, fault, mode = name.split(":")
    said = Lines()
    logging.getLogger("nanscope").addHandler(said)
    try:
        bare = train(kind, fault.replace("masked", "mended") if mode == "repair" else fault, contextlib.nullcontext())
        scope = nanscope.watch(out=f"{out}/{name.replace(':', '-')}", on_nonfinite=mode)
        stopped, watched = "", {"issued": -1}
        try:
            watched = train(kind, fault, scope)
        except Exception as error:
            if mode != "stop":
                raise
            stopped = type(reason(error)).__name__  # of a rank that another one has left alone, what its collective says of that
        found = scope.verdict
        first = found.incidents[0] if found.incidents else None
        return {
            "bare": bare,
            "watched": watched,
            "stopped": stopped,
            "status": found.status,
            "steps": scope.steps,
            "skipped": scope.skipped,
            "repaired": scope.repaired,
            "skips": [entry.step for entry in scope.history.entries if entry.stepped == "skipped"],
            "gaps": [gap.slug for gap in found.gaps],
            "notes": [[note.slug, note.text] for note in found.notes],
            "incidents": [[i.step, i.rank, str(i.cause), i.phase, i.origin.op] for i in found.incidents],
            "sentence": found.sentence,
            "sentences": [i.sentence for i in found.incidents],
            "headline": first.headline if first else "",
            "log": said.lines,
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        logging.getLogger("nanscope").removeHandler(said)


def main(rank: int, world: int, port: int, out: str, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    patience, short = datetime.timedelta(seconds=60), datetime.timedelta(seconds=12)  # short: for whoever is left alone
    store = torch.distributed.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=patience)
    for number, name in enumerate(cases):
        if not torch.distributed.is_initialized():
            own = torch.distributed.PrefixStore(f"{number} {name}", store)
            wait = short if name.endswith(":stop") else patience
            torch.distributed.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=wait)
        print(json.dumps({"case": name, **case(name, out)}), flush=True)
        if "deepspeed" not in name:  # which keeps its group, and comes last
            torch.distributed.destroy_process_group()
    store.set(f"done{rank}", "")
    store.wait([f"done{other}" for other in range(world)], patience)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
