"""GGUF files: mapped, never read whole; written through the gguf package.

A file is input from outside. Every count, length, size and offset in its header is checked against the size of the file
before it is used, and what its values take in memory against a budget, so that a damaged or hostile one is a
ValueError: no crash, no flood. What a message quotes of a file is cut (`brief`).
"""

from __future__ import annotations

import mmap
import os
import re
import reprlib
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moefuse import config
from moefuse.quant.arrange import FILE
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor

_VERSIONS = (2, 3)
# Far above any model's; below what would hurt.
_MAX_KEYS, _MAX_TENSORS, _MAX_DEPTH, _MAX_NAME, _MAX_TEXT = 2**16, 2**16, 4, 256, 2**24
# What values may take beyond their bytes in the file. Gemma's 262,144 tokens and 514,906 merges take 45 MB.
_BUDGET = 2**26
# What Python keeps for a key, an array, a tensor and, beside itself, a string.
_KEY_COST, _ARRAY_COST, _TENSOR_COST, _STRING_COST = 200, 500, 800, 16
# Linux keeps no memory in reserve for the private pages of a map with this flag; Python names it from 3.12 on.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0

#: ggml's number -> name, values and bytes of a block, and the element type where torch has it
_PLAIN: dict[int, tuple[str, int, int, torch.dtype | None]] = {
    0: ("F32", 1, 4, torch.float32),
    1: ("F16", 1, 2, torch.float16),
    24: ("I8", 1, 1, torch.int8),
    25: ("I16", 1, 2, torch.int16),
    26: ("I32", 1, 4, torch.int32),
    27: ("I64", 1, 8, torch.int64),
    28: ("F64", 1, 8, torch.float64),
    30: ("BF16", 1, 2, torch.bfloat16),
}
#: formats we can measure and not read
_FOREIGN = {
    9: ("Q8_1", 32, 40, None),
    15: ("Q8_K", 256, 292, None),
    16: ("IQ2_XXS", 256, 66, None),
    17: ("IQ2_XS", 256, 74, None),
    18: ("IQ3_XXS", 256, 98, None),
    19: ("IQ1_S", 256, 50, None),
    21: ("IQ3_S", 256, 110, None),
    22: ("IQ2_S", 256, 82, None),
    29: ("IQ1_M", 256, 56, None),
    34: ("TQ1_0", 256, 54, None),
    35: ("TQ2_0", 256, 66, None),
    40: ("NVFP4", 64, 36, None),
    41: ("Q1_0", 128, 18, None),
}
_TYPES = _PLAIN | _FOREIGN | {f.ggml: (f.name, f.values, f.nbytes, None) for f in FORMATS.values() if f.ggml >= 0}

_STRING, _ARRAY, _BOOL = 8, 9, 7
#: number of a metadata type -> numpy's name for it
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def brief(value: object) -> str:
    """What a file holds, as a message quotes it: its repr, cut.

    >>> len(brief("x" * 10**6)) <= 80, brief([1] * 9)
    (True, '[1, 1, 1, 1, 1, 1, ...]')
    """
    return _repr.repr(value)


class Malformed(ValueError):
    """A file that is cut short, damaged, or no GGUF at all."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file says of a tensor: ``type`` is ggml's name, ``shape`` torch's (slowest dimension first).

    ``offset`` counts from the start of the file, or of that ``part`` of a model in several files.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0


class GGUFFile(Mapping[str, Tensor | QuantTensor]):
    """A mapped file: ``file[name]`` is a view of the map, a `QuantTensor` or a plain tensor.

    Writing to a view changes the process's own copy of the page, never the file.

    Attributes:
        path: where it is; the first part of a model in several files.
        metadata: key to str, bool, int, float, numpy array, or list of strings.
        infos: what is known of each tensor, those in formats that cannot be read too.
    """

    def __init__(
        self,
        path: Path,
        metadata: dict[str, Any],
        infos: dict[str, TensorInfo],
        maps: list[Tensor],
        regions: list[mmap.mmap],
    ) -> None:
        self.path, self.metadata, self.infos, self._maps, self._regions = path, metadata, infos, maps, regions

    @property
    def nbytes(self) -> int:
        """The size on disk."""
        return sum(data.numel() for data in self._maps)

    @property
    def architecture(self) -> str:
        """The name that prefixes the model's keys."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str) or not 0 < len(found) <= _MAX_NAME:
            raise ValueError(f"gguf: {self.path.name}: general.architecture must be a name, got {brief(found)}")
        return found

    def __getitem__(self, name: str) -> Tensor | QuantTensor:
        info = self.infos[name]
        data = self._maps[info.part][info.offset : info.offset + info.nbytes]
        if info.type in FORMATS:
            form = FORMATS[info.type]
            *rows, columns = info.shape
            return QuantTensor(data.view(*rows, form.row_bytes(columns)), info.type)
        dtype = next((dtype for kind, _, _, dtype in _PLAIN.values() if kind == info.type), None)
        if dtype is None:
            known = ", ".join(
                (*(f.name for f in FORMATS.values() if f.ggml >= 0), *(kind for kind, *_ in _PLAIN.values()))
            )
            raise ValueError(f"gguf: {name} must be of one of the types {known}, got {info.type}")
        # A view as wider elements wants an address that suits them, which a file need not give.
        aligned = data if info.offset % dtype.itemsize == 0 else data.clone()
        return aligned.view(dtype).view(info.shape)

    def release(self, name: str) -> None:
        """Give the memory of a tensor's pages back, for a reader that has its own copy; views of it read the file anew.

        What was written to such a view is lost.
        """
        info, region = self.infos[name], self._regions[self.infos[name].part]
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            region.madvise(mmap.MADV_DONTNEED, first, length)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def __repr__(self) -> str:
        return f"GGUFFile({self.path.name}, {len(self.metadata)} keys, {len(self.infos)} tensors)"


