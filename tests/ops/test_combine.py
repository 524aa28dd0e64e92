"""combine: every subset of the tail, in place and into given tensors, gradients."""

import itertools
import math

import pytest
import torch

import moefuse
from moefuse.testing.compare import Tolerance
from moefuse.testing.poison import poisoned

from . import oracle
from .oracle import ROUNDED, assert_close

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHARED = ["none", "shared", "shared_gate", "shared_logit"]
EPS = 1e-5


def make(rng, T, top_k, H, dtype=torch.float32, *, inverse=False, shared="none", residual=False, norm=False):
    given = {"y": oracle.normal(rng, T * top_k, H).to(dtype), "weights": uneven(rng, T, top_k)}
    if inverse:
        given["inverse"] = torch.randperm(T * top_k, generator=rng).to(torch.int32)
    if shared != "none":
        given["shared"] = oracle.normal(rng, T, H).to(dtype)
    if shared == "shared_gate":
        given["shared_gate"] = oracle.uniform(rng, T).to(dtype)
    if shared == "shared_logit":
        given["shared_logit"] = oracle.normal(rng, T).to(dtype)
    if residual:
        given["residual"] = oracle.normal(rng, T, H).to(dtype)
    if norm:
        given["norm_weight"], given["eps"] = oracle.uniform(rng, H).to(dtype), EPS
    return given


def uneven(rng, T, top_k):
    """Weights that a swapped slot would show in."""
    return oracle.uniform(rng, T, top_k, low=0.1, high=1.0) * (1 + torch.arange(top_k))


def expected(given):
    """Token by token in float64: out, and normed or None."""
    T, top_k = given["weights"].shape
    y, weights = given["y"].double(), given["weights"].double()
    rows = []
    for t in range(T):
        total = torch.zeros(y.shape[1], dtype=torch.float64)
        for j in range(top_k):
            s = t * top_k + j
            total += weights[t, j] * y[s if given.get("inverse") is None else int(given["inverse"][s])]
        if "shared" in given:
            g = 1.0
            if "shared_gate" in given:
                g = float(given["shared_gate"][t])
            if "shared_logit" in given:
                g = 1 / (1 + math.exp(-float(given["shared_logit"][t])))
            total += g * given["shared"][t].double()
        if "residual" in given:
            total += given["residual"][t].double()
        rows.append(total)
    out = torch.stack(rows) if rows else torch.empty(0, y.shape[1], dtype=torch.float64)
    return out, oracle.rms_norm(out, given["norm_weight"], given["eps"]) if "norm_weight" in given else None


def run(target, given, **more):
    backend, device = target
    here = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in (given | more).items()}
    with poisoned():
        return moefuse.combine(**here, backend=backend)


def agree(target, given, tolerance):
    result = run(target, given)
    out, normed = result if "norm_weight" in given else (result, None)
    want, want_normed = expected(given)
    assert out.dtype == (given["residual"] if "residual" in given else given["y"]).dtype
    assert_close(out.cpu(), want, tolerance)
    if normed is not None:
        assert normed.dtype == given["y"].dtype
        assert_close(normed.cpu(), want_normed, tolerance)
    return out, normed


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_every_subset(target, rng, dtype, inverse, shared, residual, norm):
    given = make(rng, 5, 3, 37, dtype, inverse=inverse, shared=shared, residual=residual, norm=norm)
    agree(target, given, ROUNDED[dtype])


@pytest.mark.parametrize(
    ("T", "top_k", "H"), [(1, 1, 1), (1, 8, 2048), (3, 64, 33), (130, 2, 65), (2, 10, 7), (600, 1, 4)]
)
def test_sizes(target, rng, T, top_k, H):
    given = make(rng, T, top_k, H, inverse=True, shared="shared_logit", residual=True, norm=True)
    # A row of one element is one sum, which may cancel: all terms positive there.
    given |= {name: given[name].abs() for name in ("y", "shared", "residual")}
    agree(target, given, ROUNDED[torch.float32])


def test_no_token(target):
    given = {"y": torch.empty(0, 8), "weights": torch.empty(0, 4), "residual": torch.empty(0, 8)}
    assert run(target, given).shape == (0, 8)
    out, normed = run(target, given | {"norm_weight": torch.ones(8)})
    assert out.shape == normed.shape == (0, 8)


def test_norm_follows_the_unrounded_sum(target, rng):
    """bf16: normed is one rounding from float64, not that of an already rounded row."""
    given = make(rng, 16, 8, 256, torch.bfloat16, residual=True, norm=True)
    _, normed = run(target, given)
    want = expected(given)[1].float().bfloat16()
    # Ties and f32 rounding move a few elements; rounding the row first would move about half.
    assert (normed.cpu() == want).float().mean() > 0.98


