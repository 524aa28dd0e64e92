"""Experts as a graph of ggml operations on the CPU, through ctypes: what llama.cpp and its relatives share."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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

POINTER, SIZE, LONG, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool))


Signatures = Mapping[str, tuple[Any, ...]]

_SIGNATURES: Signatures = {
    "ggml_init": (POINTER, _InitParams),
    "ggml_free": (None, POINTER),
    "ggml_tensor_overhead": (SIZE,),
    "ggml_graph_overhead": (SIZE,),
    "ggml_get_data": (POINTER, POINTER),
    "ggml_new_tensor_3d": (POINTER, POINTER, INT, LONG, LONG, LONG),
    "ggml_mul_mat_id": (POINTER, POINTER, POINTER, POINTER, POINTER),
    "ggml_new_graph": (POINTER, POINTER),
    "ggml_build_forward_expand": (None, POINTER, POINTER),
    "ggml_backend_cpu_init": (POINTER,),
    "ggml_backend_cpu_set_n_threads": (None, POINTER, INT),
    "ggml_backend_cpu_buffer_from_ptr": (POINTER, POINTER, SIZE),
    "ggml_backend_tensor_alloc": (INT, POINTER, POINTER, POINTER),
    "ggml_backend_buffer_free": (None, POINTER),
    "ggml_backend_graph_compute": (INT, POINTER, POINTER),
}


class Library:
    """ggml's functions, by name, from whichever of the loaded libraries has them."""

    def __init__(self, loaded: Sequence[ctypes.CDLL], more: Signatures) -> None:
        for name, (result, *arguments) in {**_SIGNATURES, **more}.items():
            found = next(getattr(library, name) for library in loaded if hasattr(library, name))
            found.restype, found.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), found)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ggml_{name} is not among the functions used here")


class Graph(ABC):
    """One layer at one token count: tensors, graph and the memory behind them."""

    def __init__(self, ggml: Library, layer: Layer, tokens: int) -> None:
        self.ggml = ggml
        shape = layer.shape
        H, I, k = shape.hidden, shape.intermediate, shape.top_k
        floats = tokens * (H + k + k * (3 * I + 3 * H)) + tokens * H * (k + 1)
        overhead = 64 * ggml.tensor_overhead() + ggml.graph_overhead() + _SLACK
        self.weights = ggml.init(_InitParams(16 * ggml.tensor_overhead() + _SLACK, None, True))
        self.context = ggml.init(_InitParams(4 * floats + overhead, None, False))
        self.buffers: list[int] = []
        self.stacks: list[Tensor] = []  # whose memory the graph reads

        self.x = ggml.new_tensor_3d(self.context, _F32, H, 1, tokens)
        self.ids = ggml.new_tensor_3d(self.context, _I32, k, tokens, 1)
        self.shares = ggml.new_tensor_3d(self.context, _F32, 1, k, tokens)
        self.out = self.experts(layer, tokens)
        self.graph = ggml.new_graph(self.context)
        ggml.build_forward_expand(self.graph, self.out)
        self.inputs = [
            self._tensor(self.x, torch.float32, tokens, H),
            self._tensor(self.ids, torch.int32, tokens, k),
            self._tensor(self.shares, torch.float32, tokens, k),
        ]
        self.result = self._tensor(self.out, torch.float32, tokens, H)

    @abstractmethod
    def experts(self, layer: Layer, tokens: int) -> int:
        """The graph's last tensor, from x, ids and shares."""

    def stack(self, weight: Tensor | QuantTensor) -> int:
        """ggml's tensor of a stack, in our memory."""
        E, N, K = weight.shape
        data = weight.arranged(FILE).blocks if isinstance(weight, QuantTensor) else weight
        self.stacks.append(data)
        kind = FORMATS[weight.format].ggml if isinstance(weight, QuantTensor) else _PLAIN[weight.dtype]
        tensor: int = self.ggml.new_tensor_3d(self.weights, kind, K, N, E)
        buffer = self.ggml.backend_cpu_buffer_from_ptr(data.data_ptr(), data.numel() * data.element_size())
        self.ggml.backend_tensor_alloc(buffer, tensor, data.data_ptr())
        self.buffers.append(buffer)
        return tensor

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


class GgmlPeer(ABC):
    """What a library of ggml computes for a layer of experts, with as many threads as torch has."""

    name: str
    graph: type[Graph]
    graph_refusal: str | None = None

    @abstractmethod
    def unavailable(self) -> str | None: ...

    @abstractmethod
    def library(self) -> Library:
        """Where it is not unavailable."""

    def unsuitable(self, shape: Shape, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it is measured on the CPU only, not on {device.type}"
        if shape.activation != "silu" or shape.layout != "halves" or shape.bias:
            return f"its graph here is silu without biases, not {shape.describe()}"
        return None

    def scratch_bytes(self, shape: Shape, tokens: int, dtype: torch.dtype) -> int:  # noqa: ARG002  # f32 inside
        return 4 * tokens * shape.top_k * (3 * shape.intermediate + 5 * shape.hidden)

    def build(self, layer: Layer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        ggml = self.library()
        backend = ggml.backend_cpu_init()
        graphs: dict[int, Graph] = {}

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            if x.shape[0] not in graphs:
                graphs.clear()
                graphs[x.shape[0]] = self.graph(ggml, layer, x.shape[0])
            ggml.backend_cpu_set_n_threads(backend, torch.get_num_threads())
            return graphs[x.shape[0]].run(backend, x, ids, weights).to(x.dtype)

        return run