def read(path: str | os.PathLike[str]) -> GGUFFile:
    """Map a file. Only its header is read; a malformed, truncated or inconsistent one is `Malformed`, a ValueError.

    Of a model in several files ("-00001-of-00003.gguf") give the first; the others must lie beside it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/a.gguf", {"general.architecture": "qwen3moe"}, {"w": torch.ones(2, 3)})
    ...     read(f"{folder}/a.gguf")["w"].sum()
    tensor(6.)
    """
    path = Path(path)
    metadata, infos, data, region = _map(path)
    count = metadata.get("split.count", 1)
    if type(count) is not int or count < 0:
        raise ValueError(f"gguf: {path.name}: split.count must be a number of files, got {brief(count)}")
    if count < 2:
        return GGUFFile(path, metadata, infos, [data], [region])
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[2]) != count:
        rule = f"the first of its {count} files, named NAME-00001-of-{count:05}.gguf"
        raise ValueError(f"gguf: {path.name}: must be {rule}")
    maps, regions = [data], [region]
    for part in range(1, count):
        _, more, data, region = _map(path.with_name(f"{match[1]}-{part + 1:05}-of-{match[2]}.gguf"))
        twice = infos.keys() & more.keys()
        if twice:
            raise ValueError(f"gguf: {path.name}: parts must not share tensors, got {min(twice)!r} twice")
        infos |= {name: replace(info, part=part) for name, info in more.items()}
        maps.append(data)
        regions.append(region)
    return GGUFFile(path, metadata, infos, maps, regions)


def _map(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo], Tensor, mmap.mmap]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise Malformed(f"gguf: {path.name}: must be a GGUF file, got {size} bytes")
        if sys.platform == "win32":
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        else:
            mapped = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    magic, version = struct.unpack_from(">4sI", mapped)
    if magic == b"GGUF" and version in _VERSIONS:
        rule = "must be little-endian, got a big-endian file: gguf-convert-endian of the gguf package turns it around"
        raise ValueError(f"gguf: {path.name}: {rule}")
    try:
        metadata, infos = _Header(mapped, size).read()
    except ValueError as error:
        raise Malformed(f"gguf: {path.name}: {error}") from None
    return metadata, infos, torch.frombuffer(mapped, dtype=torch.uint8), mapped


