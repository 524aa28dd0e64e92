"""llama.cpp's experts: its own graph of ggml operations on the CPU, on our blocks where they lie.

The libraries are those that the ``llama-cpp-python`` package builds. Reached through ctypes; nothing of it is imported.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefuse.bench.inputs import Layer
from moefuse.bench.shapes import Shape
from moefuse.quant.arrange import FILE
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor

_PLAIN = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_F32, _I32 = 0, 26
#: beyond tensors and graph: what ggml keeps beside them
_SLACK = 1 << 20

_pointer, _size, _long, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", _size), ("mem_buffer", _pointer), ("no_alloc", ctypes.c_bool))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_init": (_pointer, _InitParams),
    "ggml_free": (None, _pointer),
    "ggml_tensor_overhead": (_size,),
    "ggml_graph_overhead": (_size,),
    "ggml_get_data": (_pointer, _pointer),
    "ggml_new_tensor_3d": (_pointer, _pointer, _int, _long, _long, _long),
    "ggml_view_2d": (_pointer, _pointer, _pointer, _long, _long, _size, _size),
    "ggml_view_3d": (_pointer, _pointer, _pointer, _long, _long, _long, _size, _size, _size),
    "ggml_mul_mat_id": (_pointer, _pointer, _pointer, _pointer, _pointer),
    "ggml_swiglu_split": (_pointer, _pointer, _pointer, _pointer),
    "ggml_mul": (_pointer, _pointer, _pointer, _pointer),
    "ggml_add": (_pointer, _pointer, _pointer, _pointer),
    "ggml_cont": (_pointer, _pointer, _pointer),
    "ggml_new_graph": (_pointer, _pointer),
    "ggml_build_forward_expand": (None, _pointer, _pointer),
    "ggml_backend_cpu_init": (_pointer,),
    "ggml_backend_cpu_set_n_threads": (None, _pointer, _int),
    "ggml_backend_cpu_buffer_from_ptr": (_pointer, _pointer, _size),
    "ggml_backend_tensor_alloc": (_int, _pointer, _pointer, _pointer),
    "ggml_backend_buffer_free": (None, _pointer),
    "ggml_backend_graph_compute": (_int, _pointer, _pointer),
}


class _Library:
    """The functions above, by name, from whichever of ggml's libraries has them."""

    def __init__(self, folder: Path) -> None:
        loaded = [
            ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")
        ]
        for name, (result, *arguments) in _SIGNATURES.items():
            found = next(getattr(library, name) for library in loaded if hasattr(library, name))
            found.restype, found.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), found)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ggml_{name} is not among the functions used here")


def _folder() -> Path | None:
    spec = importlib.util.find_spec("llama_cpp")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(place) / "lib" for place in places if (Path(place) / "lib" / "libggml-cpu.so").exists()), None)


@functools.cache
def _library() -> _Library:
    folder = _folder()
    assert folder is not None
    return _Library(folder)


