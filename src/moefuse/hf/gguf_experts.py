"""What stays in GGUF blocks inside a transformers model, experts above all, and the way back to numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moefuse.nn.lora import ExpertsLoRA
from moefuse.nn.place import placed
from moefuse.nn.quantized import BlockModule, QuantEmbedding, QuantLinear, QuantModule
from moefuse.nn.shared import stack_arguments
from moefuse.ops.composed import composed
from moefuse.ops.experts import experts
from moefuse.ops.plan import plan
from moefuse.quant.tensor import QuantTensor, wrap
from moefuse.types import Activation, Stacks, Tail, Weight

#: what it may hold, by the names of `moefuse.nn.MoE`; no converter of transformers' checkpoints knows them
_STACKS = ("gate_up", "up", "down")
TENSORS = (*_STACKS, "gate_up_bias", "down_bias")


class BlockExperts(BlockModule):
    """Takes the place of a model's experts module and computes with moefuse, whichever implementation is named.

    Stacks are buffers: bytes where they are in blocks, so that ``to`` moves them and leaves their type alone. They have
    one layout for every family: rows along the input, gate before up or apart from it.

    ``lora`` is set by `moefuse.nn.add_lora`.

    Args:
        stock: the module it stands for; only its sizes, layout and norm are kept, so it may be on the meta device.
        activation: what stands between the products.
        tensors: as `moefuse.nn.from_gguf.read_experts` returns them.
        dtype: of the model; of every tensor that is not in blocks.
        exact: keep activations in float32, see `QuantTensor`; None: as each stack says.
    """

    is_transposed, is_concatenated = False, True
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self,
        stock: Any,
        activation: Activation,
        tensors: Mapping[str, Tensor | QuantTensor],
        dtype: torch.dtype,
        exact: bool | None = None,
    ) -> None:
        super().__init__()
        self._stock = (stock,)  # in a tuple it is no submodule
        self.config, self.activation = stock.config, activation
        self.num_experts = tensors["down"].shape[0]
        self.has_gate, self.has_bias = activation.gated, "down_bias" in tensors
        self.has_post_expert_norm = getattr(stock, "has_post_expert_norm", False)
        if self.has_post_expert_norm:
            self.post_expert_norm = stock.post_expert_norm
        self.lora: ExpertsLoRA | None = None
        self.specs = {}
        self._kept: dict[str, QuantTensor] = {}  # making them anew would take longer than a small product
        for name in TENSORS:
            value = tensors.get(name)
            if isinstance(value, QuantTensor):
                self._hold(name, value if exact is None else value.exactly(exact))
            else:
                self.register_buffer(name, None if value is None else value.detach().to(dtype))

    def _hold(self, name: str, weight: QuantTensor) -> None:
        self._kept.pop(name, None)
        super()._hold(name, weight)

    @property
    def stock(self) -> Any:
        """The module it stands for, without its weights."""
        (stock,) = self._stock
        return stock

    def stack(self, name: str) -> Any:
        """A weight, in its blocks where it has them; None where there is none."""
        stack, kept = self._buffers[name], self._kept.get(name)
        compiling = torch.compiler.is_compiling()  # a graph is to know the stack as a buffer
        if kept is not None and kept.blocks is stack and not compiling:
            return kept
        if stack is None:
            return None
        made = wrap(stack, self.specs.get(name))
        if isinstance(made, QuantTensor) and not compiling:
            self._kept[name] = made
        return made

    @property
    def gate_up_proj(self) -> Tensor:
        """As transformers names it, for those who look whether it is there."""
        return self._buffers["gate_up"]  # type: ignore[return-value]  # there is always one

    @property
    def down_proj(self) -> Tensor:
        """Likewise; sizes are read off it."""
        return self._buffers["down"]  # type: ignore[return-value]  # there is always one

    def stacks(self) -> Stacks:
        """What the ops compute with."""
        gate_up, up, down = map(self.stack, _STACKS)
        return Stacks(gate_up, up, down, self._buffers["gate_up_bias"], self._buffers["down_bias"])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As transformers calls its own: rows ``[T, H]``, ids and weights ``[T, top_k]``; returns ``[T, H]``."""
        # Under autocast the rows may be wider or narrower than numbers among the stacks, which decide.
        x = hidden_states if self.takes(hidden_states.dtype) else hidden_states.to(self._plain_type())
        stacks, apart = self.stacks(), placed(self)
        out: Any  # no norm_weight is given: one tensor
        if apart is not None:
            if self.lora is not None:
                raise ValueError("BlockExperts: placed experts cannot have adapters: call moefuse.hf.unpatch first")
            out = apart(x, top_k_index, top_k_weights)
        elif self.lora is not None or self.has_post_expert_norm:
            order, norm = plan(top_k_index, self.num_experts), self._modules.get("post_expert_norm")
            out = composed(
                x, top_k_index, top_k_weights, stacks, order, self.activation, Tail(), adapters=self.lora, after=norm
            )
        else:
            out = experts(x, top_k_index, top_k_weights, activation=self.activation, **stack_arguments(stacks))
        return out.to(hidden_states.dtype)  # type: ignore[no-any-return]

    def _plain_type(self) -> torch.dtype | None:
        """Of the stacks that are numbers in the file, too."""
        plain = (self._buffers[name] for name in _STACKS if name not in self.specs)
        return next((stack.dtype for stack in plain if stack is not None), None)

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether rows of this type need no conversion."""
        return self._plain_type() in (None, dtype)

    def dequantized(self, dtype: torch.dtype) -> nn.Module:
        """The module it stands for, with numbers; adapters are folded in before anything is rounded to ``dtype``."""
        stock, stacks = self.stock, self.stacks()
        exactly = dtype if self.lora is None else torch.float32
        gate_up, up, down = (_numbers(stack, exactly) for stack in (stacks.gate_up, stacks.up, stacks.down))
        whole = gate_up if up is None else torch.cat((gate_up, up), 1)
        if self.lora is not None:
            self.lora.fold_into((whole,), down)
        name = "gate_up_proj" if self.has_gate else "up_proj"
        values = {name: _in_stock_order(whole.to(dtype), stock), "down_proj": down.to(dtype)}
        if stock.is_transposed:
            values = {name: value.transpose(1, 2).contiguous() for name, value in values.items()}
        if self.gate_up_bias is not None and self.down_bias is not None:
            values[f"{name}_bias"] = _in_stock_order(self.gate_up_bias, stock)
            values["down_proj_bias"] = self.down_bias
        for name, value in values.items():
            setattr(stock, name, nn.Parameter(value, requires_grad=False))
        return stock.train(self.training)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        E, H, I = self.stack("down").shape
        formats = "".join(f", {name}={spec}" for name, spec in self.specs.items())
        return f"experts={E}, hidden={H}, intermediate={I}{formats}, activation={self.activation.kind}"


def _numbers(stack: Weight | None, dtype: torch.dtype) -> Any:
    return stack.dequantize(dtype) if isinstance(stack, QuantTensor) else stack if stack is None else stack.to(dtype)


def _in_stock_order(whole: Tensor, stock: Any) -> Tensor:
    """Gate rows and then up rows, in the order that the stock module has them."""
    return whole if stock.is_concatenated else torch.stack(whole.chunk(2, 1), 2).flatten(1, 2)


class ScaledEmbedding(QuantEmbedding):
    """Takes the place of an embedding that multiplies its rows by ``embed_scale``, as Gemma's do."""

    embed_scale: Tensor

    def __init__(self, stock: Any, weight: QuantTensor, dtype: torch.dtype) -> None:
        super().__init__(weight, dtype=dtype, padding_idx=stock.padding_idx)
        self._stock = (stock,)  # in a tuple it is no submodule
        self.register_buffer("embed_scale", stock.embed_scale, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        return rows * self.embed_scale.to(rows.dtype)

    def dequantized(self) -> nn.Embedding:
        (stock,) = self._stock
        stock.weight, stock.embed_scale = super().dequantized().weight, self.embed_scale
        return stock.train(self.training)  # type: ignore[no-any-return]


def in_blocks(stock: nn.Linear | nn.Embedding, weight: QuantTensor, dtype: torch.dtype) -> QuantModule:
    """What computes on blocks as a module of numbers does, which may be on the meta device."""
    if isinstance(stock, nn.Linear):
        return QuantLinear(weight, stock.bias, dtype=dtype)
    if hasattr(stock, "embed_scale"):
        return ScaledEmbedding(stock, weight, dtype)
    return QuantEmbedding(weight, dtype=dtype, padding_idx=stock.padding_idx)


def tie_words(model: Any) -> None:
    """Where the output layer is the embedding, it has the embedding's blocks or numbers."""
    words = model.get_input_embeddings()
    if not isinstance(words, QuantEmbedding):
        model.tie_weights()
    elif model.config.get_text_config().tie_word_embeddings:
        model.set_output_embeddings(QuantLinear(words.weight, dtype=words.weight.dtype))


def block_experts(model: nn.Module) -> dict[str, BlockExperts]:
    """Path -> experts in blocks."""
    return {path: module for path, module in model.named_modules() if isinstance(module, BlockExperts)}


def _quantized(model: nn.Module) -> dict[str, QuantModule]:
    """Path -> linear layer or embedding in blocks."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantModule)}


def dequantized_bytes(model: Any) -> int:
    """What `dequantize` would take."""
    matrices = {module.blocks.data_ptr(): module.weight.shape.numel() for module in _quantized(model).values()}
    weights = sum(matrices.values())
    for module in block_experts(model).values():
        stacks = module.stacks()
        weights += sum(w.shape.numel() for w in (stacks.gate_up, stacks.up, stacks.down) if w is not None)
    return int(weights * model.get_input_embeddings().weight.dtype.itemsize) if weights else 0


def refuse_to_save(*_: Any, **__: Any) -> None:
    """What ``save_pretrained`` is on a model whose weights are in blocks."""
    raise ValueError(
        "save_pretrained: a transformers checkpoint has no place for weights in GGUF blocks: keep the GGUF file, or "
        "call moefuse.hf.dequantize(model) first"
    )


def dequantize(model: Any) -> None:
    """Give a model in blocks its own modules back, with numbers instead of blocks, in place.

    That takes the memory of the whole model in its type. It is for what computes with numbers only: transformers' own
    implementations, ``save_pretrained``, training of experts, merging the adapters of a model that PEFT wrapped.
    """
    experts, matrices = block_experts(model), _quantized(model)
    if not experts and not matrices:
        return
    dtype = model.get_input_embeddings().weight.dtype
    for path, module in experts.items():
        model.set_submodule(path, module.dequantized(dtype))
    for path, matrix in matrices.items():
        model.set_submodule(path, matrix.dequantized())
    model.tie_weights()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    vars(base).pop("save_pretrained", None)
    quantizer = vars(base).get("hf_quantizer")
    if quantizer is not None:
        quantizer.remove_quantization_config(base)
