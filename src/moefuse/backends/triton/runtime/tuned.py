"""The tile of each product of an expert, and of `moefuse.linear`.

It is what ``moefuse tune`` found on this card, else the built-in table's. What was found lies in one file of the user's
cache folder, by card and version of Triton. It is read once, when the first tile is asked for; a file that is not ours
is left alone and told of.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from moefuse import backends, config
from moefuse.backends.triton.runtime.launch import INTERPRETED, block_of
from moefuse.backends.triton.runtime.tiles import (
    Tile,
    decode_down_tile,
    decode_up_tile,
    linear_tile,
    product_tile,
    shared_limit,
)

_log = logging.getLogger("moefuse")
_FORMAT = 1
#: one token to one of 1024 experts
_LEAST_LOAD = 2.0**-10


@dataclass(frozen=True)
class Product:
    """One of the two products of T tokens through their experts: ``N`` columns, sums over ``K``.

    ``role``: "up" or "down", or "decode up" and "decode down" where each assignment is a matrix-vector product of its
    own; "linear" is that of `moefuse.linear` for few rows, N of all its weights, one expert. ``format`` is that of the
    weights, empty for numbers of ``itemsize`` bytes, which activations have in any case.

    >>> Product("up", 128, 768, 2048, 8, 100, 2, True).name
    'up E=128 N=768 K=2048 top_k=8 gated, 2 bytes, to 8 rows an expert'
    """

    role: str
    E: int
    N: int
    K: int
    top_k: int
    T: int
    itemsize: int
    gated: bool
    format: str = ""

    @property
    def decodes(self) -> bool:
        return self.role.startswith("decode")

    @property
    def load(self) -> float:
        """Rows of an expert, on average."""
        return self.T * self.top_k / self.E

    @property
    def name(self) -> str:
        """Products of one name share a tile: few tokens by their number, more by the power of two above the load."""
        size = f"{self.T} tokens"
        if not self.decodes and self.role != "linear":
            size = f"to {2.0 ** math.ceil(math.log2(max(self.load, _LEAST_LOAD))):g} rows an expert"
        gated, kind = " gated" if self.gated else "", self.format or f"{self.itemsize} bytes"
        return f"{self.role} E={self.E} N={self.N} K={self.K} top_k={self.top_k}{gated}, {kind}, {size}"

    def built_in(self, device: torch.device) -> Tile:
        if self.role == "decode up":
            return decode_up_tile(self.T, self.format)
        if self.role == "decode down":
            return decode_down_tile(self.T * self.N, self.K, self.top_k, self.format)
        if self.role == "linear":
            return linear_tile(self.T, self.N, self.itemsize, device, self.format)
        return product_tile(self.load, self.itemsize, self.gated, device, self.format)

    def fits(self, tile: Tile, device: torch.device) -> bool:
        """Whether the card's shared memory holds the tile; registers hold blocks of a matrix-vector product."""
        if self.decodes and self.format:
            return True
        at_once = block_of(self.top_k, 1) if self.role == "decode down" else 1
        return at_once * tile.shared_bytes(self.itemsize, self.gated, self.format) <= shared_limit(device)


#: name of a product -> the tile that is being tried
_TRIED: dict[str, Tile] = {}


def tile_for(product: Product, device: torch.device) -> Tile:
    """The tile of a product on this card."""
    if product.name in _TRIED:
        return _TRIED[product.name]
    if INTERPRETED or backends.invariant():  # what was measured goes by the number of rows
        return product.built_in(device)
    found = _kept(card(device)).get(product.name)
    return found if found is not None and product.fits(found, device) else product.built_in(device)


@functools.lru_cache(1024)
def linear_tile_for(T: int, N: int, K: int, itemsize: int, device: torch.device, format: str) -> Tile:
    """The tile of `moefuse.linear`, which is not replayed: each call asks."""
    return tile_for(Product("linear", 1, N, K, 1, T, itemsize, False, format), device)


@contextmanager
def trying(product: Product, tile: Tile) -> Iterator[None]:
    """Inside, the product has this tile."""
    _TRIED[product.name] = tile
    linear_tile_for.cache_clear()
    try:
        yield
    finally:
        del _TRIED[product.name]
        linear_tile_for.cache_clear()


def card(device: torch.device) -> str:
    """What a tile's speed hangs on besides the product."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return f"{name}, Triton {triton.__version__}"


def path() -> Path:
    return config.cache() / "tiles.json"


def keep(device: torch.device, tiles: Mapping[str, Tile | None]) -> None:
    """Put these into the file by name of the product, None to take one out; what it has besides stays."""
    found = _read(path())
    mine: dict[str, Tile | None] = {**found.pop(card(device), {}), **tiles}
    found[card(device)] = {name: tile for name, tile in mine.items() if tile is not None}
    plain = {owner: {name: dataclasses.asdict(t) for name, t in mine.items()} for owner, mine in found.items()}
    path().parent.mkdir(parents=True, exist_ok=True)
    # Written beside, in a folder of our own, and moved: whoever reads meanwhile has the old file or the new one.
    with tempfile.TemporaryDirectory(dir=path().parent) as folder:
        draft = Path(folder) / path().name
        draft.write_text(json.dumps({"moefuse tiles": _FORMAT, "cards": plain}, indent=1))
        draft.replace(path())
    forget()


def forget() -> None:
    """Read the file anew when next a tile is asked for."""
    _kept.cache_clear()
    linear_tile_for.cache_clear()


@functools.cache
def _kept(owner: str) -> dict[str, Tile]:
    return _read(path()).get(owner, {})


class _Foreign(Exception):
    """Not what `keep` writes."""


def _read(file: Path) -> dict[str, dict[str, Tile]]:
    """Tiles by card and product; nothing, and a warning, where the file is not what `keep` writes."""
    try:
        found = json.loads(file.read_text())
        if found["moefuse tiles"] != _FORMAT:
            raise _Foreign(f"it has format {found['moefuse tiles']}, not {_FORMAT}")
        return {owner: {n: _tile(fields) for n, fields in mine.items()} for owner, mine in found["cards"].items()}
    except FileNotFoundError:
        return {}
    except (_Foreign, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("moefuse: %s is not used, it is no file of tiles: %s: %s", file, type(error).__name__, error)
        return {}


def _tile(fields: dict[str, Any]) -> Tile:
    """A tile as it was kept. Sizes are powers of two: anything else would not compile, or not be asked for."""
    tile = Tile(**fields)
    for field in dataclasses.fields(Tile):
        value = getattr(tile, field.name)
        if type(value) is not (int if field.default is dataclasses.MISSING else type(field.default)):
            raise _Foreign(f"{field.name} is {value!r}")
    if any(size < 1 or size & (size - 1) for size in (tile.m, tile.n, tile.k, tile.warps)) or tile.stages < 1:
        raise _Foreign(f"there is no {tile}")
    return tile
