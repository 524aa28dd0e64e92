"""Experts larger than the card: a model with some experts in slots, against what one would do without them.

Qwen3-30B-A3B's widths with random Q4_K experts: `python examples/placed_speed.py --layers 48` on a GPU. Routers are
skewed as those of trained models are: by default a quarter of the experts, another one in each layer, has 57% of the
load. *cpu* has all experts on the CPU; *auto* has a quarter of them in slots; *uploaded* sends each step's experts to
the GPU, from locked memory and already in its order; *gpu* has room for all. Decoding is captured in each case.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moefuse import QuantTensor, experts, hf
from moefuse.hf.capture import Step
from moefuse.hf.gguf_experts import BlockExperts
from moefuse.hf.place import place_model
from moefuse.hf.support import on_interface
from moefuse.nn import Placement, placement
from moefuse.nn.accelerator import accelerator_of
from moefuse.nn.placement import PlacedExperts, placed
from moefuse.nn.quantized import interleave_
from moefuse.nn.rates import rates_of
from moefuse.nn.shared import stack_arguments
from moefuse.types import Activation, Stacks

MODES = ("cpu", "auto", "uploaded", "gpu")


def build(args: argparse.Namespace) -> Any:
    """The model on the CPU; its layers' experts are equal, in memory of their own."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = Qwen3MoeConfig(
        hidden_size=args.hidden, num_hidden_layers=args.layers, num_experts=args.experts, head_dim=128,
        moe_intermediate_size=args.intermediate, num_experts_per_tok=args.top_k, num_attention_heads=args.heads,
        num_key_value_heads=max(args.heads // 8, 1), vocab_size=args.vocab, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = Qwen3MoeForCausalLM(settings).to(torch.bfloat16)
    first: BlockExperts | None = None
    for path, stock in list(on_interface(model)):
        made = of_blocks(args, stock, first)
        first = made if first is None else first
        model.set_submodule(path, made)
    noise = torch.randn(1_000_003, generator=torch.Generator().manual_seed(1)).bfloat16()
    for name, value in list(model.named_parameters()):
        numbers = noise.repeat(-(-value.numel() // len(noise)))[: value.numel()].view(value.shape)
        numbers = numbers * (1.0 if "embed" in name else value.shape[-1] ** -0.5)
        if value.dim() == 1:
            numbers = torch.ones(value.shape, dtype=torch.bfloat16)
        if name.endswith("mlp.gate.weight"):
            numbers = skewed(numbers, args.skew, seed=int(name.split(".")[2]))
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = nn.Parameter(numbers, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    model.set_experts_implementation("moefuse")
    return model.eval()


def skewed(router: Tensor, skew: float, seed: int) -> Tensor:
    """Some experts have larger logits than others, and so are chosen more."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(router.shape, generator=generator)
    sizes = torch.exp(skew * torch.randn(len(router), 1, generator=generator))
    return (noise * sizes * router.shape[1] ** -0.5).bfloat16()


def of_blocks(args: argparse.Namespace, stock: Any, like: BlockExperts | None) -> BlockExperts:
    """Random blocks whose numbers have the size of trained ones; or copies of another layer's."""
    if like is None:
        E, H, I = args.experts, args.hidden, args.intermediate
        shapes = {"gate_up": (E, I, H // 256), "up": (E, I, H // 256), "down": (E, H, I // 256)}
        generator = torch.Generator().manual_seed(2)
        tensors: dict[str, Any] = {}
        for name, shape in shapes.items():
            one = torch.randint(0, 256, (1, *shape[1:], 144), dtype=torch.uint8, generator=generator)
            scale = torch.tensor([1e-4 * (2048 / 256 / shape[2]) ** 0.5, 7.5e-4], dtype=torch.float16)
            one[..., :4] = scale.view(torch.uint8)
            tensors[name] = QuantTensor(one.flatten(-2).repeat(E, 1, 1), "Q4_K")
        made = BlockExperts(stock, Activation("silu"), tensors, torch.bfloat16)
        interleave_(made)
        return made
    copies = {name: replace(weight, blocks=weight.blocks.clone()) for name, weight in like._held().items()}
    return BlockExperts(stock, Activation("silu"), copies, torch.bfloat16)


class Uploaded(PlacedExperts):
    """What one would do without slots: the experts of a step are sent to the GPU, then computed there."""

    #: all experts as the GPU reads them, and room for those of a step; for all layers, whose experts are equal
    locked: Stacks
    room: Stacks

    def _together(self, x: Tensor, ids: Tensor, found: Tensor, weights: Tensor, tail: Any, backend: str | None) -> Any:
        if len(x) > 1:
            return super()._together(x, ids, found, weights, tail, backend)
        acc, staging = self.accelerator, self.placement.staging(len(x), ids.shape[1], x.shape[1], x.dtype)
        acc.copy(staging.ids, ids)
        acc.do(functools.partial(self._send, staging))
        here = torch.arange(ids.shape[1], device=x.device, dtype=torch.int32)[None]
        options = stack_arguments(self.room) | tail._asdict()
        return experts(x, here, weights, activation=self.activation, **options)

    def _send(self, staging: Any) -> None:
        self.accelerator.record(staging.event)
        staging.event.synchronize()
        for slot, expert in enumerate(staging.ids.flatten().tolist()):
            for into, source in zip(self.room[:3], self.locked[:3], strict=True):
                self.accelerator.copy(into.blocks[slot], source.blocks[expert])  # type: ignore[union-attr]


def put(model: Any, mode: str, args: argparse.Namespace) -> Placement:
    """Place the experts of a model that lies on the CPU."""
    found = [module for _, module in on_interface(model)]
    each = sum(w.nbytes for w in found[0]._held().values()) // args.experts
    shared = sum(p.nbytes for p in model.parameters())
    slots = {"cpu": 0, "auto": args.experts // 4, "uploaded": 0, "gpu": args.experts}[mode]
    taken = torch.cuda.memory_allocated() + shared + slots * each * args.layers
    budget = placement.budget_for(taken + placement.STREAMS * placement.GROUP) + (16 << 20)
    made = Placement("cpu" if mode in ("cpu", "uploaded") else "auto", budget)
    place_model(model, made)
    if mode == "uploaded":
        one: PlacedExperts = placed(found[0])  # type: ignore[assignment]  # it has just been placed
        there = [w.to(made.device) for w in (one.stacks.gate_up, one.stacks.up, one.stacks.down)]  # type: ignore[union-attr]
        for name in ("locked", "room"):
            stacks = []
            for w in there:
                blocks = w.blocks.cpu().pin_memory() if name == "locked" else w.blocks[: args.top_k].clone()
                stacks.append(QuantTensor(blocks, w.format, w.exact, w.arrangement))
            setattr(Uploaded, name, Stacks(*stacks))
        del there
        for module in found:
            placed(module).__class__ = Uploaded  # type: ignore[union-attr]
    return made


def timed(work: Any, times: int) -> float:
    """The median of seconds."""
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "--layers": 48, "--hidden": 2048, "--experts": 128, "--intermediate": 768, "--top-k": 8, "--heads": 32,
        "--vocab": 32768, "--prefill": 2048, "--steps": 64, "--settle": 320, "--threads": 0,
    }.items():  # fmt: skip
        parser.add_argument(name, type=int, default=default, help=f"default {default}")
    parser.add_argument("--skew", type=float, default=0.35, help="of the routers: 0 uses all experts alike")
    parser.add_argument("--modes", default=",".join(MODES), help="gpu comes last: it moves the experts")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("experts are placed between RAM and a GPU, and there is none")
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"{torch.cuda.get_device_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    started = time.perf_counter()
    model = build(args)
    print(f"{args.layers} layers, built in {time.perf_counter() - started:.1f} s", flush=True)
    print(rates_of(accelerator_of("cuda")), flush=True)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, args.vocab, (args.settle + args.steps + 1, 1), generator=generator).cuda()
    prompt = torch.randint(0, args.vocab, (1, args.prefill), generator=generator).cuda()
    logits: dict[str, Tensor] = {}
    lines = ["| experts | decode tokens/s | eager | prefill tokens/s | hits | GPU above budget | logits differ by |"]
    lines.append("|---|---|---|---|---|---|---|")
    rates: dict[str, tuple[float, float]] = {}
    for mode in args.modes.split(","):
        with torch.no_grad():
            rates[mode], line = measured(model, mode, args, tokens, prompt, logits)
        torch.cuda.empty_cache()
        lines.append(line)
        print(line, flush=True)
    print("\n" + "\n".join(lines))
    for mode in ("cpu", "uploaded", "gpu"):
        if {mode, "auto"} <= rates.keys():
            (ours, prefill), (theirs, their_prefill) = rates["auto"], rates[mode]
            also = f", prefill {prefill / their_prefill:.2f}x" if their_prefill else ""
            print(f"auto against {mode}: decode {ours / theirs:.2f}x{also}")


def measured(
    model: Any, mode: str, args: argparse.Namespace, tokens: Tensor, prompt: Tensor, logits: dict[str, Tensor]
) -> tuple[tuple[float, float], str]:
    """Tokens a second of decoding and of a prompt, and the line of the table."""
    started = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    place = put(model, mode, args)
    hf.patch(model)
    logits[mode] = model(input_ids=prompt[:, :64], logits_to_keep=1, use_cache=False).logits.float()
    step = Step(model, 1, args.settle + 3 * args.steps + 64)
    step.prefill(prompt[:, :16], None)
    ready = time.perf_counter() - started
    for row in tokens[: args.settle if mode == "auto" else 16]:
        step(row)
    torch.cuda.synchronize()
    before = place.facts()
    place.waited = place.computed = 0.0
    place.calls = 0
    rows = iter(tokens[args.settle :])
    decode = timed(lambda: step(next(rows)), args.steps)
    after = place.facts()
    asked = after["hits"] + after["misses"] - before["hits"] - before["misses"]
    hits = 1.0 if place.whole else (after["hits"] - before["hits"]) / max(asked, 1)
    moves = after["moves"] - before["moves"]
    print(f"{mode}: ready in {ready:.1f} s; {place}; {moves} moves while timed", flush=True)
    step.replay, replay = step._forward, step.replay
    eager = timed(lambda: step(tokens[0]), 8)
    step.replay = replay
    passes = 1 if mode == "cpu" and args.layers > 8 else 3
    run = functools.partial(model, input_ids=prompt, use_cache=False, logits_to_keep=1)
    if passes > 1:
        run()
    prefill = math.inf if mode == "uploaded" else timed(run, passes)
    above = max(torch.cuda.max_memory_reserved() - place.budget, 0)
    right = logits.get("cpu", logits[mode])
    error = float((logits[mode] - right).square().mean().sqrt() / right.square().mean().sqrt())
    if mode != MODES[-1]:
        hf.unpatch(model)
    line = (
        f"| {mode} | {1 / decode:.1f} | {1 / eager:.1f} | {args.prefill / prefill:.0f} | {hits:.0%} | {above} | "
        f"{error:.1e} |"
    )
    return (1 / decode, args.prefill / prefill), line


if __name__ == "__main__":
    main()
