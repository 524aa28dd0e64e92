"""Linear layers and embeddings whose weights stay in GGUF blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moefuse.nn.shared import autocast_type
from moefuse.ops._core.arrange import arranged
from moefuse.ops._core.checks import FLOATS, check_instance, check_tensor
from moefuse.ops.linear import linear
from moefuse.quant.arrange import FILE, INTERLEAVED, can_interleave, wanted
from moefuse.quant.tensor import QuantTensor, arrange_, in_file_order, wrap


class BlockModule(nn.Module):
    """What modules with buffers in blocks share.

    Wherever the buffers move, their blocks are arranged as the backend of that device reads them. The state dict holds
    them in the file's own order, whatever the device, and their formats as "specs"; others are refused.
    """

    #: name of a buffer in blocks -> its `QuantTensor.spec`
    specs: dict[str, str]

    def _held(self) -> dict[str, QuantTensor]:
        """Each buffer in blocks, by its name."""
        buffers: Any = self._buffers
        held: Any = {name: wrap(buffers[name], spec) for name, spec in self.specs.items()}
        return held  # type: ignore[no-any-return]

    def _hold(self, name: str, weight: QuantTensor) -> None:
        """Take blocks as a buffer of that name, as the device where they lie wants them."""
        weight = weight.arranged(wanted(weight.blocks, weight.arrangement))
        self.register_buffer(name, weight.blocks)
        self.specs[name] = weight.spec

    def exactly_(self) -> None:
        """Keep activations unrounded in products with the blocks, see `QuantTensor`."""
        for name, weight in self._held().items():
            self._hold(name, weight.exactly())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self._held()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name, moved in self._held().items():
            old, order = before[name].blocks, wanted(moved.blocks, moved.arrangement)
            if order != moved.arrangement:
                self._hold(name, _rearranged(moved, order, old))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, weight in self._held().items():
            if weight.arrangement != FILE:
                destination[prefix + name] = weight.arranged(FILE).blocks
        if specs := self.file_specs():
            destination[prefix + "specs"] = specs_in_bytes(specs)

    def file_specs(self) -> dict[str, str]:
        """What a file has to say of the blocks: name of a buffer -> its spec, without an arrangement."""
        return {name: in_file_order(weight.spec) for name, weight in self._held().items()}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        # A state may also be of other parts alone, adapters for one.
        given, own = state_dict.pop(prefix + "specs", None), self.file_specs()
        if given is not None or any(prefix + name in state_dict for name in own):
            specs = {} if given is None else specs_from_bytes(given)
            if specs != own:
                raise ValueError(f"{type(self).__name__}: the state must have {prefix}specs {own}, got {specs}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        for name, weight in self._held().items():
            given = state_dict.get(prefix + name)
            if given is None or given.shape != weight.blocks.shape:
                continue
            loaded = replace(weight, arrangement=FILE)
            if local_metadata.get("assign_to_params_buffers", False):
                self._hold(name, loaded)
            else:
                arrange_(loaded, weight.arrangement)


def specs_in_bytes(specs: Mapping[str, str]) -> Tensor:
    """Formats as a state dict holds them."""
    return torch.tensor(list(json.dumps(specs, sort_keys=True).encode()), dtype=torch.uint8)


def specs_from_bytes(given: Tensor) -> Any:
    """The way back."""
    return json.loads(bytes(given.tolist()))


def _rearranged(moved: QuantTensor, order: str, before: Tensor) -> QuantTensor:
    """Blocks that came from elsewhere, in another arrangement."""
    if before.is_meta:
        return replace(moved, arrangement=order)  # there is nothing in them yet
    if moved.blocks.data_ptr() == before.data_ptr():
        return moved.arranged(order)
    if before.is_cuda and not moved.blocks.is_cuda:
        torch.cuda.synchronize(before.device)  # the copy may be under way
    return arrange_(moved, order)


def interleave_(model: nn.Module) -> None:
    """Blocks of a model on the CPU in the order that is read fastest there, where they can have it: in memory of their
    own, out of the file they were mapped from. Modules that share blocks share them as before."""
    weights = [(module, name, weight) for module in _block_modules(model) for name, weight in module._held().items()]
    multiplied = {weight.blocks.data_ptr() for module, _, weight in weights if not isinstance(module, QuantEmbedding)}
    made: dict[int, QuantTensor] = {}
    for module, name, weight in weights:
        at = weight.blocks.data_ptr()
        mapped = weight.device.type == "cpu" and weight.arrangement == FILE
        if mapped and at in multiplied and can_interleave(weight.format, weight.shape[-2]):
            if at not in made:
                made[at] = arranged(weight, INTERLEAVED)
            module._hold(name, replace(weight, blocks=made[at].blocks, arrangement=INTERLEAVED))


def _block_modules(model: nn.Module) -> list[BlockModule]:
    return [module for module in model.modules() if isinstance(module, BlockModule)]


@dataclass(frozen=True, eq=False, repr=False)
class ModuleWeight(QuantTensor):
    """The blocks of a module, and the type that their numbers have in its model, which code beside it may go by.

    ``wanted`` is the arrangement that the device of the blocks asked for when the module last saw them.
    """

    dtype: torch.dtype = torch.float32
    wanted: str = FILE

    @property
    def data(self) -> Tensor:
        """What merging adapters would write to."""
        raise AttributeError(
            f"a weight in blocks ({self.format}) has no data to write to: adapters cannot be merged into it. Turn a "
            "transformers model into numbers first, with moefuse.hf.dequantize"
        )


class QuantModule(BlockModule):
    """What modules with a weight in blocks share.

    The blocks are a buffer of bytes: ``to`` moves them and leaves their type alone. They are frozen, and gradients pass
    through to what goes in. Modules that are given the same blocks share them wherever they move.

    Args:
        weight: ``[N, K]``.
        dtype: of the numbers that the blocks stand for in the model; ``to`` changes it. By default torch's own.
    """

    blocks: Tensor
    _numbers: Tensor

    def __init__(self, weight: QuantTensor, dtype: torch.dtype | None = None) -> None:
        nn.Module.__init__(self)  # that of nn.Linear and nn.Embedding would make a weight of numbers
        name = type(self).__name__
        check_instance(name, "weight", weight, QuantTensor)
        if weight.dim() != 2:
            raise ValueError(f"{name}: weight must be [N, K], got shape {list(weight.shape)}")
        if dtype not in (None, *FLOATS):
            raise TypeError(f"{name}: dtype must be a floating-point type, got {dtype}")
        # Empty: it is there for its type, which follows ``to`` as that of numbers would.
        self.register_buffer("_numbers", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)
        self._hold("blocks", weight)

    def _hold(self, name: str, weight: QuantTensor) -> None:
        order = wanted(weight.blocks, weight.arrangement)
        blocks = weight.arranged(order).blocks
        self.register_buffer(name, blocks)
        # Making it anew at each call would take longer than a small product.
        self._kept = ModuleWeight(blocks, weight.format, weight.exact, order, self._numbers.dtype, order)

    def _held(self) -> dict[str, QuantTensor]:
        return {"blocks": self.weight}

    @property
    def weight(self) -> ModuleWeight:
        """The blocks as the ops take them; ``dtype``, ``device`` and ``shape`` are those of the numbers."""
        buffers: Any = self._buffers  # nn.Module takes its time to find one
        kept, blocks, dtype = self._kept, buffers["blocks"], buffers["_numbers"].dtype
        order = wanted(blocks, kept.arrangement)
        compiling = torch.compiler.is_compiling()  # a graph is to know the blocks as a buffer
        same = kept.blocks is blocks and kept.wanted == order
        if same and kept.dtype is dtype and not compiling:
            return kept
        # The same tensor elsewhere: another module that shares it moved it. Another tensor: its bytes are as ours were.
        moved = kept.blocks is blocks and kept.wanted != order
        made = ModuleWeight(blocks, kept.format, kept.exact, order if moved else kept.arrangement, dtype, order)
        if not compiling:
            self._kept = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        self._kept = self.weight
        return vars(self).copy()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        # A copy may lie on another device than what it is a copy of.
        self._kept = replace(self._kept, wanted=wanted(self._kept.blocks, self._kept.arrangement))

    @property
    def spec(self) -> str:
        """The `QuantTensor.spec` of the blocks."""
        return self.weight.spec

    def dequantized(self) -> nn.Module:
        """The module of numbers that it stands for, its weight frozen."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        blocks = self.blocks
        super()._apply(fn, recurse)
        moved = self.weight
        if not (blocks.is_meta or moved.blocks.is_meta):
            # As it does with parameters: the tensor stays and gets the new memory, for all that share it.
            blocks.data = moved.blocks
            self._hold("blocks", replace(moved, blocks=blocks))
        return self

    def extra_repr(self) -> str:
        N, K = self.weight.shape
        return f"{N}, {K}, {self.spec}"


