"""The kernel that arranges blocks gives what torch gives, byte for byte."""

import pytest
import torch

from moefuse.quant.arrange import FIELDS, FILE, INTERLEAVED, PLANES, can_interleave, rearranged
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor

triton = pytest.importorskip("triton")

from moefuse.backends.triton.planes import arrange  # noqa: E402
from moefuse.backends.triton.runtime.launch import INTERPRETED  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("order", [FILE, INTERLEAVED])
@pytest.mark.parametrize("name", FIELDS)
def test_blocks_come_into_planes(name: str, order: str) -> None:
    if order == INTERLEAVED and not can_interleave(name, 32):
        pytest.skip("it is read by rows")
    for E, N, count in ((2, 32, 3), (3, 64, 1), (1, 5, 2) if order == FILE else (1, 32, 2)):
        source = torch.randint(0, 256, (E, N, count * FORMATS[name].nbytes), dtype=torch.uint8, device=DEVICE)
        made = torch.full_like(source, 7)
        target = QuantTensor(made, name, arrangement=PLANES)
        assert arrange(target, QuantTensor(source, name, arrangement=order))
        assert torch.equal(made, rearranged(source, name, order, PLANES))
