"""Linear layers and embeddings whose weights stay in GGUF blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moefuse.nn.shared import autocast_type
from moefuse.ops._core.checks import FLOATS, check_instance, check_tensor
from moefuse.ops.linear import linear
from moefuse.quant.tensor import QuantTensor


@dataclass(frozen=True, eq=False, repr=False)
class ModuleWeight(QuantTensor):
    """The blocks of a module, and the type that their numbers have in its model, which code beside it may go by."""

    dtype: torch.dtype = torch.float32


class QuantModule(nn.Module):
    """What modules with a weight in blocks share.

    The blocks are a buffer of bytes: ``to`` moves them and leaves their type alone. They are frozen, and gradients pass
    through to what goes in. Modules that are given the same blocks share them wherever they move. The state dict
    holds the blocks and their format, and a state in another format is refused.

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
        #: the `QuantTensor.spec` of the blocks
        self.spec = weight.spec
        self._kept: ModuleWeight | None = None  # making it anew would take longer than a small product
        self.register_buffer("blocks", weight.blocks)
        # Empty: it is there for its type, which follows ``to`` as that of numbers would.
        self.register_buffer("_numbers", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)

    @property
    def weight(self) -> ModuleWeight:
        """The blocks as the ops take them; ``dtype``, ``device`` and ``shape`` are those of the numbers."""
        buffers: Any = self._buffers  # nn.Module takes its time to find one
        kept, blocks, dtype = self._kept, buffers["blocks"], buffers["_numbers"].dtype
        compiling = torch.compiler.is_compiling()  # a graph is to know the blocks as a buffer
        if kept is not None and kept.blocks is blocks and kept.dtype is dtype and not compiling:
            return kept
        form, colon, _ = self.spec.partition(":")
        made = ModuleWeight(blocks, form, bool(colon), dtype=dtype)
        if not compiling:
            self._kept = made
        return made

    def dequantized(self) -> nn.Module:
        """The module of numbers that it stands for, its weight frozen."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        blocks = self.blocks
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if not (blocks.is_meta or self.blocks.is_meta):
            # As it does with parameters: the tensor stays and gets the new memory, for all that share it.
            blocks.data, self.blocks = self.blocks, blocks
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "spec"] = torch.tensor(list(self.spec.encode()), dtype=torch.uint8)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = state_dict.pop(prefix + "spec", None)
        if given is not None or prefix + "blocks" in state_dict:
            spec = None if given is None else bytes(given.tolist()).decode(errors="replace")
            if spec != self.spec:
                raise ValueError(f"{type(self).__name__}: {prefix}blocks must be in {self.spec}, got {spec}")
        super()._load_from_state_dict(state_dict, prefix, *args)

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
