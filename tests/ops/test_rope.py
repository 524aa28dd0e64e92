"""rope: against its formula, head by head; views as models have them; what a cache gets, and what it keeps."""

import math

import pytest
import torch

import moefuse
from moefuse.testing import cases
from moefuse.testing.poison import poisoned

from . import oracle
from .oracle import ROUNDED, assert_close

TYPES = [torch.float32, torch.bfloat16, torch.float16]
#: the interpreter included
EVERYONE = cases.runnable(emulated=True)
everyone = pytest.mark.parametrize("target", EVERYONE, ids=lambda pair: pair[0])


def turned(x, cos, sin, norm=None, eps=1e-6):
    """``[B, S, heads, D]``, value by value."""
    out = x.double().clone()
    B, S, heads, D = x.shape
    half = cos.shape[-1]
    for b in range(B):
        for s in range(S):
            for h in range(heads):
                row = [float(value) for value in x[b, s, h].double()]
                if norm is not None:
                    scale = 1 / math.sqrt(math.fsum(value * value for value in row) / D + eps)
                    row = [value * scale * float(w) for value, w in zip(row, norm.double(), strict=True)]
                for i in range(half):
                    a, c = row[i], row[half + i]
                    turn = (float(t[b % t.shape[0], s, i]) for t in (cos, sin))
                    cosine, sine = turn
                    row[i], row[half + i] = a * cosine - c * sine, c * cosine + a * sine
                out[b, s, h] = torch.tensor(row, dtype=torch.float64)
    return out


def angles(rng, *shape):
    drawn = oracle.uniform(rng, *shape, low=0.0, high=2 * math.pi)
    return drawn.cos(), drawn.sin()


def types_on(target):
    """Those that a backend has kernels for, and float64 on the reference."""
    row = next((row for row in moefuse.backends.BACKENDS if row.name == target[0]), None)
    return [torch.float64, *TYPES] if row is None else [dtype for dtype in TYPES if dtype in row.load().DTYPES]


def run(target, q, k, cos, sin, **options):
    backend, device = target
    here = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    with poisoned():
        result = moefuse.rope(*(t.to(device) for t in (q, k, cos, sin)), **here, backend=backend)
    return result, here


@everyone
@pytest.mark.parametrize(
    ("B", "S", "Hq", "Hk", "D", "R"),
    [(1, 1, 8, 2, 64, 64), (2, 3, 4, 1, 80, 32), (1, 2, 16, 1, 96, 96), (1, 1, 3, 5, 128, 64), (2, 1, 1, 1, 256, 256),
     (1, 1, 1, 1, 2, 2), (3, 2, 5, 3, 7, 4)],
)  # fmt: skip
@pytest.mark.parametrize("norm", [False, True])
def test_against_the_formula(target, rng, B, S, Hq, Hk, D, R, norm):
    for dtype in types_on(target):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        q, k = (oracle.normal(rng, B, S, heads, D).to(dtype) for heads in (Hq, Hk))
        cos, sin = (t.to(wide) for t in angles(rng, B if norm else 1, S, R // 2))
        norms = {f"{name}_norm": oracle.uniform(rng, D).to(dtype) for name in ("q", "k")} if norm else {}
        (got_q, got_k), _ = run(target, q, k, cos, sin, **norms, eps=1e-5)
        assert got_q.is_contiguous()
        assert got_k.is_contiguous()
        for got, given, weight in ((got_q, q, norms.get("q_norm")), (got_k, k, norms.get("k_norm"))):
            assert got.dtype == dtype
            assert_close(got.cpu(), turned(given, cos, sin, weight, 1e-5), ROUNDED[dtype])


@everyone
@pytest.mark.parametrize("position", [0, 1, 4, 6, 7, 8, 40, -1])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_a_cache_gets_what_has_a_place_and_keeps_the_rest(target, rng, position, integer):
    """Three tokens and seven places; a cache between other numbers, which stay."""
    for dtype in types_on(target):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        heads = oracle.normal(rng, 2, 3, 5 + 2 * 2, 16).to(dtype)
        q, k, v = heads.split((5, 2, 2), 2)
        cos, sin = (t.to(wide) for t in angles(rng, 1, 3, 4))
        around = oracle.normal(rng, 2, 9, 2, 2, 20).to(dtype)  # [B, places, keys or values, Hk, D]
        whole = around.to(target[1]).clone()
        keys, values = (whole[:, 1:8, i, :, 2:18].transpose(1, 2) for i in range(2))
        place = torch.tensor([position], dtype=integer, device=target[1])
        with poisoned():
            got = moefuse.rope(
                *(t.to(target[1]) for t in (q, k, cos, sin)), v=v.to(target[1]), keys=keys, values=values,
                position=place, backend=target[0],
            )  # fmt: skip
        assert_close(got.cpu(), turned(q, cos, sin), ROUNDED[dtype])
        written = turned(k, cos, sin)
        whole = whole.cpu()
        for s in range(3):
            at = position + s
            if 0 <= at < 7:
                assert_close(whole[:, 1 + at, 0, :, 2:18], written[:, s], ROUNDED[dtype])
                assert torch.equal(whole[:, 1 + at, 1, :, 2:18], v[:, s])
                whole[:, 1 + at, :, :, 2:18] = around[:, 1 + at, :, :, 2:18]
        assert torch.equal(whole, around)


def test_more_tokens_than_places(target, rng):
    q, k = oracle.normal(rng, 1, 9, 2, 8), oracle.normal(rng, 1, 9, 1, 8)
    cos, sin = angles(rng, 1, 9, 4)
    cache = torch.zeros(2, 1, 1, 4, 8)
    _, here = run(target, q, k, cos, sin, v=k, keys=cache[0], values=cache[1], position=torch.tensor(1))
    assert_close(here["keys"][0, 0, 1:].cpu(), turned(k, cos, sin)[0, :3, 0], ROUNDED[torch.float32])
    assert torch.equal(here["values"][0, 0, 1:].cpu(), k[0, :3, 0])
    assert (here["keys"][:, :, 0] == 0).all()


def test_values_of_another_size(target, rng):
    q, k, v = (oracle.normal(rng, 1, 2, 3, D) for D in (8, 8, 5))
    cos, sin = angles(rng, 1, 2, 4)
    _, here = run(target, q, k, cos, sin, v=v, keys=torch.zeros(1, 3, 4, 8), values=torch.zeros(1, 3, 4, 5),
                  position=torch.tensor([[2]]))  # fmt: skip
    assert torch.equal(here["values"][:, :, 2:].cpu(), v.transpose(1, 2))


def test_one_head_that_is_no_number_stays_alone(target, rng):
    q, k = oracle.normal(rng, 1, 2, 3, 8), oracle.normal(rng, 1, 2, 3, 8)
    q[0, 1, 2, 0] = torch.nan
    (got, _), _ = run(target, q, k, *angles(rng, 1, 2, 2), q_norm=torch.ones(8))
    assert got[0, 1, 2].isnan().all()
    assert not got[0, 0].isnan().any()
    assert not got[0, 1, :2].isnan().any()


def test_what_does_not_turn_is_not_touched_by_it(target):
    """Values behind the first R have no angle to be multiplied with."""
    x = torch.full((1, 1, 1, 6), torch.inf)
    x[..., :2] = 1.0
    (q, _), _ = run(target, x, x, torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    assert q.flatten().tolist() == [-1.0, 1.0, *[math.inf] * 4]
