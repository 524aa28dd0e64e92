"""ik_llama.cpp's experts: its fused operations on the CPU, on blocks that it has interleaved by rows where it can.

Its library, ``libggml.so``, is one that the user built and named in ``MOEFUSE_IK_LLAMA``.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch
from torch import Tensor

from moefuse import config
from moefuse.bench.inputs import Layer
from moefuse.bench.peers._ggml import INT, POINTER, GgmlPeer, Graph, Library, Signatures
from moefuse.quant.arrange import FILE
from moefuse.quant.tensor import QuantTensor

_MORE: Signatures = {
    "ggml_moe_up_gate": (POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, INT),
    "ggml_mul_multi_add": (POINTER, POINTER, POINTER, POINTER),
    "ggml_unary_op_name": (ctypes.c_char_p, INT),
    "iqk_repack_tensor": (None, POINTER),
}


@functools.cache
def _library() -> Library:
    path = config.ik_llama()
    assert path is not None
    # Its functions have the names of llama.cpp's, which may be loaded, too: it must find its own.
    return Library([ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL | os.RTLD_DEEPBIND)], _MORE)


class _Graph(Graph):
    def experts(self, layer: Layer, tokens: int) -> int:  # noqa: ARG002  # as many as x has
        ggml, context = self.ggml, self.context
        I = layer.shape.intermediate
        gate, up = (self._interleaved(layer.gate_up, slice(half * I, (half + 1) * I)) for half in range(2))
        down = self._interleaved(layer.down, slice(None))
        silu = next(op for op in range(64) if ggml.unary_op_name(op) == b"SILU")
        hidden = ggml.moe_up_gate(context, up, gate, self.x, self.ids, silu)
        out: int = ggml.mul_multi_add(context, ggml.mul_mat_id(context, down, hidden, self.ids), self.shares)
        return out

    def _interleaved(self, weight: Tensor | QuantTensor, rows: slice) -> int:
        """A copy of some rows of each expert, as the library wants them."""
        if isinstance(weight, QuantTensor):
            blocks = weight.arranged(FILE).blocks[:, rows].clone()
            if weight.format == "Q8_0":
                # No quantiser writes -128 and the library gets it wrong; random blocks have it.
                numbers = blocks.view(*blocks.shape[:2], -1, 34)[..., 2:].view(torch.int8)
                numbers.clamp_(min=-127)
            some: Tensor | QuantTensor = QuantTensor(blocks, weight.format)
        else:
            some = weight[:, rows].clone()
        tensor = self.stack(some)
        self.ggml.iqk_repack_tensor(tensor)
        return tensor


class IkLlamaPeer(GgmlPeer):
    name, graph = "ik-llama", _Graph

    def unavailable(self) -> str | None:
        path = config.ik_llama()
        if path is None:
            return "ik_llama.cpp is not there: build it and set MOEFUSE_IK_LLAMA to its libggml.so"
        wrong = f"MOEFUSE_IK_LLAMA must name ik_llama.cpp's libggml.so, got {str(path)!r}"
        if not path.is_file():
            return wrong
        try:
            _library()
        except (OSError, AttributeError) as error:  # no library, one that lacks its own symbols, or another
            return f"{wrong}: {error}"
        return None

    def library(self) -> Library:
        return _library()


PEER = IkLlamaPeer()