def test_mixed_types(target, rng):
    """bf16 expert outputs onto a float32 residual stream."""
    given = make(rng, 5, 3, 24, torch.bfloat16, shared="shared_gate", norm=True)
    given["residual"] = oracle.normal(rng, 5, 24)
    given["shared_gate"] = given["shared_gate"].float()
    out, normed = run(target, given)
    want, want_normed = expected(given)
    assert out.dtype == torch.float32
    assert normed.dtype == torch.bfloat16
    assert_close(out.cpu(), want, ROUNDED[torch.float32])
    assert_close(normed.cpu(), want_normed, ROUNDED[torch.bfloat16])


def test_narrow_weights(target, rng):
    given = make(rng, 5, 3, 24, torch.float16, residual=True)
    given["weights"] = given["weights"].half()
    agree(target, given, ROUNDED[torch.float16])


def test_large_negative_logit(target, rng):
    given = make(rng, 4, 2, 8, shared="shared_logit")
    given["shared_logit"] = torch.tensor([-1e4, -90.0, 90.0, 1e4])
    out = run(target, given).cpu()
    assert out.isfinite().all()
    given["shared_gate"] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    del given["shared_logit"]
    assert_close(out, expected(given)[0], ROUNDED[torch.float32])


def test_a_bad_row_stays_alone(target, rng):
    given = make(rng, 5, 2, 12, shared="shared", residual=True, norm=True)
    before = [t.cpu() for t in run(target, given)]
    given["y"][3] = torch.nan
    given["residual"][4, 2] = math.inf
    after = [t.cpu() for t in run(target, given)]
    for then, now in zip(before, after, strict=True):
        assert torch.equal(then[[0, 2, 3]], now[[0, 2, 3]])
    assert after[0][1].isnan().all()


@pytest.mark.parametrize("view", ["transposed", "stepped", "expanded"])
def test_views(target, rng, view):
    T, top_k, H = 5, 3, 14
    views = {
        "transposed": lambda rows, cols: oracle.normal(rng, cols, rows).T,
        "stepped": lambda rows, cols: oracle.normal(rng, 2 * rows, 2 * cols)[::2, ::2],
        "expanded": lambda rows, cols: oracle.normal(rng, 1, cols).expand(rows, cols),
    }[view]
    given = {
        "y": views(T * top_k, H),
        "weights": views(T, top_k),
        "shared": views(T, H),
        "shared_gate": oracle.uniform(rng, 2 * T)[::2],
        "residual": views(T, H),
        "norm_weight": oracle.uniform(rng, 2 * H)[::2],
        "eps": EPS,
        "inverse": torch.randperm(2 * T * top_k, generator=rng)[: T * top_k].argsort().to(torch.int32).flip(0),
    }
    assert not given["y"].is_contiguous()
    agree(target, given, ROUNDED[torch.float32])


