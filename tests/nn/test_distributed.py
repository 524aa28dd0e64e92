"""What trainers wrap around a layer: two ranks, checkpointing, and gradients that add up in float32."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moefuse import Routing
from moefuse.nn import MoE

_RANK = """
import copy, datetime, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from moefuse import Routing
from moefuse.nn import MoE

rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method="file://" + meeting, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=300)
)
torch.manual_seed(0)
shared = {"shared_intermediate": 16, "shared_gate": True}
alone = torch.nn.Sequential(*(MoE(32, 16, 8, Routing(top_k=2), norm=True, **shared) for _ in range(2)))
batches = torch.randn(3, 40, 32)  # of a rank the tokens 20 * rank and on

def steps(model, tokens):
    for x in tokens:
        model(x).square().mean().backward()

steps(alone, batches)
exact = {name: p.grad for name, p in alone.named_parameters()}
alone.zero_grad()
mine = batches[:, 20 * rank : 20 * rank + 20]

wrapped = DistributedDataParallel(copy.deepcopy(alone))
with wrapped.no_sync():
    steps(wrapped, mine[:2])
steps(wrapped, mine[2:])
for name, p in wrapped.module.named_parameters():
    torch.testing.assert_close(p.grad, exact[name], rtol=1e-4, atol=1e-6, msg=lambda m: f"DDP {name}: {m}")

# In bfloat16 the sum over ranks and batches is float32: nothing is rounded after a rank's own gradient.
narrow, summed = copy.deepcopy(alone).bfloat16(), {name: 0 for name in exact}
for half in batches.view(6, 20, 32):
    narrow.zero_grad()
    steps(narrow, half.bfloat16()[None])
    summed = {name: summed[name] + p.grad.float() / 2 for name, p in narrow.named_parameters()}

in_bfloat16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for policy, exact, bound in ((MixedPrecisionPolicy(), exact, 1e-4), (in_bfloat16, summed, 1e-6)):
    model, options = copy.deepcopy(alone), {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": policy}
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    assert model[0].down.to_local().shape[0] == 4, "each rank keeps half of the experts"
    steps(model, mine)
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        error = (p.grad.full_tensor() - exact[name]).norm() / exact[name].norm()
        assert error < bound, f"FSDP2 {policy} {name}: {error}"
dist.destroy_process_group()
print("done")
"""


def test_two_ranks(tmp_path: Path) -> None:
    """Gradients of DDP and FSDP2, summed over three batches, are those of one process that has all tokens."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error::UserWarning:torch.distributed",
                "-c",
                _RANK,
                str(rank),
                str(tmp_path / "meet"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # two ranks and what else the machine does
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 0, text
        assert text.endswith("done\n"), text


class _Seen(TorchDispatchMode):
    """Our ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "moefuse":
            self.ops.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def block() -> MoE:
    return MoE(32, 16, 8, Routing(top_k=2), norm=True)


def gradients(block: MoE, x: Tensor, run: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[str]]:
    block.zero_grad()
    x = x.clone().requires_grad_()
    with _Seen() as seen:
        run(x).square().sum().backward()
    return [t.grad for t in (x, *block.parameters()) if t.grad is not None], seen.ops


def keep_experts(_context: object, op: object, *_args: object, **_options: object) -> CheckpointPolicy:
    """What docs/training.md shows."""
    kept = op is torch.ops.moefuse.experts.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_checkpointing(block: MoE) -> None:
    """The same bits, with everything run again, or all but the experts."""
    x = torch.randn(20, 32)
    plain, ops = gradients(block, x, block)
    again, more = gradients(block, x, lambda x: checkpoint(block, x, use_reentrant=False))
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_experts)
    cheap, some = gradients(block, x, lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts))
    assert len(plain) == 1 + len(list(block.parameters()))
    for found in (again, cheap):
        assert all(map(torch.equal, found, plain))
    assert (ops.count("experts"), more.count("experts"), some.count("experts")) == (1, 2, 1)
    assert (ops.count("gate"), more.count("gate"), some.count("gate")) == (1, 2, 2)


@pytest.fixture
def main_gradients(block: MoE) -> Iterator[dict[str, Tensor]]:
    """Of a bfloat16 layer in float32: a gradient is added as soon as it is there, and its memory is free again."""
    block.bfloat16()
    main = {name: torch.zeros(p.shape) for name, p in block.named_parameters()}

    def add(p: Tensor, name: str) -> None:
        assert p.grad is not None
        main[name] += p.grad
        p.grad = None

    hooks = [
        p.register_post_accumulate_grad_hook(functools.partial(add, name=name)) for name, p in block.named_parameters()
    ]
    yield main
    for hook in hooks:
        hook.remove()


def test_gradients_add_up_in_float32(block: MoE, main_gradients: dict[str, Tensor]) -> None:
    parts = torch.randn(64, 6, 32, dtype=torch.bfloat16)
    wide = MoE(32, 16, 8, Routing(top_k=2), norm=True).bfloat16()
    wide.load_state_dict(block.state_dict())
    exact = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in wide.named_parameters()}
    narrow: dict[str, Tensor] = {}
    for part in parts:
        block(part).float().square().sum().backward()
        assert all(p.grad is None for p in block.parameters())
        wide.zero_grad()
        wide(part).float().square().sum().backward()
        for name, p in wide.named_parameters():
            assert p.grad is not None
            exact[name] += p.grad
            narrow[name] = narrow[name] + p.grad if name in narrow else p.grad.clone()
    for name, want in exact.items():
        error = (main_gradients[name] - want).norm() / want.norm()
        assert error < 1e-6
        assert (narrow[name] - want).norm() / want.norm() > 1e-3, "bfloat16 sums would not do"
