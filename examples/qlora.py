"""Fine-tune a mixture of experts from its blocks: experts stay in Q4_K, adapters beside them learn.

By default the model in the box, which knows the King James Version and Jane Austen, learns the prose of this
project's documents. Any GGUF file or directory that `moefuse run` takes will do:

    python examples/qlora.py
    python examples/qlora.py --model path/to/model --text notes.txt --rank 16 --steps 500 --out merged
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from moefuse.hf import BlockExperts, dequantize, quantize_
from moefuse.hf.load import load
from moefuse.nn import add_lora

ROOT = Path(__file__).parents[1]
BOX = ROOT / "src" / "moefuse" / "box" / "box.gguf"


def batches(tokens: Tensor, size: int, length: int, steps: int) -> Any:
    """Random pieces of a text."""
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - length, (size,))
        yield torch.stack([tokens[start : start + length] for start in starts.tolist()])


@torch.no_grad()
def held_out_loss(model: Any, tokens: Tensor, length: int) -> float:
    pieces = tokens[: len(tokens) // length * length].view(-1, length)
    return sum(float(model(input_ids=piece[None], labels=piece[None]).loss) for piece in pieces) / len(pieces)


def main(
    model: Annotated[Path, typer.Option(exists=True, help="A GGUF file, or a transformers model's directory.")] = BOX,
    text: Annotated[list[Path] | None, typer.Option(exists=True, help="To learn; the last tenth is held out.")] = None,
    weights: Annotated[str, typer.Option(help="The format of experts that are in numbers.")] = "Q4_K",
    rank: Annotated[int, typer.Option(min=1)] = 8,
    steps: Annotated[int, typer.Option(min=1)] = 60,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a piece.")] = 64,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 1e-2,
    device: Annotated[str, typer.Option()] = "cpu",
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the merged model, in numbers, into this folder.")] = None,
) -> None:
    """Train adapters on experts in blocks and print the loss before and after."""
    torch.manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    # Activations stay as they are, so that merging changes nothing but the last digits.
    network, tokenizer = load(model, dtype=dtype, device=device, exact=True)
    if not any(isinstance(module, BlockExperts) for module in network.modules()):
        print(quantize_(network, weights, exact=True))
    network.requires_grad_(False)
    adapters = [add_lora(module, rank) for module in network.modules() if isinstance(module, BlockExperts)]
    learned = [parameter for one in adapters for parameter in one.parameters()]
    paths = text or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    words = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    tokens = tokenizer(words, return_tensors="pt").input_ids[0].to(device)
    train, held_out = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :][: 16 * length]
    if len(held_out) < length:
        raise typer.BadParameter(f"a text must have at least {10 * length:,} tokens, got {len(tokens):,}")
    stacks = [module.stack(name) for module in network.modules() if isinstance(module, BlockExperts)
              for name in ("gate_up", "up", "down")]  # fmt: skip
    blocks = sum(stack.nbytes for stack in stacks if stack is not None)
    print(f"experts {blocks / 2**20:.1f} MiB in blocks, {sum(p.numel() for p in learned):,} numbers to learn")
    before = held_out_loss(network, held_out, length)
    optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for step, batch in enumerate(batches(train, batch_size, length, steps)):
        loss = network(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4d}: {loss.item():.3f} nats")
    print(f"held out: {before:.3f} nats -> {held_out_loss(network, held_out, length):.3f} nats")
    if out is not None:
        with torch.no_grad():
            piece = held_out[None, :length]
            beside = network(input_ids=piece).logits.float()
            dequantize(network)  # adapters are folded into the numbers
            merged = network(input_ids=piece).logits.float()
        print(f"merged: {float((merged - beside).norm() / beside.norm()):.1e} from the adapters beside their blocks")
        network.save_pretrained(out)
        tokenizer.save_pretrained(out)


if __name__ == "__main__":
    typer.run(main)
