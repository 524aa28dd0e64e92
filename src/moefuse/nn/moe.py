"""The mixture-of-experts layer as a module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moefuse.nn.lora import ExpertsLoRA
from moefuse.nn.place import place, placed, unplace
from moefuse.nn.placement import Placement
from moefuse.nn.quantized import BlockModule
from moefuse.nn.routing_tape import Recorder, Tape, routed, router_logits
from moefuse.nn.shared import autocast_type, shared_expert, shared_logit, stack_arguments
from moefuse.nn.stats import RoutingStats
from moefuse.nn.training import RouterTraining
from moefuse.ops._core.arithmetic import widen
from moefuse.ops._core.checks import FLOATS, check_count, check_eps, check_instance
from moefuse.ops.composed import composed
from moefuse.ops.experts import experts
from moefuse.ops.gate import gate
from moefuse.ops.glu import check_activation, check_layout
from moefuse.ops.moe import moe
from moefuse.ops.plan import plan
from moefuse.ops.route import check_routing, route, weights_at
from moefuse.quant.gguf import GGUFFile, read
from moefuse.quant.tensor import QuantTensor, wrap
from moefuse.types import Activation, Router, Routing, Stacks, Tail

#: what every expert has a part of
_EXPERTS = ("gate_up", "up", "down", "gate_up_bias", "down_bias")
_FLAGS = ("bias", "logit_bias", "selection_bias", "per_expert_scale", "shared_gate", "norm", "next_norm")


class MoE(BlockModule):
    """Router, experts, optional shared expert, and an optional tail: residual and the next norm.

    Experts from `from_gguf` stay in their blocks: buffers of bytes, which ``to``, ``state_dict`` and its kin treat like
    any other; gate and up then usually come apart, as ``gate_up`` and ``up``.

    Args:
        hidden: ``H``.
        intermediate: ``I`` of one expert.
        num_experts: ``E``.
        routing: the rule.
        activation: a name or an `Activation`.
        layout: how gate and up rows stand in ``gate_up``, and by default in ``shared_gate_up``.
        bias: experts have biases.
        logit_bias: the router product has a bias.
        selection_bias: a buffer that is added to the scores for selection only.
        per_expert_scale: a learned factor per expert.
        shared_intermediate: size of the shared expert; 0 for none.
        shared_layout: how gate and up rows stand in ``shared_gate_up``.
        shared_gate: the shared expert is weighted by the sigmoid of a learned product.
        norm: RMSNorm of the input before router and experts.
        next_norm: also return the RMSNorm of the result, for the layer that follows.
        eps: of both norms.
        router_training: losses and noise while training; see `auxiliary_loss`.

    ``stats`` may hold a `RoutingStats`, ``lora`` is set by `add_lora`. `place` leaves experts in RAM that a GPU cannot
    hold.

    >>> layer = MoE(hidden=64, intermediate=32, num_experts=8, routing=Routing(top_k=2), norm=True)
    >>> x = torch.randn(2, 5, 64)
    >>> layer(x, residual=x).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        routing: Routing,
        *,
        activation: str | Activation = "silu",
        layout: str = "halves",
        bias: bool = False,
        logit_bias: bool = False,
        selection_bias: bool = False,
        per_expert_scale: bool = False,
        shared_intermediate: int = 0,
        shared_layout: str | None = None,
        shared_gate: bool = False,
        norm: bool = False,
        next_norm: bool = False,
        eps: float = 1e-6,
        router_training: RouterTraining | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden", hidden), ("intermediate", intermediate), ("num_experts", num_experts)):
            check_count("MoE", name, size, 1)
        check_count("MoE", "shared_intermediate", shared_intermediate, 0)
        check_routing("MoE", routing, num_experts)
        shared_layout = layout if shared_layout is None else shared_layout
        check_layout("MoE", layout)
        check_layout("MoE", shared_layout)
        check_eps("MoE", "eps", eps)
        flags = (bias, logit_bias, selection_bias, per_expert_scale, shared_gate, norm, next_norm)
        for name, flag in zip(_FLAGS, flags, strict=True):
            check_instance("MoE", name, flag, bool)
        if shared_gate and not shared_intermediate:
            raise ValueError("MoE: shared_gate must come with shared_intermediate, got 0")
        if router_training is not None:
            check_instance("MoE", "router_training", router_training, RouterTraining)
        if dtype not in (None, *FLOATS):
            raise TypeError(f"MoE: dtype must be a floating-point type, got {dtype}")
        self.routing, self.layout, self.shared_layout, self.eps = routing, layout, shared_layout, eps
        self.router_training = router_training
        self.auxiliary_loss: Tensor | None = None
        self.stats: RoutingStats | None = None
        self._routing_tape: Tape | None = None
        self.lora: ExpertsLoRA | None = None
        self.specs = {}
        self.activation = check_activation("MoE", activation)
        E, H, I = num_experts, hidden, intermediate
        rows = self.activation.width

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        def optional(wanted: bool | int, *shape: int) -> nn.Parameter | None:
            return parameter(*shape) if wanted else None

        self.router = parameter(E, H)
        self.gate_up = parameter(E, rows(I), H)
        self.up = optional(False)
        self.down = parameter(E, H, I)
        self.gate_up_bias = optional(bias, E, rows(I))
        self.down_bias = optional(bias, E, H)
        self.logit_bias = optional(logit_bias, E)
        self.per_expert_scale = optional(per_expert_scale, E)
        self.shared_gate_up = optional(shared_intermediate, rows(shared_intermediate), H)
        self.shared_up = optional(False)
        self.shared_down = optional(shared_intermediate, H, shared_intermediate)
        self.shared_gate = optional(shared_gate, H)
        self.norm_weight = optional(norm, H)
        self.next_norm_weight = optional(next_norm, H)
        self.register_buffer("selection_bias", torch.zeros(E, device=device) if selection_bias else None)
        self.selection_bias: Tensor | None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Products by their fan-in, norms and scales to one, biases to zero."""
        if self.router.is_meta:
            return  # nothing to fill, and torch would load its whole compiler to fill it
        for name, value in self.named_parameters():
            if name.endswith("norm_weight") or name == "per_expert_scale":
                nn.init.ones_(value)
            elif name.endswith("bias"):
                nn.init.zeros_(value)
            else:
                nn.init.normal_(value, std=value.shape[-1] ** -0.5)

    @classmethod
    def from_hf(cls, block: nn.Module) -> MoE:
        """The module that computes what a Hugging Face MoE block does, sharing its parameters.

        Takes the modules that `moefuse.nn.recognize` knows by what they do; any other is refused, never approximated.
        Stacks that Hugging Face keeps transposed (gpt-oss) are laid anew, once.
        """
        from moefuse.nn.from_hf import read_layer

        return cls._made(*read_layer(block)).train(block.training)

    @classmethod
    def from_gguf(cls, source: str | os.PathLike[str] | GGUFFile, layer: int, *, exact: bool = False) -> MoE:
        """The experts of one layer of a GGUF file, in the file's blocks: views of its map, nothing is copied.

        Takes the architectures that `moefuse.nn.from_gguf` knows, by name; any other is refused, never approximated.
        Parameters come frozen. Gemma 4's module takes the residual stream, for its norm belongs to the layer.

        Args:
            source: a path, or what `moefuse.quant.gguf.read` returned, which maps once for all layers.
            layer: counted from 0.
            exact: keep activations in float32, see `QuantTensor`.
        """
        from moefuse.nn.from_gguf import read_layer

        options, tensors = read_layer(source if isinstance(source, GGUFFile) else read(source), layer)
        return cls._made(options, tensors, exact).requires_grad_(False)

    @classmethod
    def _made(cls, options: Mapping[str, Any], tensors: Mapping[str, Tensor | QuantTensor], exact: bool = False) -> MoE:
        """The module of these arguments with these tensors, which it shares."""
        with torch.device("meta"):
            module = cls(**options)
        for name, value in tensors.items():
            if isinstance(value, QuantTensor):
                delattr(module, name)
                module._hold(name, value.exactly(exact))
            elif name == "selection_bias":
                module.selection_bias = value
            else:
                setattr(module, name, value if isinstance(value, nn.Parameter) else nn.Parameter(value))
        return module

    def place(
        self, experts: str | Placement = "auto", gpu_memory: str | int | None = None, *, device: str = "cuda"
    ) -> Placement:
        """Put the layer on a GPU and leave its experts in RAM, but for those that fit, see `Placement`.

        In a ``load`` of a `Placement` its path is the empty string.
        """
        placement = Placement.of(experts, gpu_memory, device)
        if placement is None:  # no words at all, which a model loads without
            raise ValueError("placement: experts must be one of cpu, auto, got None")
        if self.lora is not None:
            raise ValueError("MoE: experts with adapters cannot be placed: merge_lora first")
        self.unplace()
        self.to("cpu")  # experts too, wherever the layer was: refused, it lies in one place
        place(self, lambda: {"": (self._stacks(None), self.activation, _EXPERTS)}, placement, pin=True)
        return placement

    def unplace(self) -> None:
        """Undo `place`: experts in RAM are like other parts of the layer again; nothing moves."""
        unplace(self)

    def stack(self, name: str, dtype: torch.dtype | None = None) -> Any:
        """A weight, in its blocks where it has them, else in ``dtype`` where that is given; a shared expert's as a
        stack of one."""
        value = getattr(self, name)
        if value is None:
            return None
        spec = self.specs.get(name)
        if spec is None and dtype is not None:
            value = value.to(dtype)
        return wrap(value.unsqueeze(0) if value.dim() == 2 else value, spec)

    def _stacks(self, dtype: torch.dtype | None) -> Stacks:
        """The experts as the ops take them; where gate and up come apart, there is no layout to choose."""
        gate_up, up, down = (self.stack(name, dtype) for name in ("gate_up", "up", "down"))
        layout = self.layout if up is None else "halves"
        return Stacks(gate_up, up, down, self.gate_up_bias, self.down_bias, layout)

    def _shared_stacks(self, dtype: torch.dtype | None) -> Stacks:
        gate_up, up, down = (self.stack(name, dtype) for name in ("shared_gate_up", "shared_up", "shared_down"))
        return Stacks(gate_up, up, down, layout=self.shared_layout if up is None else "halves")

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, backend: str | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``[.., H]`` to ``[.., H]``, or to ``(out, normed)`` with ``next_norm``; ``residual`` is added to out.

        Under ``torch.autocast`` the products of the experts are in its type, whatever x and weights are; router, norms
        and sums are float32 as ever.
        """
        self._check(x, residual)
        dtype = autocast_type(x)
        if dtype is None:
            return self._forward(x, residual, backend, None)
        with torch.autocast(x.device.type, enabled=False):
            return self._forward(x, residual, backend, dtype)

    def _check(self, x: Any, residual: Any) -> None:
        H = self.router.shape[1]
        check_instance("MoE", "x", x, Tensor)
        if x.dim() < 1 or x.shape[-1] != H:
            raise ValueError(f"MoE: x must be [.., hidden={H}], got shape {list(x.shape)}")
        if residual is not None:
            check_instance("MoE", "residual", residual, Tensor)
            if residual.shape != x.shape:
                raise ValueError(f"MoE: residual must be {list(x.shape)} like x, got {list(residual.shape)}")

    def _forward(
        self, x: Tensor, residual: Tensor | None, backend: str | None, dtype: torch.dtype | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Products in ``dtype``, or in the type that x and the stacks have."""
        rows = x.reshape(-1, x.shape[-1])
        stacks = self._stacks(dtype if placed(self) is None else None)
        if dtype is None:
            plain = next((w for w in (stacks.gate_up, stacks.up, stacks.down) if isinstance(w, Tensor)), x)
            if plain.dtype != x.dtype:
                raise TypeError(
                    f"MoE: x must have the type of the experts, {plain.dtype}, got {x.dtype}: cast one of the two, or "
                    "run under torch.autocast"
                )
        added = None if residual is None else residual.reshape(rows.shape)
        run = self._in_one_call if self._is_whole(dtype in (None, x.dtype)) else self._in_parts
        result = run(rows, stacks, added, backend, dtype)
        if isinstance(result, Tensor):
            return _shaped(result, x)
        out, normed = result
        return _shaped(out, x), _shaped(normed, x)

    def _is_whole(self, same_type: bool) -> bool:
        """Whether one call does all: nothing comes in between router and experts, neither a cast nor adapters,
        statistics, a router's training, or a shared expert that needs the normed rows."""
        normed = self.norm_weight is not None and self.shared_down is not None
        noted = (
            self.stats is not None
            or self._routing_tape is not None
            or (self.training and self.router_training is not None)
        )
        return same_type and not normed and not noted and self.lora is None and placed(self) is None

    def _in_one_call(
        self, rows: Tensor, stacks: Stacks, residual: Tensor | None, backend: str | None, dtype: torch.dtype | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        tail = self._tail(rows, residual, backend, dtype)
        return moe(
            rows,
            self.router,
            routing=self.routing,
            activation=self.activation,
            shared=tail.shared,
            shared_logit=tail.shared_logit,
            residual=tail.residual,
            next_norm_weight=tail.norm_weight,
            next_eps=tail.eps,
            backend=backend,
            **self._router_options(),
            **stack_arguments(stacks),
        )

    def _in_parts(
        self, rows: Tensor, stacks: Stacks, residual: Tensor | None, backend: str | None, dtype: torch.dtype | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        weights, ids, normed = self._route(rows, backend)
        if dtype is not None:
            normed = normed.to(dtype)
        if self.stats is not None:
            self.stats.record(ids, weights)
        tail = self._tail(normed, residual, backend, dtype)
        layer = placed(self)
        if layer is not None:
            if self.lora is not None:
                raise ValueError("MoE: placed experts cannot have adapters: unplace first")
            return layer(normed, ids, weights, backend=backend, **tail._asdict())
        if self.lora is not None:
            order = plan(ids, self.router.shape[0], backend=backend)
            return composed(normed, ids, weights, stacks, order, self.activation, tail, backend, adapters=self.lora)
        options = stack_arguments(stacks) | tail._asdict()
        return experts(normed, ids, weights, activation=self.activation, backend=backend, **options)

    def _router_options(self) -> dict[str, Any]:
        return {
            "norm_weight": self.norm_weight,
            "eps": self.eps,
            "bias": self.selection_bias,
            "logit_bias": self.logit_bias,
            "per_expert_scale": self.per_expert_scale,
        }

    def _route(self, rows: Tensor, backend: str | None) -> tuple[Tensor, ...]:
        """Weights, ids and the experts' input; in training with the router's losses and noise."""
        rule = self.router_training if self.training else None
        tape = self._routing_tape
        if rule is None and tape is not None:
            options = self._router_options()
            return routed(tape, rows, Router(self.router, **options), self.routing, backend)
        if rule is None:
            options = self._router_options()
            return gate(rows, self.router, self.routing, return_normed=True, backend=backend, **options)
        normed = widen(rows)
        if self.norm_weight is not None:
            normed = nn.functional.rms_norm(normed, normed.shape[-1:], widen(self.norm_weight), self.eps)
        logits = router_logits(rule.perturbed_input(normed), self.router, self.logit_bias, backend)
        options = {"bias": self.selection_bias, "per_expert_scale": self.per_expert_scale}
        perturbed = rule.perturbed_logits(logits)
        weights, ids = route(perturbed, self.routing, backend=backend, **options)
        if isinstance(tape, Recorder):
            tape.record(ids, weights)
        elif tape is not None:
            ids, given = tape.next(rows)
            weights = weights_at(perturbed, ids, self.routing, self.per_expert_scale) if given is None else given
        self.auxiliary_loss = rule.loss(logits, ids, self.routing)
        return weights, ids, normed.to(rows.dtype)

    def _tail(self, x: Tensor, residual: Tensor | None, backend: str | None, dtype: torch.dtype | None) -> Tail:
        """What follows the experts' sum; x is what they see."""
        rest = Tail(residual=residual, norm_weight=self.next_norm_weight, eps=self.eps)
        if self.shared_down is None:
            return rest
        out = shared_expert(x, self._shared_stacks(dtype), self.activation, backend)
        return rest._replace(shared=out, shared_logit=shared_logit(x, self.shared_gate))

    def extra_repr(self) -> str:
        E, H, I = self.stack("down").shape
        shared = "" if self.shared_down is None else f", shared_intermediate={self.stack('shared_down').shape[2]}"
        sizes = f"hidden={H}, intermediate={I}, num_experts={E}{shared}"
        formats = "".join(f", {name}={spec}" for name, spec in self.specs.items())
        return f"{sizes}{formats}, activation={self.activation.kind}, {self.routing}"


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """``[T, H]`` in the leading dimensions of ``like``; not a view to autograd, for whose hooks FSDP2 would fear."""
    return rows if like.dim() == 2 else torch.ops.aten._unsafe_view.default(rows, list(like.shape))
