"""llama.cpp's experts: its own graph of ggml operations on the CPU, on our blocks where they lie.

The libraries are those that the ``llama-cpp-python`` package builds; nothing of it is imported.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

from torch import Tensor

from moefuse.bench.inputs import Layer
from moefuse.bench.peers._ggml import LONG, POINTER, SIZE, GgmlPeer, Graph, Library, Signatures
from moefuse.quant.tensor import QuantTensor

_MORE: Signatures = {
    "ggml_view_2d": (POINTER, POINTER, POINTER, LONG, LONG, SIZE, SIZE),
    "ggml_view_3d": (POINTER, POINTER, POINTER, LONG, LONG, LONG, SIZE, SIZE, SIZE),
    "ggml_swiglu_split": (POINTER, POINTER, POINTER, POINTER),
    "ggml_mul": (POINTER, POINTER, POINTER, POINTER),
    "ggml_add": (POINTER, POINTER, POINTER, POINTER),
    "ggml_cont": (POINTER, POINTER, POINTER),
}


def _folder() -> Path | None:
    spec = importlib.util.find_spec("llama_cpp")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(place) / "lib" for place in places if (Path(place) / "lib" / "libggml-cpu.so").exists()), None)


@functools.cache
def _library() -> Library:
    folder = _folder()
    assert folder is not None
    names = ("ggml-base", "ggml-cpu")
    return Library([ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in names], _MORE)


class _Graph(Graph):
    def experts(self, layer: Layer, tokens: int) -> int:
        ggml, context = self.ggml, self.context
        H, k = layer.shape.hidden, layer.shape.top_k
        gate, up = self._halves(layer.gate_up, layer.shape.intermediate)
        down = self.stack(layer.down)
        hidden = ggml.swiglu_split(
            context, ggml.mul_mat_id(context, gate, self.x, self.ids), ggml.mul_mat_id(context, up, self.x, self.ids)
        )
        parts = ggml.mul(context, ggml.mul_mat_id(context, down, hidden, self.ids), self.shares)
        views = [ggml.view_2d(context, parts, H, tokens, 4 * H * k, 4 * H * slot) for slot in range(k)]
        out: int = functools.reduce(lambda a, b: ggml.add(context, a, b), views)
        return ggml.cont(context, out) if k == 1 else out

    def _halves(self, stack: Tensor | QuantTensor, I: int) -> list[int]:
        """Gate and up as views of the stack that holds both."""
        E, _, K = stack.shape
        data = stack.blocks if isinstance(stack, QuantTensor) else stack
        row = data.stride(1) * data.element_size()
        whole = self.stack(stack)
        return [self.ggml.view_3d(self.context, whole, K, I, E, row, 2 * I * row, half * I * row) for half in range(2)]


class LlamaCppPeer(GgmlPeer):
    name, graph = "llama-cpp", _Graph

    def unavailable(self) -> str | None:
        return None if _folder() is not None else "llama.cpp is not installed: pip install llama-cpp-python"

    def library(self) -> Library:
        return _library()


PEER = LlamaCppPeer()
