"""Where a `moefuse.nn.RoutingTape` finds the layers of a transformers model, and how it comes into them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from moefuse.hf import moe_module
from moefuse.hf.gguf_experts import BlockExperts
from moefuse.hf.moe_module import Fused
from moefuse.hf.register import NAME
from moefuse.hf.support import on_interface
from moefuse.nn import routing_tape
from moefuse.nn.recognize import NotRecognized
from moefuse.nn.routing_tape import Player, Tape


class _Block:
    """A MoE module of transformers whose experts run on us, patched or not."""

    def __init__(self, path: str, block: Any, experts: Any, seen: dict[Any, Any]) -> None:
        self.path, self.block, self.experts = path, block, experts
        self.patched = "_moefuse" in vars(block)
        self.rule: Fused | NotRecognized
        try:
            self.rule = block._moefuse if self.patched else moe_module.understand(block, seen)
        except NotRecognized as reason:
            self.rule = reason
        down = experts.stacks().down if isinstance(experts, BlockExperts) else experts.down_proj
        self.num_experts: int = down.shape[0]
        self.top_k: int | None = self.rule.rule.routing.top_k if isinstance(self.rule, Fused) else None

    def attach(self, tape: Tape) -> None:
        """Weights of replayed experts come from a router of ours: the block runs as if it were patched."""
        computes = isinstance(tape, Player) and not tape.with_weights
        if computes and isinstance(self.rule, NotRecognized):
            raise ValueError(
                f"RoutingTape.replay: the router of {self.path} must be understood to weigh replayed experts, got "
                f"{type(self.block).__name__}: {self.rule}; record and replay with weights=True"
            )
        self.block._routing_tape = self.experts._routing_tape = tape
        if computes and not self.patched:
            self.block._moefuse = self.rule
            self.block.forward = functools.partial(moe_module.forward, self.block)

    def detach(self) -> None:
        for module in (self.block, self.experts):
            vars(module).pop("_routing_tape", None)
        if not self.patched and "_moefuse" in vars(self.block):
            del self.block._moefuse, self.block.forward


def blocks_of(model: nn.Module) -> Iterator[tuple[str, _Block]]:
    """The MoE modules whose experts run on us, by their paths."""
    seen: dict[Any, Any] = {}
    for experts_path, experts in list(on_interface(model)):
        path = experts_path.partition(".base_layer")[0].rpartition(".")[0]
        block: Any = model.get_submodule(path)
        ours = isinstance(experts, BlockExperts) or experts.config._experts_implementation == NAME
        if ours or "_moefuse" in vars(block):
            yield path, _Block(path, block, experts, seen)


def register() -> None:
    """Make tapes look for these."""
    if blocks_of not in routing_tape.FINDERS:
        routing_tape.FINDERS.append(blocks_of)
