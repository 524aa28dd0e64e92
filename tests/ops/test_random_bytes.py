"""Products with blocks of random bytes, whose scales may be infinite or no number, in every arrangement."""

import pytest
import torch

import moefuse
from moefuse.quant.arrange import FILE, INTERLEAVED, PLANES
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor
from moefuse.testing.cases import formats_of, runnable
from moefuse.testing.poison import poisoned

from . import oracle

#: of a row's length times x's: activations in 8 bits are half a step of 127 off each, in FP8 a sixteenth
EXACT, ROUNDED = 1e-5, 1e-2


def _scales(rng, shape):
    made = torch.rand(shape, generator=rng)
    made[made < 0.04], made[made > 0.96] = torch.inf, torch.nan
    return made


@pytest.mark.parametrize("target", runnable(emulated=True), ids=lambda target: target[0])
@pytest.mark.parametrize("arrangement", [FILE, PLANES, INTERLEAVED])
@pytest.mark.parametrize("rows", [1, 6, 20])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_no_number_stays_where_it_is(target, rng, format, exact, rows, arrangement):
    """Nothing that is a number is lost, nothing else becomes one, and numbers are the reference's."""
    backend, device = target
    if format not in formats_of(backend):
        pytest.skip(f"{backend} leaves it to the reference")
    if arrangement == INTERLEAVED and format == "FP8":
        pytest.skip("there is no such arrangement")
    if backend == "triton" and (arrangement != PLANES or rows == 6):
        pytest.skip("it moves them into planes first, and has no path of its own for so few")
    E, N, K = 2, 64, 512
    bytes_of_row = FORMATS[format].row_bytes(K)
    blocks = torch.randint(256, (E, N, bytes_of_row), generator=rng, dtype=torch.uint8)
    stack = QuantTensor(blocks, format, exact=exact)
    if format == "FP8":  # its scales are float32 of any size: some, and few codes that are no numbers
        blocks.view(E, N, -1, 132)[..., :4].view(torch.float32).copy_(_scales(rng, (E, N, K // 128, 1)))
        codes = blocks.view(E, N, -1, 132)[..., 4:]
        codes[(codes & 0x7F == 0x7F) & (torch.rand(codes.shape, generator=rng) < 0.9)] ^= 1
    numbers = stack.dequantize(torch.float64)
    x = oracle.normal(rng, rows * E, K)
    plan = moefuse.plan(torch.arange(rows * E, device=device)[:, None] % E, E, backend=backend)
    with poisoned():
        got = moefuse.grouped_linear(
            x.to(device), stack.to(device).arranged(arrangement), plan, gather=True, scatter=True, backend=backend
        )
    got = got.cpu().double().view(rows, E, N)
    want = torch.einsum("rek,enk->ren", x.double().view(rows, E, K), numbers)
    length = x.double().view(rows, E, 1, K).norm(dim=3) * numbers.norm(dim=2)
    sure = length < 1e36  # a sum in float32 may pass its limit on the way
    lost = ~numbers.isfinite().all(2).expand(want.shape)
    if format != "MXFP4":  # its scales are numbers; some pass float32's limit with their codes alone
        assert lost.any()
        assert not got[lost].isfinite().any()
    sure &= ~lost
    assert sure.any()
    error = (got - want)[sure].abs() / length[sure].clamp(min=1e-30)
    assert error.max() < (EXACT if exact else ROUNDED)