class QuantLinear(QuantModule, nn.Linear):  # type: ignore[misc]  # its weight is no parameter
    """A linear layer on blocks; `moefuse.quantize` makes them from numbers.

    Args:
        weight: ``[N, K]`` in any format; `moefuse.QuantTensor.exactly` keeps activations in float32.
        bias: ``[N]``, which becomes a parameter.
        dtype: of the numbers that the blocks stand for; by default the bias's, or torch's own.

    >>> from moefuse import quantize
    >>> numbers = nn.Linear(64, 32)
    >>> layer = QuantLinear(quantize(numbers.weight, "Q8_0"), numbers.bias)
    >>> layer
    QuantLinear(in_features=64, out_features=32, bias=True, Q8_0)
    >>> x = torch.randn(2, 5, 64)
    >>> bool((layer(x) - numbers(x)).abs().max() < 0.1)
    True
    """

    def __init__(self, weight: QuantTensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(weight, bias.dtype if dtype is None and isinstance(bias, Tensor) else dtype)
        self.out_features, self.in_features = weight.shape
        if bias is not None:
            check_tensor("QuantLinear", "bias", bias, {"N": self.out_features})
        self.register_parameter("bias", bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias))

    def forward(self, x: Tensor) -> Tensor:
        """``[.., K]`` to ``[.., N]`` in the type of x, or in that of ``torch.autocast``."""
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"QuantLinear: x must be [.., {self.in_features}], got shape {list(x.shape)}")
        rows, dtype = x.reshape(-1, self.in_features), autocast_type(x)
        out = linear(rows if dtype is None else rows.to(dtype), self.weight, bias=self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def dequantized(self) -> nn.Linear:
        weight = self.weight
        with torch.device("meta"):
            made = nn.Linear(self.in_features, self.out_features, bias=False)
        made.weight = nn.Parameter(weight.dequantize(weight.dtype), requires_grad=False)
        made.bias = self.bias
        return made.train(self.training)

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {self.spec}"


class QuantEmbedding(QuantModule, nn.Embedding):  # type: ignore[misc]  # its weight is no parameter
    """An embedding on blocks, which decodes the rows that are looked up.

    Args:
        weight: ``[words, size]`` in any format.
        dtype: of the rows it returns; ``to`` changes it. By default torch's own.
        padding_idx: kept for those who ask; a frozen embedding has no gradients to leave out.

    >>> from moefuse import quantize
    >>> words = QuantEmbedding(quantize(torch.randn(100, 64), "Q8_0"), dtype=torch.bfloat16)
    >>> words(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 64])
    """

    def __init__(
        self, weight: QuantTensor, *, dtype: torch.dtype | None = None, padding_idx: int | None = None
    ) -> None:
        super().__init__(weight, dtype)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """Numbers of words ``[..]`` to rows ``[.., size]``."""
        weight = self.weight
        return weight.rows(input).dequantize(weight.dtype)

    def dequantized(self) -> nn.Embedding:
        weight = self.weight
        with torch.device("meta"):
            made = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx)
        made.weight = nn.Parameter(weight.dequantize(weight.dtype), requires_grad=False)
        return made.train(self.training)


def weight_of(module: nn.Module) -> Tensor | QuantTensor | None:
    """The weight ``[N, K]`` of a linear layer, in numbers or in blocks; None where it is another kind of module."""
    return module.weight if type(module) in (nn.Linear, QuantLinear) else None  # type: ignore[return-value]