def test_the_same_bits_again(target, rng):
    given = make(rng, 9, 8, 100, inverse=True, shared="shared_logit", residual=True, norm=True)
    first, second = (run(target, given) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


# Into given tensors


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_in_place_on_the_residual(target, rng, dtype, norm):
    given = make(rng, 6, 3, 20, dtype, shared="shared_logit", residual=True, norm=norm)
    want, want_normed = expected(given)
    stream = given["residual"].to(target[1])
    del given["residual"]
    result = run(target, given, residual=stream, out=stream)
    out = result[0] if norm else result
    assert out.data_ptr() == stream.data_ptr()
    assert_close(stream.cpu(), want, ROUNDED[dtype])
    if norm:
        assert_close(result[1].cpu(), want_normed, ROUNDED[dtype])


@pytest.mark.parametrize(("inner", "outer"), list(itertools.product(TYPES, TYPES)))
def test_out_of_another_type(target, rng, inner, outer):
    backend, device = target
    given = make(rng, 6, 3, 20, inner, residual=True, norm=True)
    want, want_normed = expected(given)
    out = torch.full((6, 20), torch.nan, dtype=outer, device=device)
    normed = torch.full((6, 20), torch.nan, dtype=outer, device=device)
    got = run((backend, device), given, out=out, normed_out=normed)
    assert got[0] is out or got[0].data_ptr() == out.data_ptr()
    assert_close(out.cpu(), want, ROUNDED[outer])
    assert_close(normed.cpu(), want_normed, ROUNDED[outer])


@pytest.mark.parametrize("which", ["out", "normed_out"])
def test_one_of_two_given(target, rng, which):
    given = make(rng, 6, 3, 20, residual=True, norm=True)
    want = expected(given)
    buffer = torch.full((6, 20), torch.nan, device=target[1])
    out, normed = run(target, given, **{which: buffer})
    assert (out if which == "out" else normed).data_ptr() == buffer.data_ptr()
    assert_close(out.cpu(), want[0], ROUNDED[torch.float32])
    assert_close(normed.cpu(), want[1], ROUNDED[torch.float32])


def test_out_equals_returned(target, rng):
    given = make(rng, 6, 3, 20, inverse=True, shared="shared", residual=True, norm=True)
    plain = run(target, given)
    buffers = [torch.empty(6, 20, device=target[1]) for _ in range(2)]
    run(target, given, out=buffers[0], normed_out=buffers[1])
    assert torch.equal(plain[0], buffers[0])
    assert torch.equal(plain[1], buffers[1])


def test_a_row_of_a_larger_buffer(target, rng):
    """out may be a contiguous slice; nothing around it is touched."""
    given = make(rng, 2, 3, 20, residual=True)
    buffer = torch.full((6, 20), 7.0, device=target[1])
    run(target, given, out=buffer[2:4])
    assert_close(buffer[2:4].cpu(), expected(given)[0], ROUNDED[torch.float32])
    assert (buffer[[0, 1, 4, 5]] == 7.0).all()


def test_out_without_gradients_under_no_grad(target, rng):
    given = make(rng, 2, 3, 20)
    given["y"].requires_grad_()
    buffer = torch.empty(2, 20, device=target[1])
    with torch.no_grad():
        run(target, given, out=buffer)
    assert_close(buffer.cpu(), expected(given)[0].detach(), ROUNDED[torch.float32])


def test_inputs_are_left_alone(target, rng):
    given = make(rng, 4, 2, 12, inverse=True, shared="shared_gate", residual=True, norm=True)
    kept = {name: v.clone() for name, v in given.items() if isinstance(v, torch.Tensor)}
    run(target, given)
    assert all(torch.equal(given[name], v) for name, v in kept.items())


# Gradients


def leaves_of(given):
    return {name: v for name, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_gradcheck(rng, inverse, shared, residual, norm):
    given = make(rng, 3, 2, 4, torch.float64, inverse=inverse, shared=shared, residual=residual, norm=norm)
    given["weights"] = given["weights"].double()
    names = list(leaves_of(given))

    def results(*tensors):
        return moefuse.combine(**(given | dict(zip(names, tensors, strict=True))), backend="reference")

    leaves = [given[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(results, leaves, fast_mode=False)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("norm", [False, True])
def test_gradients_match_float64(target, rng, shared, norm):
    """With gradients that come in transposed and expanded."""
    backend, device = target
    given = make(rng, 6, 4, 24, inverse=True, shared=shared, residual=True, norm=norm)
    seeds = [oracle.normal(rng, 24, 6).T, oracle.normal(rng, 1, 24).expand(6, 24)][: 1 + norm]
    found = []
    for dtype, name, where in ((torch.float64, "reference", "cpu"), (torch.float32, backend, device)):
        leaves = {k: t.to(where, dtype).requires_grad_() for k, t in leaves_of(given).items()}
        result = moefuse.combine(**(given | leaves | {"inverse": given["inverse"].to(where)}), backend=name)
        outputs = result if norm else (result,)
        grads = [s.to(where, dtype) for s in seeds]
        found.append(torch.autograd.grad(outputs, list(leaves.values()), grads))
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, oracle.GRADIENT, whole=True)


@pytest.mark.parametrize("unused", ["out", "normed"])
def test_gradient_of_one_result(target, rng, unused):
    """A result that nobody used sends no gradient."""
    backend, device = target
    given = make(rng, 4, 2, 10, residual=True, norm=True)
    found = []
    for dtype, name, where in ((torch.float64, "reference", "cpu"), (torch.float32, backend, device)):
        leaves = {k: t.to(where, dtype).requires_grad_() for k, t in leaves_of(given).items()}
        out, normed = moefuse.combine(**(given | leaves), backend=name)
        used = normed if unused == "out" else out
        found.append(torch.autograd.grad(used.square().sum(), list(leaves.values()), allow_unused=True))
    for name, got, want in zip(leaves, found[1], found[0], strict=True):
        if name == "norm_weight" and unused == "normed":
            assert got is None or (got == 0).all()
        else:
            assert_close(got, want, oracle.GRADIENT, whole=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients(target, rng, dtype):
    backend, device = target
    given = make(rng, 6, 4, 24, dtype, shared="shared_logit", residual=True, norm=True)
    seeds = [oracle.normal(rng, 6, 24).to(dtype) for _ in range(2)]
    found = []
    for name, where, wide in (("reference", "cpu", True), (backend, device, False)):
        leaves = {k: (t.double() if wide else t.to(where)).requires_grad_() for k, t in leaves_of(given).items()}
        outputs = moefuse.combine(**(given | leaves), backend=name)
        grads = torch.autograd.grad(
            outputs, list(leaves.values()), [s.to(o) for s, o in zip(seeds, outputs, strict=True)]
        )
        found.append(dict(zip(leaves, grads, strict=True)))
    for name, got in found[1].items():
        assert got.dtype == given[name].dtype
        bound = ROUNDED[dtype].worst if name != "weights" else 1e-5
        assert_close(got, found[0][name], Tolerance(bound, bound, "rounded once"), whole=True)
