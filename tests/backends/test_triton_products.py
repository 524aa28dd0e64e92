"""The grouped product through tile descriptors, which the case table's small tiles do not reach in the interpreter."""

import itertools

import pytest
import torch

from moefuse.testing import cases
from moefuse.testing.compare import difference

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]
E, I, H, T, TOP_K = 3, 40, 64, 90, 2


def stacks(layout: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up rows ``[E, I, H]`` as a caller may hold them."""
    made = torch.randn(2, E, I, H, device=device) * H**-0.5
    if layout == "halves":
        whole = torch.cat((made[0], made[1]), 1)
        return whole[:, :I], whole[:, I:]
    if layout == "up_first":
        whole = torch.cat((made[1], made[0]), 1)
        return whole[:, I:], whole[:, :I]
    return (made[0], made[1]) if layout == "one_storage" else (made[0].clone(), made[1].clone())


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])
@pytest.mark.parametrize("layout", ["halves", "up_first", "one_storage", "apart"])
@pytest.mark.parametrize("height", [32, 128])
def test_up_and_down_by_descriptors(layout: str, height: int, target: tuple[str, str]) -> None:
    """Heights of 128 take the half-height last tile too; N is no multiple of the tile."""
    from moefuse.backends.triton.grouped_linear import Rows, Weights, product
    from moefuse.backends.triton.runtime.tiles import Tile
    from moefuse.ops.glu import glu_reference
    from moefuse.ops.grouped_linear import grouped_linear_reference
    from moefuse.ops.plan import plan_reference
    from moefuse.types import Activation, Plan

    tile = Tile(height, 32, 32, 4, 2, copy_engine=True)
    silu = Activation("silu")
    gate, up = stacks(layout, target[1])
    x, ids = torch.randn(T, H, device=target[1]), torch.randint(0, E, (T, TOP_K), device=target[1])
    plan = Plan(*plan_reference(ids, E), TOP_K)
    hidden = torch.full((T * TOP_K, I), torch.nan, device=target[1])
    product(x, Weights(Rows(gate), Rows(up)), plan, silu, hidden, tile, gather=True)
    wide = [grouped_linear_reference(x.double(), w.double(), None, plan, True, False) for w in (gate, up)]
    assert difference(hidden, glu_reference(*wide, silu, "halves")).worst < 2e-6

    down, packed = torch.randn(E, 48, H, device=target[1]), torch.randn(T * TOP_K, H, device=target[1])
    out = torch.full((T * TOP_K, 48), torch.nan, device=target[1])
    product(packed, Weights.of(down), plan, None, out, tile)
    want = grouped_linear_reference(packed.double(), down.double(), None, plan, False, False)
    assert difference(out, want).worst < 2e-6


def test_numbers_of_32_and_of_64_bits_have_kernels_of_their_own() -> None:
    from moefuse.backends.triton.runtime.launch import _kind

    for small, large in ((16, 2**31), (17, 2**31 + 1), (-16, -(2**31) - 16)):
        assert _kind(small) != _kind(large)
    assert _kind(16) == _kind(2**31 - 16) != _kind(17)
    assert _kind(1) != _kind(3) == _kind(5)
    assert _kind((16, 1)) == (_kind(16), _kind(1)), "each number of a tuple counts"


@pytest.mark.parametrize("format", ["", "Q4_K", "Q8_0"])
def test_tiles_of_few_tokens_fit_a_small_card(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.backends.triton.runtime import tiles, tuned

    cpu = torch.device("cpu")
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(tuned, "shared_limit", lambda _: 64 * 1024)
    for tokens, top_k, N, itemsize in itertools.product((1, 2, 4), (1, 2, 4, 6, 8, 10, 32), (256, 2048, 7168), (2, 4)):
        for role, gated in (("decode up", True), ("decode down", False)):
            product = tuned.Product(role, 64, N, 2048, top_k, tokens, itemsize, gated, format)
            assert product.fits(product.built_in(cpu), cpu)


def test_a_lone_token_has_longer_chunks_of_weights_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of one token are too few to keep the memory busy with short ones."""
    from moefuse.backends.triton.runtime import tiles

    monkeypatch.setattr(tiles, "INTERPRETED", False)
    alone, four = (tiles.decode_down_tile(tokens * 2048, 768, 8) for tokens in (1, 4))
    assert alone.k == 2 * four.k
    assert tiles.decode_down_tile(4 * 2048, 2048, 8) == alone, "nor does a long row go in pieces of 128 bytes"


@pytest.mark.parametrize("limit", [227 * 1024, 99 * 1024])
@pytest.mark.parametrize("gated", [True, False])
def test_many_rows_of_blocks_take_tensor_cores_however_small_the_card(
    limit: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer stages, where shared memory is short, do not make the tile one for few rows, which rounds them."""
    tiles = pytest.importorskip("moefuse.backends.triton.runtime.tiles")
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(tiles, "shared_limit", lambda _: limit)
    for rows in (1, 3, 6, 12, 50, 500):
        tile = tiles.product_tile(rows, 2, gated, torch.device("cpu"), "Q6_K")
        assert (tile.m <= tiles.FEW_ROWS) == (rows <= tiles.FEW_ROWS)
