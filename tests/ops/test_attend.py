"""attend: against its formula, place by place; what is not seen may hold anything; sinks, windows and long caches."""

import pytest
import torch

import moefuse
from moefuse.testing.compare import Tolerance
from moefuse.testing.poison import poisoned

from . import oracle
from .oracle import ROUNDED, assert_close
from .test_rope import TYPES, everyone, types_on

#: The absolute error of a logit, an f32 sum of products, is the relative one of its weight.
BOUND = ROUNDED | {torch.float32: Tolerance(3e-6, 3e-6, "weights of logits that are an f32 product")}


def attended(q, keys, values, position, *, mask=None, scale=None, window=None, sinks=None):
    """``[B, Hq, Dv]`` in float64, from the places that are seen alone."""
    (B, Hq, D), Hk = q.shape, keys.shape[1]
    out = torch.zeros(B, Hq, values.shape[3], dtype=torch.float64)
    first = 0 if window is None else max(position + 1 - window, 0)
    for b in range(B):
        places = [j for j in range(first, min(position + 1, keys.shape[2])) if mask is None or mask[b, j]]
        for h in range(Hq):
            group = h * Hk // Hq
            logits = keys[b, group, places].double() @ q[b, h].double() * (D**-0.5 if scale is None else scale)
            if sinks is not None:
                logits = torch.cat((logits, sinks[h : h + 1].double()))
            if places:
                out[b, h] = logits.softmax(0)[: len(places)] @ values[b, group, places].double()
    return out


def drawn(rng, B, Hq, Hk, D, L, dtype, Dv=None):
    shapes = ((B, Hq, D), (B, Hk, L, D), (B, Hk, L, D if Dv is None else Dv))
    return tuple(oracle.normal(rng, *shape).to(dtype) for shape in shapes)


def run(target, q, keys, values, position, **options):
    backend, device = target
    here = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    place = torch.tensor([position], device=device)
    with poisoned():
        out = moefuse.attend(*(t.to(device) for t in (q, keys, values)), place, **here, backend=backend)
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    return out.cpu()


@everyone
@pytest.mark.parametrize(
    ("D", "Hq", "Hk"),
    [(64, 2, 2), (64, 16, 1), (80, 4, 1), (96, 16, 2), (128, 4, 4), (128, 16, 2), (256, 4, 1), (256, 16, 1)],
)
def test_sizes_of_heads_and_groups(target, rng, D, Hq, Hk):
    for dtype in types_on(target):
        q, keys, values = drawn(rng, 1 if Hk > 1 else 2, Hq, Hk, D, 75, dtype)
        for position in (0, 1, 40, 74):
            want = attended(q, keys, values, position)
            assert_close(run(target, q, keys, values, position), want, BOUND[dtype])