class _Header:
    """A cursor over the header that cannot leave the file."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.data, self.size, self.at, self.spent = data, size, 0, 0

    def take(self, count: int, what: str) -> int:
        """Where the next ``count`` bytes begin."""
        start = self.at
        if count > self.size - start:
            raise ValueError(f"{what} at byte {start} must lie within the file of {self.size} bytes, got {count} bytes")
        self.at = start + count
        return start

    def number(self, form: str, what: str) -> int:
        found: int = struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]
        return found

    def limited(self, form: str, limit: int, what: str) -> int:
        found = self.number(form, what)
        if found > limit:
            raise ValueError(f"{what} must be at most {limit}, got {found}")
        return found

    def spend(self, cost: int, what: str, most: int = 0) -> None:
        """Count what a value takes in memory, ``most`` for a moment."""
        self.spent += cost
        if self.spent + most > self.at + _BUDGET:
            raise ValueError(
                f"the header must take at most {_BUDGET} bytes of memory beyond its own, got more at {what}"
            )

    def name(self, what: str) -> str:
        return self.strings(1, what, _MAX_NAME)[0]

    def strings(self, count: int, what: str, limit: int = _MAX_TEXT) -> list[str]:
        # Vocabularies have some hundred thousand: nothing is called for each that can stand here.
        found, data, size, length_at = [], self.data, self.size, struct.Struct("<Q").unpack_from
        getsizeof, at, spent = sys.getsizeof, self.at, self.spent
        for _ in range(count):
            if size - at < 8 or (length := length_at(data, at)[0]) > size - at - 8:
                raise ValueError(f"{what} at byte {at} must lie within the file of {size} bytes")
            if length > limit:
                raise ValueError(f"{what} at byte {at} must have at most {limit} bytes, got {length}")
            start = at + 8
            at = start + length
            if length > _MAX_NAME:
                # One letter beyond 16 bits makes a string of four bytes a letter.
                self.at, self.spent = at, spent
                self.spend(0, what, 4 * length)
            text = data[start:at].decode("utf-8", "replace")
            spent += getsizeof(text) + _STRING_COST
            if spent > at + _BUDGET:
                self.at, self.spent = at, spent
                self.spend(0, what)
            found.append(text)
        self.at, self.spent = at, spent
        return found

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.strings(1, what)[0]
        if kind == _ARRAY:
            return self.array(what, 1)
        dtype = self.scalar(kind, what)
        start = self.take(dtype.itemsize, what)
        if kind == _BOOL:
            return self.data[start] != 0
        return np.frombuffer(self.data, dtype, 1, start)[0].item()

    def scalar(self, kind: int, what: str) -> np.dtype[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"the type of {what} must be from 0 to 12, got {kind}")
        return np.dtype(_SCALARS[kind])

    def array(self, what: str, depth: int) -> Any:
        self.spend(_ARRAY_COST, what)
        if depth > _MAX_DEPTH:
            raise ValueError(f"arrays in {what} must be nested at most {_MAX_DEPTH} deep, got more")
        kind = self.number("<I", f"the element type of {what}")
        count = self.number("<Q", f"the length of {what}")
        if kind in (_STRING, _ARRAY):
            # Each element begins with 8 bytes at least.
            if count > (self.size - self.at) // 8:
                raise ValueError(f"the length of {what} must fit the file, got {count}")
            return self.strings(count, what) if kind == _STRING else [self.array(what, depth + 1) for _ in range(count)]
        dtype = self.scalar(kind, what)
        start = self.take(dtype.itemsize * count, what)
        return np.frombuffer(self.data, np.dtype("<u1") if kind == _BOOL else dtype, count, start)

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        magic = self.data[self.take(4, "the magic") : 4]
        if magic != b"GGUF":
            raise ValueError(f"must begin with GGUF, got {magic!r}")
        version = self.number("<I", "the version")
        if version not in _VERSIONS:
            raise ValueError(f"version must be 2 or 3, got {version}")
        tensors = self.limited("<Q", _MAX_TENSORS, "the number of tensors")
        keys = self.limited("<Q", _MAX_KEYS, "the number of keys")
        metadata: dict[str, Any] = {}
        for i in range(keys):
            key = self.name(f"the name of key {i}")
            self.spend(_KEY_COST, repr(key))
            if key in metadata:
                raise ValueError(f"keys must differ, got {key!r} twice")
            metadata[key] = self.value(self.number("<I", f"the type of {key!r}"), repr(key))
        found = [self.info(i) for i in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment must be a power of two, got {brief(alignment)}")
        return metadata, self.placed(found, -(-self.at // alignment) * alignment, alignment)

    def info(self, i: int) -> TensorInfo:
        name = self.name(f"the name of tensor {i}")
        self.spend(_TENSOR_COST, repr(name))
        dims = [
            self.number("<Q", f"dimension of {name!r}") for _ in range(self.limited("<I", 4, f"the rank of {name!r}"))
        ]
        number = self.number("<I", f"the type of {name!r}")
        offset = self.number("<Q", f"the offset of {name!r}")
        if number not in _TYPES:
            raise ValueError(f"the type of {name!r} must be one that ggml has, got {number}")
        kind, values, nbytes, _ = _TYPES[number]
        total = 1
        for dim in dims:
            total *= dim
            if not 0 < dim <= self.size * values or total > self.size * values:
                raise ValueError(f"the dimensions of {name!r} must be positive and fit the file, got {dims}")
        if values > 1 and (not dims or dims[0] % values):
            raise ValueError(f"rows of {name!r} must be a multiple of {values} values in {kind}, got {dims}")
        return TensorInfo(name, kind, tuple(reversed(dims)), offset, total // values * nbytes)

    def placed(self, infos: list[TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
        """The tensors with their offsets counted from the start of the file, none outside it or over another."""
        placed: dict[str, TensorInfo] = {}
        end = 0
        for info in sorted(infos, key=lambda info: info.offset):
            if info.offset % alignment:
                raise ValueError(f"the offset of {info.name!r} must be a multiple of {alignment}, got {info.offset}")
            if info.offset < end:
                raise ValueError(f"tensors must not overlap, got {info.name!r} at {info.offset}, before {end}")
            end = info.offset + info.nbytes
            if start + end > self.size:
                raise ValueError(
                    f"{info.name!r} must lie within the file, got bytes {start + info.offset} to {start + end} of "
                    f"{self.size}"
                )
            if info.name in placed:
                raise ValueError(f"tensors must have names of their own, got {info.name!r} twice")
            placed[info.name] = replace(info, offset=start + info.offset)
        return {info.name: placed[info.name] for info in infos}


def write(
    path: str | os.PathLike[str], metadata: Mapping[str, Any], tensors: Mapping[str, Tensor | QuantTensor]
) -> None:
    """Write a file, through the gguf package.

    Args:
        path: replaced when the file is whole, so that a map of the old one stays valid.
        metadata: as in `GGUFFile`; ``general.architecture`` is needed. An int becomes the smallest of uint32, int32,
            uint64 and int64 that holds it, a float becomes float32.
        tensors: plain ones in float32, float16, bfloat16, float64 or an integer type, or in blocks.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"moefuse.quant.gguf.write needs the gguf package: {config.install('gguf')}") from error
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"gguf.write: metadata must have general.architecture, got {architecture!r}")
    for name in (*metadata, *tensors):
        if len(name.encode()) > _MAX_NAME:
            raise ValueError(f"gguf.write: a name must have at most {_MAX_NAME} bytes, got {brief(name)}")
    path = Path(path)
    # A folder of our own beside the target, so that no file or link that is there is written to.
    with tempfile.TemporaryDirectory(prefix=f".{path.name[:64]}.", dir=path.parent) as folder:
        partial = Path(folder) / "partial"
        writer = gguf.GGUFWriter(partial, architecture)
        try:
            _write(gguf, writer, metadata, tensors)
        finally:
            writer.close()
        partial.replace(path)


