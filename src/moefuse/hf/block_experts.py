"""Experts that stay in GGUF blocks inside a transformers model, and the way back to numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moefuse.ops.experts import experts
from moefuse.quant.tensor import QuantTensor, wrap
from moefuse.types import Activation


class Stacks(NamedTuple):
    """An experts module's weights as the ops take them: ``[E, 2I or I, H]``, or gate and up apart, and ``[E, H, I]``;
    and their biases."""

    gate_up: Any
    down: Any
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class BlockExperts(nn.Module):
    """Takes the place of a model's experts module and computes with moefuse, whichever implementation is named.

    Stacks are buffers: bytes where they are in blocks, so that ``to`` moves them and leaves their type alone. They have
    one layout for every family: rows along the input, gate before up or apart from it.

    Args:
        stock: the module it stands for; only its sizes and layout are kept, so it may be on the meta device.
        activation: what stands between the products.
        tensors: as `moefuse.nn.from_gguf.read_experts` returns them.
        dtype: of the model; of every tensor that is not in blocks.
        exact: keep activations in float32, see `QuantTensor`.
    """

    has_gate, is_transposed, is_concatenated = True, False, True

    def __init__(
        self,
        stock: Any,
        activation: Activation,
        tensors: Mapping[str, Tensor | QuantTensor],
        dtype: torch.dtype,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self._stock = (stock,)  # in a tuple it is no submodule
        self.config, self.activation = stock.config, activation
        self.num_experts = tensors["down"].shape[0]
        self.has_bias = "down_bias" in tensors
        #: name of a stack in blocks -> its `QuantTensor.spec`
        self.specs: dict[str, str] = {}
        names = {
            "gate_up": "gate_up_proj" if "up" not in tensors else "gate_proj", "up": "up_proj", "down": "down_proj",
            "gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias",
        }  # fmt: skip
        for name, value in tensors.items():
            if isinstance(value, QuantTensor):
                self.specs[names[name]] = value.exactly(exact).spec
                self.register_buffer(names[name], value.blocks)
            else:
                self.register_buffer(names[name], value.to(dtype))

    def _stack(self, name: str) -> Any:
        return wrap(getattr(self, name), self.specs.get(name))

    def stacks(self) -> Stacks:
        """What the ops compute with."""
        apart = "up_proj" in self._buffers
        gate_up = (self._stack("gate_proj"), self._stack("up_proj")) if apart else self._stack("gate_up_proj")
        biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
        return Stacks(gate_up, self._stack("down_proj"), *biases)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As transformers calls its own: rows ``[T, H]``, ids and weights ``[T, top_k]``; returns ``[T, H]``."""
        gate_up, down, gate_up_bias, down_bias = self.stacks()
        # Under autocast the rows may be wider or narrower than numbers among the stacks, which decide.
        x = hidden_states if self.takes(hidden_states.dtype) else hidden_states.to(self._plain_type())
        out: Any = experts(
            x, top_k_index, top_k_weights, gate_up, down, activation=self.activation, gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )  # fmt: skip
        return out.to(hidden_states.dtype)  # type: ignore[no-any-return]

    def _plain_type(self) -> torch.dtype | None:
        """Of the stacks that are numbers in the file, too."""
        stacks = (name for name in self._buffers if name.endswith("_proj") and name not in self.specs)
        return next((getattr(self, name).dtype for name in stacks), None)

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether rows of this type need no conversion."""
        return self._plain_type() in (None, dtype)

    def dequantized(self, dtype: torch.dtype) -> nn.Module:
        """The module it stands for, with numbers."""
        stock: Any = self._stock[0]
        gate_up, down, gate_up_bias, down_bias = self.stacks()
        parts = [_numbers(part, dtype) for part in (gate_up if isinstance(gate_up, tuple) else (gate_up,))]
        values = {"gate_up_proj": _joined(parts, stock), "down_proj": _numbers(down, dtype)}
        if stock.is_transposed:
            values = {name: value.transpose(1, 2).contiguous() for name, value in values.items()}
        if gate_up_bias is not None and down_bias is not None:
            values["gate_up_proj_bias"] = _joined([gate_up_bias], stock)
            values["down_proj_bias"] = down_bias
        for name, value in values.items():
            setattr(stock, name, nn.Parameter(value, requires_grad=False))
        return stock.train(self.training)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        E, H, I = self._stack("down_proj").shape
        formats = "".join(f", {name}={spec}" for name, spec in self.specs.items())
        return f"experts={E}, hidden={H}, intermediate={I}{formats}, activation={self.activation.kind}"


def _numbers(stack: Tensor | QuantTensor, dtype: torch.dtype) -> Tensor:
    return stack.dequantize(dtype) if isinstance(stack, QuantTensor) else stack.to(dtype)


def _joined(parts: list[Tensor], stock: Any) -> Tensor:
    """Gate and up rows in one tensor, in the order that the stock module has them."""
    whole = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    if stock.is_concatenated:
        return whole
    return torch.stack(whole.chunk(2, 1), 2).flatten(1, 2)


def block_experts(model: nn.Module) -> dict[str, BlockExperts]:
    """Path -> experts in blocks."""
    return {path: module for path, module in model.named_modules() if isinstance(module, BlockExperts)}


def dequantized_bytes(model: nn.Module) -> int:
    """What `dequantize` would take."""
    weights = 0
    for module in block_experts(model).values():
        gate_up, down, *_ = module.stacks()
        for stack in (*(gate_up if isinstance(gate_up, tuple) else (gate_up,)), down):
            weights += stack.shape.numel()
    return weights * next(model.parameters()).dtype.itemsize


def refuse_to_save(*_: Any, **__: Any) -> None:
    """What ``save_pretrained`` is on a model whose experts are in blocks."""
    raise ValueError(
        "save_pretrained: a transformers checkpoint has no place for experts in GGUF blocks: keep the GGUF file, or "
        "call moefuse.hf.dequantize(model) first"
    )


def dequantize(model: nn.Module) -> None:
    """Give a model of `from_gguf` its own experts modules back, with numbers instead of blocks, in place.

    That takes the memory of the whole model in its type. It is for what computes with numbers only: transformers' own
    implementations, ``save_pretrained``, training of experts.
    """
    for path, module in block_experts(model).items():
        model.set_submodule(path, module.dequantized(next(model.parameters()).dtype))
    vars(model).pop("save_pretrained", None)