@everyone
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("parts", [(), ("mask",), ("window",), ("sinks",), ("mask", "window", "sinks", "scale")])
def test_parts(target, rng, B, parts):
    for dtype in types_on(target):
        q, keys, values = drawn(rng, B, 6, 2, 24, 150, dtype, Dv=20)
        given = {
            "mask": torch.rand(B, 150, generator=rng) < 0.5,
            "window": 70,
            "sinks": oracle.normal(rng, 6).to(torch.float64 if dtype == torch.float64 else torch.float32),
            "scale": 0.4,
        }
        options = {name: given[name] for name in parts}
        for position in (3, 149):
            want = attended(q, keys, values, position, **options)
            assert_close(run(target, q, keys, values, position, **options), want, BOUND[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("B", "Hq", "Hk"), [(1, 8, 2), (2, 4, 4)])
def test_long_caches(target, rng, dtype, B, Hq, Hk):
    """More places than one part has, and a query that attends to some of them more than to the rest."""
    q, keys, values = drawn(rng, B, Hq, Hk, 64, 4100, dtype)
    keys[:, :, 17::400] = 2 * q[:, :: Hq // Hk, None]
    for position in (4095, 4099):
        for window in (None, 1000):
            want = attended(q, keys, values, position, window=window)
            assert_close(run(target, q, keys, values, position, window=window), want, BOUND[dtype])


@everyone
def test_what_is_not_seen_may_hold_anything(target, rng):
    q, keys, values = drawn(rng, 2, 4, 2, 16, 90, torch.float32)
    mask = torch.rand(2, 90, generator=rng) < 0.5
    want = attended(q, keys, values, 60, mask=mask, window=40)
    seen = mask & (torch.arange(90) <= 60) & (torch.arange(90) > 20)
    for junk in (torch.nan, torch.inf, -torch.inf):
        hidden = [t.masked_fill(~seen[:, None, :, None], junk) for t in (keys, values)]
        assert_close(run(target, q, *hidden, 60, mask=mask, window=40), want, BOUND[torch.float32])


@everyone
@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_nothing_gives_zero(target, rng, sinks):
    q, keys, values = drawn(rng, 2, 4, 2, 16, 40, torch.float32)
    given = {"sinks": oracle.normal(rng, 4)} if sinks else {}
    assert (run(target, q, keys, values, -1, **given) == 0).all()
    assert (run(target, q, keys[:, :, :0], values[:, :, :0], 5, **given) == 0).all()
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, :31] = False
    got = run(target, q, keys, values, 30, mask=mask, **given)
    assert (got[1] == 0).all()
    assert_close(got[:1], attended(q[:1], keys[:1], values[:1], 30, **given), BOUND[torch.float32])


@everyone
def test_a_position_behind_the_last_place_sees_all(target, rng):
    q, keys, values = drawn(rng, 1, 2, 1, 16, 40, torch.float32)
    want = attended(q, keys, values, 39)
    assert_close(run(target, q, keys, values, 1000), want, BOUND[torch.float32])
    assert_close(
        run(target, q, keys, values, 44, window=10), attended(q, keys, values, 44, window=10), BOUND[torch.float32]
    )


@everyone
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_views_as_models_have_them(target, rng, integer):
    """A query of several tokens' heads, and a cache whose places come before its heads."""
    backend, device = target
    for dtype in types_on(target):
        heads = oracle.normal(rng, 2, 3, 8, 32).to(dtype).to(device)
        cache = oracle.normal(rng, 2, 2, 50, 2, 40).to(dtype).to(device)
        keys, values = (t[..., 4:36].transpose(1, 2) for t in cache)
        q = heads[:, 1, 2:6]
        position = torch.tensor(33, dtype=integer, device=device)
        got = moefuse.attend(q, keys, values, position, backend=backend)
        assert_close(got.cpu(), attended(q.cpu(), keys.cpu(), values.cpu(), 33), BOUND[dtype])


@everyone
def test_large_logits_do_not_overflow(target, rng):
    """One place takes all, in the first part, in the last, or the sink does."""
    q, keys, values = drawn(rng, 1, 2, 1, 16, 80, torch.float32)
    q, keys = q.abs() * 100, keys.abs()
    for place in (0, 79):
        big = keys.clone()
        big[:, :, place] *= 100
        assert_close(
            run(target, q, big, values, 79), values[:, :, place].double().expand(1, 2, 16), BOUND[torch.float32]
        )
    assert (run(target, q, keys, values, 79, sinks=torch.full((2,), 1e6)) == 0).all()
    assert_close(
        run(target, q, -1000 * keys, values, 0), values[:, :, 0].double().expand(1, 2, 16), BOUND[torch.float32]
    )


@everyone
def test_what_is_no_number_stays_in_its_sequence(target, rng):
    q, keys, values = drawn(rng, 3, 2, 1, 16, 40, torch.float32)
    keys[1, 0, 7, 3], values[2, 0, 9, 5] = torch.nan, torch.nan
    got = run(target, q, keys, values, 39)
    assert not got[0].isnan().any()
    assert got[1].isnan().all()
    assert got[2, :, 5].isnan().all()
    assert not got[2, :, :5].isnan().any()


@everyone
def test_the_same_bits_each_time(target, rng):
    q, keys, values = drawn(rng, 2, 4, 2, 32, 300, torch.float32)
    first = run(target, q, keys, values, 280)
    assert all(torch.equal(first, run(target, q, keys, values, 280)) for _ in range(2))


def test_attention_as_torch_has_it(target, rng):
    q, keys, values = drawn(rng, 2, 8, 2, 64, 33, torch.float32)
    repeated = [t[:, :, :21].repeat_interleave(4, 1).double() for t in (keys, values)]
    want = torch.nn.functional.scaled_dot_product_attention(q[:, :, None].double(), *repeated)[:, :, 0]
    assert_close(run(target, q, keys, values, 20), want, BOUND[torch.float32])