class _Graph:
    """One layer at one token count: tensors, graph and the memory behind them."""

    def __init__(self, layer: Layer, tokens: int) -> None:
        self.ggml = ggml = _library()
        shape = layer.shape
        H, I, k = shape.hidden, shape.intermediate, shape.top_k
        floats = tokens * (H + k + k * (3 * I + 3 * H)) + tokens * H * (k + 1)
        overhead = 64 * ggml.tensor_overhead() + ggml.graph_overhead() + _SLACK
        self.weights = ggml.init(_InitParams(16 * ggml.tensor_overhead() + _SLACK, None, True))
        self.context = ggml.init(_InitParams(4 * floats + overhead, None, False))
        self.buffers: list[int] = []
        self.stacks: list[Tensor] = []  # whose memory the graph reads

        gate, up = self._halves(layer.gate_up, I)
        down = self._stack(layer.down)
        self.x = ggml.new_tensor_3d(self.context, _F32, H, 1, tokens)
        self.ids = ggml.new_tensor_3d(self.context, _I32, k, tokens, 1)
        self.shares = ggml.new_tensor_3d(self.context, _F32, 1, k, tokens)
        hidden = ggml.swiglu_split(
            self.context,
            ggml.mul_mat_id(self.context, gate, self.x, self.ids),
            ggml.mul_mat_id(self.context, up, self.x, self.ids),
        )
        parts = ggml.mul(self.context, ggml.mul_mat_id(self.context, down, hidden, self.ids), self.shares)
        views = [ggml.view_2d(self.context, parts, H, tokens, 4 * H * k, 4 * H * slot) for slot in range(k)]
        self.out = functools.reduce(lambda a, b: ggml.add(self.context, a, b), views)
        if k == 1:
            self.out = ggml.cont(self.context, self.out)
        self.graph = ggml.new_graph(self.context)
        ggml.build_forward_expand(self.graph, self.out)
        self.inputs = [
            self._tensor(self.x, torch.float32, tokens, H),
            self._tensor(self.ids, torch.int32, tokens, k),
            self._tensor(self.shares, torch.float32, tokens, k),
        ]
        self.result = self._tensor(self.out, torch.float32, tokens, H)

    def _stack(self, stack: Tensor | QuantTensor) -> int:
        E, N, K = stack.shape
        data = stack.arranged(FILE).blocks if isinstance(stack, QuantTensor) else stack
        self.stacks.append(data)
        kind = FORMATS[stack.format].ggml if isinstance(stack, QuantTensor) else _PLAIN[stack.dtype]
        tensor: int = self.ggml.new_tensor_3d(self.weights, kind, K, N, E)
        buffer = self.ggml.backend_cpu_buffer_from_ptr(data.data_ptr(), data.numel() * data.element_size())
        self.ggml.backend_tensor_alloc(buffer, tensor, data.data_ptr())
        self.buffers.append(buffer)
        return tensor

    def _halves(self, stack: Tensor | QuantTensor, I: int) -> list[int]:
        """Gate and up as views of the stack that holds both."""
        E, _, K = stack.shape
        data = stack.blocks if isinstance(stack, QuantTensor) else stack
        row = data.stride(1) * data.element_size()
        whole = self._stack(stack)
        return [self.ggml.view_3d(self.context, whole, K, I, E, row, 2 * I * row, half * I * row) for half in range(2)]

    def _tensor(self, tensor: int, dtype: torch.dtype, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        memory = (ctypes.c_char * (4 * count)).from_address(self.ggml.get_data(tensor))
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def run(self, backend: int, *values: Tensor) -> Tensor:
        for to, value in zip(self.inputs, values, strict=True):
            to.copy_(value)
        status = self.ggml.backend_graph_compute(backend, self.graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        return self.result.clone()

    def __del__(self) -> None:
        for buffer in self.buffers:
            self.ggml.backend_buffer_free(buffer)
        self.ggml.free(self.weights)
        self.ggml.free(self.context)


@dataclass(frozen=True)
class LlamaCppPeer:
    """What llama.cpp computes for a layer of experts, with as many threads as torch has."""

    name: str = "llama-cpp"
    graph_refusal: str | None = None

    def unavailable(self) -> str | None:
        return None if _folder() is not None else "llama.cpp is not installed: pip install llama-cpp-python"

    def unsuitable(self, shape: Shape, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it is measured on the CPU only, not on {device.type}"
        if shape.activation != "silu" or shape.layout != "halves" or shape.bias:
            return f"its graph here is silu without biases, not {shape.describe()}"
        return None

    def scratch_bytes(self, shape: Shape, tokens: int, dtype: torch.dtype) -> int:  # noqa: ARG002  # f32 inside
        return 4 * tokens * shape.top_k * (3 * shape.intermediate + 5 * shape.hidden)

    def build(self, layer: Layer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        backend = _library().backend_cpu_init()
        graphs: dict[int, _Graph] = {}

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            if x.shape[0] not in graphs:
                graphs.clear()
                graphs[x.shape[0]] = _Graph(layer, x.shape[0])
            _library().backend_cpu_set_n_threads(backend, torch.get_num_threads())
            return graphs[x.shape[0]].run(backend, x, ids, weights).to(x.dtype)

        return run


PEER = LlamaCppPeer()
