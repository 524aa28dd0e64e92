"""Experts larger than the card: a model with some experts in slots, against what one would do without them.

Qwen3-30B-A3B's widths with random Q4_K experts: `python examples/placed_speed.py --layers 48` on a GPU. Routers are
skewed as those of trained models are: by default a quarter of the experts, another one in each layer, has 57% of the
load. *auto* has a quarter of the experts in slots; *cpu* has all on the CPU; *uploaded* sends each step's experts to
the GPU, from locked memory and already in its order; *gpu* has room for all; *plain* is the same without any of these
words; *exact* gives logits alone, whose products round no activations to 8 bits. Decoding is captured in each case.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moefuse import QuantTensor, experts, hf
from moefuse.hf.capture import Step
from moefuse.hf.gguf_experts import BlockExperts
from moefuse.hf.place import place_model, unplace_model
from moefuse.hf.support import on_interface
from moefuse.nn import Placement, placement
from moefuse.nn.accelerator import accelerator_of
from moefuse.nn.place import placed
from moefuse.nn.placed_experts import PlacedExperts
from moefuse.nn.shared import stack_arguments
from moefuse.types import Activation, Stacks

#: in this order, as the last ones move the experts to the GPU for good
MODES = ("auto", "cpu", "uploaded", "gpu", "plain", "exact")
#: tokens whose logits are compared
COMPARED = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "--layers": 48, "--hidden": 2048, "--experts": 128, "--intermediate": 768, "--top-k": 8, "--heads": 32,
        "--vocab": 32768, "--prefill": 2048, "--steps": 64, "--settle": 320, "--threads": 0, "--seconds": 3600,
    }.items():  # fmt: skip
        parser.add_argument(name, type=int, default=default, help=f"default {default}")
    parser.add_argument("--skew", type=float, default=0.35, help="of the routers: 0 uses all experts alike")
    parser.add_argument("--modes", default=",".join(MODES), help="some of them, in their order")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("experts are placed between RAM and a GPU, and there is none")
    if args.threads:
        torch.set_num_threads(args.threads)
    started = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    model = build(args)
    print(f"{args.layers} layers, built in {time.perf_counter() - started:.1f} s", flush=True)
    print(placement.rates_of(accelerator_of("cuda")), flush=True)
    found: dict[str, Measured] = {}
    for mode in (mode for mode in MODES if mode in args.modes.split(",")):
        if time.perf_counter() - started > args.seconds:
            print(f"{mode}: not begun, {args.seconds} s are over")
            continue
        try:
            with torch.no_grad():
                found[mode] = measured(model, mode, args)
        except Exception:  # the other modes are worth having without this one
            traceback.print_exc()
            unplace_model(model)
        torch.cuda.empty_cache()
    report(found, args)


@dataclass
class Measured:
    """Of one mode; tokens a second and bytes above the budget, None where they were not measured."""

    logits: Tensor
    decode: float | None = None
    eager: float | None = None
    prefill: float | None = None
    hits: float | None = None
    above: tuple[int, int] | None = None


def measured(model: Any, mode: str, args: argparse.Namespace) -> Measured:
    """One mode; the model is on the CPU before, and afterwards but for the last modes."""
    started = time.perf_counter()
    device = accelerator_of("cuda").device
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, args.vocab, (args.settle + args.steps + 1, 1), generator=generator).to(device)
    prompt = torch.randint(0, args.vocab, (1, args.prefill), generator=generator).to(device)
    place = None
    if mode in ("plain", "exact"):
        model.to(device)
        for module in model.modules() if mode == "exact" else ():
            if isinstance(module, BlockExperts):
                module.exactly_()
    else:
        place = put(model, mode, args)
    hf.patch(model)
    logits = model(input_ids=prompt[:, :COMPARED], use_cache=False).logits.float()
    if mode == "exact":
        return Measured(logits)
    step = Step(model, 1, args.settle + 3 * args.steps + 64)
    step.prefill(prompt[:, :16], None)
    ready = time.perf_counter() - started
    for row in tokens[: args.settle if mode == "auto" else 16]:
        step(row)
    torch.cuda.synchronize()
    before = place.facts() if place else {}
    if place:
        place.waited = place.computed = 0.0
        place.calls = 0
    rows = iter(tokens[args.settle :])
    decode = timed(lambda: step(next(rows)), args.steps)
    after = place.facts() if place else {}
    hits = None
    if place and not place.whole:
        hit, missed = (after[name] - before[name] for name in ("hits", "misses"))
        hits = hit / max(hit + missed, 1)
        print(f"{mode}: {place}; {after['moves'] - before['moves']} moves while timed", flush=True)
    step.logits, captured = None, step.logits
    eager = timed(lambda: step(tokens[0]), 8)
    step.logits = captured
    peaks = [torch.cuda.max_memory_reserved()]
    prefill = None
    if mode != "uploaded":
        run = functools.partial(model, input_ids=prompt, use_cache=False, logits_to_keep=1)
        run()
        prefill = args.prefill / timed(run, 2)
    peaks.append(torch.cuda.max_memory_reserved())
    above = None if place is None else (max(peaks[0] - place.budget, 0), max(peaks[1] - place.budget, 0))
    if place and place.shrunk:
        print(f"{mode}: memory ran out, and slots were halved", flush=True)
    if mode == "gpu":  # it stays there
        vars(model).pop("_moefuse_placement").close()
    elif place:
        hf.unpatch(model)
    made = Measured(logits, 1 / decode, 1 / eager, prefill, hits, above)
    rate = "" if prefill is None else f", prefill {prefill:.0f}"
    print(f"{mode}: ready in {ready:.1f} s; decode {1 / decode:.1f} tokens/s{rate}; above budget {above}", flush=True)
    return made


def report(found: dict[str, Measured], args: argparse.Namespace) -> None:
    """The table, and what stands against what."""
    print(f"\n{args.layers} layers, prompt of {args.prefill} tokens\n")
    print("| experts | decode tokens/s | eager | prefill tokens/s | hits | GPU above budget: decode, prefill |")
    print("|---|---|---|---|---|---|")
    for mode, one in found.items():
        if one.decode is not None and one.eager is not None:
            prefill = "" if one.prefill is None else f"{one.prefill:.0f}"
            hits = "" if one.hits is None else f"{one.hits:.0%}"
            above = "" if one.above is None else f"{one.above[0]}, {one.above[1]}"
            print(f"| {mode} | {one.decode:.1f} | {one.eager:.1f} | {prefill} | {hits} | {above} |")
    for ours, theirs in (("auto", "cpu"), ("auto", "uploaded"), ("gpu", "plain"), ("auto", "plain")):
        if {ours, theirs} <= found.keys():
            a, b = found[ours], found[theirs]
            ratios = {"decode": (a.decode, b.decode), "prefill": (a.prefill, b.prefill)}
            said = [f"{name} {x / y:.2f}x" for name, (x, y) in ratios.items() if x and y]
            print(f"{ours} against {theirs}: {', '.join(said)}")
    for other in ("exact", "plain", "cpu"):
        if other in found:
            want = found[other].logits
            said = [f"{mode} {difference(one.logits, want):.1e}" for mode, one in found.items() if mode != other]
            print(f"logits of {COMPARED} tokens against {other}: {', '.join(said)}", flush=True)


def difference(got: Tensor, want: Tensor) -> float:
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def build(args: argparse.Namespace) -> Any:
    """The model on the CPU, of numbers that are drawn on the GPU, which is faster."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = Qwen3MoeConfig(
        hidden_size=args.hidden, num_hidden_layers=args.layers, num_experts=args.experts, head_dim=128,
        moe_intermediate_size=args.intermediate, num_experts_per_tok=args.top_k, num_attention_heads=args.heads,
        num_key_value_heads=max(args.heads // 8, 1), vocab_size=args.vocab, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = Qwen3MoeForCausalLM(settings).to(torch.bfloat16)
    generator = torch.Generator(accelerator_of("cuda").device).manual_seed(1)
    for path, stock in list(on_interface(model)):
        model.set_submodule(path, of_blocks(args, stock, generator))
    for name, value in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        noise = torch.randn(value.shape, device=generator.device, generator=generator)
        numbers = noise * (1.0 if "embed" in name else value.shape[-1] ** -0.5)
        if value.dim() == 1:
            numbers = torch.ones_like(noise)
        elif name.endswith("mlp.gate.weight"):  # some experts have larger logits, and so are chosen more
            sizes = torch.randn(len(noise), 1, device=generator.device, generator=generator)
            numbers *= torch.exp(args.skew * sizes)
        kept = nn.Parameter(numbers.bfloat16().cpu(), requires_grad=False)
        model.get_submodule(owner)._parameters[leaf] = kept
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    model.set_experts_implementation("moefuse")
    return model.eval()


def of_blocks(args: argparse.Namespace, stock: Any, generator: torch.Generator) -> BlockExperts:
    """Random blocks whose numbers have the size of trained ones, in the order that the CPU reads fastest."""
    E, H, I = args.experts, args.hidden, args.intermediate
    shapes = {"gate_up": (E, I, H // 256), "up": (E, I, H // 256), "down": (E, H, I // 256)}
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        blocks = torch.randint(
            0, 256, (*shape, 144), dtype=torch.uint8, device=generator.device, generator=generator
        )  # fmt: skip
        scale = torch.tensor([1e-4 * (2048 / 256 / shape[2]) ** 0.5, 7.5e-4], dtype=torch.float16)
        blocks[..., :4] = scale.view(torch.uint8).to(blocks.device)
        made = QuantTensor(blocks.flatten(-2), "Q4_K").arranged("interleaved")
        tensors[name] = replace(made, blocks=made.blocks.cpu())
    return BlockExperts(stock, Activation("silu"), tensors, torch.bfloat16)


class Uploaded(PlacedExperts):
    """What one would do without slots: the experts of a step are sent to the GPU, then computed there."""

    #: all experts of a layer as the GPU reads them, and room for those of a step; other layers send them, too
    locked: Stacks
    room: Stacks

    @classmethod
    def prepare(cls, stacks: Stacks, top_k: int) -> None:
        acc = accelerator_of("cuda")
        locked, room = [], []
        for weight in (stacks.gate_up, stacks.up, stacks.down):
            assert isinstance(weight, QuantTensor)
            there = weight.to(acc.device)
            memory = acc.host(there.blocks.nbytes).view(there.blocks.shape).copy_(there.blocks)
            locked.append(replace(there, blocks=memory))
            room.append(replace(there, blocks=there.blocks[:top_k].clone()))
        cls.locked, cls.room = Stacks(*locked), Stacks(*room)

    def _together(self, x: Tensor, ids: Tensor, found: Tensor, weights: Tensor, tail: Any, backend: str | None) -> Any:
        if len(x) > 1:
            return super()._together(x, ids, found, weights, tail, backend)
        acc, staging = self.accelerator, self.placement.staging.call(1, ids.shape[1], x.shape[1], x.dtype)
        acc.copy(staging.ids, ids.to(torch.int32))
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
    modules: list[Any] = [module for _, module in on_interface(model)]
    if mode == "uploaded":
        Uploaded.prepare(modules[0].stacks(), args.top_k)
    each = sum(weight.nbytes for weight in modules[0]._held().values()) // args.experts
    shared = sum(p.nbytes for p in model.parameters())
    slots = {"auto": args.experts // 4, "gpu": args.experts}.get(mode, 0)
    taken = torch.cuda.memory_allocated() + shared + int((slots + 0.9) * each * args.layers)
    # A prompt takes the same room whatever the layers: that which a budget of 8 GiB leaves, for a model of 48.
    placement.LEAST_ROOM = 1 << 30
    budget = placement.budget_for(taken + placement.STREAMS * placement.GROUP)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    made = Placement("auto" if slots else "cpu", budget)
    place_model(model, made)
    for module in modules if mode == "uploaded" else ():
        placed(module).__class__ = Uploaded  # type: ignore[assignment]  # it has just been placed
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


if __name__ == "__main__":
    main()