def _write(gguf: Any, writer: Any, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor | QuantTensor]) -> None:
    numbers = {dtype: number for number, (_, _, _, dtype) in _PLAIN.items()}
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(gguf, writer, key, value)
    if "general.alignment" in metadata:
        writer.data_alignment = int(metadata["general.alignment"])
    for name, tensor in tensors.items():
        if isinstance(tensor, QuantTensor):
            number, rows = FORMATS[tensor.format].ggml, tensor.arranged(FILE).blocks
            if number < 0:
                raise ValueError(f"gguf.write: {name} must be of a type that GGUF has, got {tensor.format}")
        elif isinstance(tensor, Tensor) and tensor.dtype in numbers:
            number, rows = numbers[tensor.dtype], tensor.detach()
        else:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"gguf.write: {name} must be a tensor of a type that GGUF has, got {got}")
        rows = rows.cpu().contiguous().view(rows.shape or 1)
        data = (rows if rows.dtype == torch.uint8 else rows.view(torch.uint8)).numpy()
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()


def _add(gguf: Any, writer: Any, key: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, bool):
        kind = kinds.BOOL
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"gguf.write: {key} must fit 64 bits, got {value}")
        kind = next(
            kind
            for kind, low, high in (
                (kinds.UINT32, 0, 2**32),
                (kinds.INT32, -(2**31), 0),
                (kinds.UINT64, 0, 2**64),
                (kinds.INT64, -(2**63), 0),
            )
            if low <= value < high
        )
    elif isinstance(value, float):
        kind = kinds.FLOAT32
    elif isinstance(value, str):
        kind = kinds.STRING
    elif isinstance(value, list):
        kind = kinds.ARRAY
    else:
        raise TypeError(f"gguf.write: {key} must be a str, bool, int, float, list or array, got {type(value).__name__}")
    writer.add_key_value(key, value, kind)
