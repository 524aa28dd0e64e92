"""Linear layers and embeddings on blocks: against float64 on the decoded numbers, and as modules among others."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import moefuse.nn.quantized
from moefuse import QuantTensor, quantize
from moefuse.nn import QuantEmbedding, QuantLinear
from moefuse.nn.quantized import interleave_, specs_in_bytes
from moefuse.quant import arrange
from moefuse.quant.arrange import PLANES
from moefuse.quant.formats import FORMATS
from moefuse.testing.compare import difference
from moefuse.testing.random_blocks import random_blocks

N, K = 40, 512

Moves = tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], nn.Module]]


def blocks(name: str, rng: torch.Generator, rows: int = N) -> QuantTensor:
    return random_blocks(name, (rows, K), rng, K**-0.5)


@pytest.mark.parametrize("name", FORMATS)
def test_linear_in_every_format(name: str, rng: torch.Generator) -> None:
    weight, bias = blocks(name, rng), torch.randn(N, generator=rng)
    layer, numbers = QuantLinear(weight.exactly(), bias), weight.dequantize(torch.float64)
    wide = torch.randn(3, K, 2, generator=rng)
    for x in (torch.randn(2, 3, K, generator=rng), torch.randn(K, generator=rng), wide.transpose(1, 2), wide[:0, :, 0]):
        x = x.requires_grad_()
        out = layer(x)
        assert difference(out, x.double() @ numbers.T + bias.double()).worst < 1e-5
        grad = torch.randn(out.shape, generator=rng)
        (got,) = torch.autograd.grad(out, x, grad)
        assert difference(got, grad.double() @ numbers, whole=True).worst < 1e-5
    x = torch.randn(4, K, generator=rng)
    assert difference(QuantLinear(weight)(x), x.double() @ numbers.T, whole=True).rms < 0.02


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_in_every_format(name: str, rng: torch.Generator) -> None:
    weight = blocks(name, rng)
    words = torch.tensor([[3, 0, N - 1], [7, 7, 1]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = QuantEmbedding(weight, dtype=dtype)(words)
        assert torch.equal(rows, weight.dequantize(dtype)[words])
        assert rows.dtype == dtype
    assert QuantEmbedding(weight)(words[:, :0]).shape == (2, 0, K)


def test_an_embedding_decodes_many_rows(rng: torch.Generator) -> None:
    weight = blocks("Q6_K", rng)
    words = torch.randint(0, N, (3, 1000), generator=rng)
    assert torch.equal(QuantEmbedding(weight)(words), weight.dequantize()[words])


def test_state_goes_there_and_back(rng: torch.Generator) -> None:
    first, second = (
        nn.Sequential(QuantEmbedding(blocks("Q8_0", rng)), QuantLinear(blocks("Q4_0", rng).exactly(), torch.ones(N)))
        for _ in range(2)
    )
    words = torch.tensor([1, 5])
    assert not torch.equal(first(words), second(words))
    state = first.state_dict()
    assert set(state) == {"0.blocks", "0.specs", "1.blocks", "1.specs", "1.bias"}
    assert state["0.blocks"].dtype == state["1.blocks"].dtype == torch.uint8
    second.load_state_dict(state)
    assert torch.equal(first(words), second(words))
    with pytest.raises(ValueError, match=r"QuantLinear: .* 1\.specs {'blocks': 'Q4_0:exact'}, got .*IQ4_NL"):
        second.load_state_dict(state | {"1.specs": specs_in_bytes({"blocks": "IQ4_NL"})})  # as wide
    del state["1.specs"]
    with pytest.raises(ValueError, match=r"QuantLinear: .* 1\.specs {'blocks': 'Q4_0:exact'}, got {}"):
        second.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*1.blocks"):
        second.load_state_dict({"1.weight": torch.ones(N, K)})
    assert not second.load_state_dict({"1.bias": torch.zeros(N)}, strict=False).unexpected_keys


def test_moving_leaves_the_bytes_alone(rng: torch.Generator) -> None:
    weight = blocks("Q6_K", rng)
    layer, words = QuantLinear(weight, torch.ones(N)), QuantEmbedding(weight, dtype=torch.bfloat16)
    model = nn.ModuleList((words, layer))
    assert layer.weight.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype)
        assert layer.weight.dtype == words.weight.dtype == layer.bias.dtype == dtype
        assert torch.equal(layer.blocks, weight.blocks)
        assert layer(words(torch.tensor([1]))).dtype == dtype
    assert (layer.weight.shape, layer.weight.device) == ((N, K), torch.device("cpu"))
    model.to("meta")
    assert layer.weight.device == words.weight.device == torch.device("meta")
    assert layer.blocks.dtype == torch.uint8


def test_tied_modules_share_their_blocks(rng: torch.Generator) -> None:
    words = QuantEmbedding(blocks("Q4_K", rng))
    model = nn.ModuleList((words, QuantLinear(words.weight)))

    def shared(model: nn.ModuleList) -> bool:
        first, second = model
        return first.blocks is second.blocks

    assert shared(model)
    # As moving to another device does: the bytes come to lie elsewhere.
    before = words.blocks.data_ptr()
    model._apply(lambda t: t if t.data_ptr() != before or t.numel() == 0 else t.clone())
    assert shared(model)
    assert words.blocks.data_ptr() != before
    assert shared(model.half())
    assert shared(copy.deepcopy(model))
    assert shared(pickle.loads(pickle.dumps(model)))


def test_other_blocks_are_seen_at_once(rng: torch.Generator) -> None:
    first, second = (QuantLinear(blocks("Q4_K", rng)) for _ in range(2))
    x = torch.randn(1, K)
    before = first(x)
    assert first.weight is first.weight
    first.load_state_dict(second.state_dict(), assign=True)
    assert torch.equal(first(x), second(x))
    assert not torch.equal(first(x), before)
    first.blocks = blocks("Q4_K", rng).blocks
    assert not torch.equal(first(x), second(x))


def test_autocast_decides_the_type(rng: torch.Generator) -> None:
    layer, x = QuantLinear(blocks("Q8_0", rng), torch.ones(N)), torch.randn(3, K)
    assert layer(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert layer.double()(x.double()).dtype == torch.float64


def test_back_to_numbers(rng: torch.Generator) -> None:
    weight, bias = blocks("Q5_K", rng), nn.Parameter(torch.randn(N))
    linear = QuantLinear(weight, bias, dtype=torch.bfloat16).eval().dequantized()
    assert type(linear) is nn.Linear
    assert linear.bias is bias
    assert not linear.training
    assert torch.equal(linear.weight, weight.dequantize(torch.bfloat16))
    words = QuantEmbedding(weight, padding_idx=3).dequantized()
    assert (type(words), words.padding_idx) == (nn.Embedding, 3)
    assert torch.equal(words.weight, weight.dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["", PLANES])
def test_compiles_whole(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    monkeypatch.setattr(arrange, "WANTED", {"cpu": order})
    model = nn.Sequential(
        QuantEmbedding(blocks("Q4_K", rng)),
        QuantLinear(blocks("Q6_K", rng, K).exactly()),
        QuantLinear(blocks("Q8_0", rng)),
    )
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (1, 5, 9):
        words = torch.randint(0, N, (2, count))
        assert difference(compiled(words), model(words).double()).worst < 1e-5


def test_bad_input_is_refused(rng: torch.Generator) -> None:
    weight = blocks("Q8_0", rng)
    layer = QuantLinear(weight)
    assert repr(layer) == f"QuantLinear(in_features={K}, out_features={N}, bias=False, Q8_0)"
    assert repr(QuantEmbedding(weight.exactly())) == f"QuantEmbedding({N}, {K}, Q8_0:exact)"
    with pytest.raises(ValueError, match=r"x must be \[.., 512\], got shape \[3, 4\]"):
        layer(torch.ones(3, 4))
    with pytest.raises(TypeError, match="QuantLinear: weight must be a QuantTensor, got Tensor"):
        QuantLinear(torch.ones(N, K))
    with pytest.raises(ValueError, match=r"QuantEmbedding: weight must be \[N, K\], got shape \[1, 40, 512\]"):
        QuantEmbedding(QuantTensor(weight.blocks[None], "Q8_0"))
    with pytest.raises(ValueError, match="QuantLinear: bias must be"):
        QuantLinear(weight, torch.ones(3))
    with pytest.raises(TypeError, match=r"dtype must be a floating-point type, got torch\.int8"):
        QuantEmbedding(weight, dtype=torch.int8)
    for words in (torch.tensor([N]), torch.tensor([-1])):
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            QuantEmbedding(weight)(words)


def tied(rng: torch.Generator) -> nn.ModuleList:
    weight = blocks("Q6_K:exact", rng)
    return nn.ModuleList((QuantEmbedding(weight), QuantLinear(weight, torch.ones(N))))


def results(model: nn.ModuleList) -> tuple[torch.Tensor, torch.Tensor]:
    words, layer = model
    rows = words(torch.tensor([[1, 39, 1]]))
    return rows, layer(rows)


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_moving_arranges_shared_blocks_once(
    rng: torch.Generator, moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_gpu, to_cpu = moves
    model = tied(rng)
    words, layer = model
    want, before = results(model), layer.blocks.clone()
    source = layer.blocks.data_ptr()
    times = []
    arranged = moefuse.nn.quantized.arrange_
    monkeypatch.setattr("moefuse.nn.quantized.arrange_", lambda *given: (times.append(given[1]), arranged(*given))[1])
    to_gpu(model)
    assert times == [PLANES]
    assert words.blocks is layer.blocks
    assert words.spec == layer.spec == "Q6_K:planes:exact"
    assert torch.equal(layer.blocks, QuantTensor(before, "Q6_K").arranged(PLANES).blocks)
    assert layer.blocks.data_ptr() != source
    assert same(results(model), want)
    assert repr(words) == f"QuantEmbedding({N}, {K}, Q6_K:planes:exact)"
    assert layer.weight is layer.weight
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(results(copied), want)
    to_gpu(model.half().float())
    assert same(results(model), want)
    to_cpu(model)
    assert times == [PLANES, ""]
    assert torch.equal(words.blocks, before)
    assert words.spec == layer.spec == "Q6_K:exact"


@pytest.mark.parametrize("first", [0, 1])
def test_moving_one_of_two_that_share(rng: torch.Generator, moves: Moves, first: int) -> None:
    to_gpu, to_cpu = moves
    model = tied(rng)
    want = results(model)
    for move in (to_gpu, to_cpu, to_gpu):
        move(model[first])
        assert same(results(copy.deepcopy(model)), want)
        assert same(results(model), want)
    model[1 - first].load_state_dict(model[first].state_dict(), strict=False)
    assert same(results(model), want)
    to_cpu(model[1 - first])
    assert same(results(model), want)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("there", [0, 1])
@pytest.mark.parametrize("here", [0, 1])
def test_a_state_is_in_the_file_order(rng: torch.Generator, moves: Moves, here: int, there: int, assign: bool) -> None:
    first, second = tied(rng), tied(rng)
    want, plain = results(first), copy.deepcopy(first.state_dict())
    state = moves[here](first).state_dict()
    assert state.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(state[name], value), name
    moves[there](second).load_state_dict(state, assign=assign)
    assert same(results(second), want)
    assert same(results(first), want)
    assert torch.equal(state["0.blocks"], plain["0.blocks"]), "what was given stays as it was"
    third = moves[there](tied(rng))
    with pytest.raises(RuntimeError, match="size mismatch"):
        third.load_state_dict(state | {"1.blocks": state["1.blocks"][1:]})
    assert same(results(third), want)


def test_bytes_that_somebody_else_moved_are_still_known(rng: torch.Generator, moves: Moves) -> None:
    """As accelerate's hooks move them: by putting another tensor into the module's buffers."""
    to_gpu, to_cpu = moves
    model = tied(rng)
    _, layer = model
    want = results(model)
    layer._buffers["blocks"] = theirs = layer.blocks.clone().share_memory_()
    assert layer.spec == layer.spec == "Q6_K:exact"
    assert same(results(model), want)
    memory, before = theirs.detach(), theirs.clone()
    to_gpu(layer)
    assert same(results(model), want)
    assert torch.equal(memory, before), "what did not move may be somebody else's"
    model = to_gpu(tied(rng))
    _, layer = model
    want = results(model)
    layer._buffers["blocks"] = layer.blocks.clone()
    assert layer.spec == layer.spec == "Q6_K:planes:exact"
    assert same(results(model), want)
    to_cpu(layer)
    assert layer.spec == "Q6_K:exact"
    assert same(results(model), want)


def test_by_way_of_meta(rng: torch.Generator, moves: Moves) -> None:
    to_gpu, _ = moves
    model = to_gpu(tied(rng))
    want, state = results(model), model.state_dict()
    model.to("meta")
    assert {module.spec for module in model} == {"Q6_K:exact"}
    to_gpu(model.to_empty(device="cpu")).load_state_dict(state)
    assert same(results(model), want)
    empty = tied(rng).to("meta")
    empty.load_state_dict(state, assign=True)
    assert same(results(empty._apply(lambda t: torch.empty(0) if t.is_meta else t)), want)


def test_blocks_that_lie_where_another_order_is_wanted(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = blocks("Q4_K:exact", rng)
    x = torch.randn(2, K)
    want, before = QuantLinear(weight)(x), weight.blocks.clone()
    assert torch.equal(QuantLinear(weight.arranged(PLANES))(x), want)
    assert QuantLinear(weight.arranged(PLANES)).spec == "Q4_K:exact"
    monkeypatch.setattr(arrange, "WANTED", {"cpu": PLANES})
    layer = QuantLinear(weight)
    assert layer.spec == "Q4_K:planes:exact"
    assert torch.equal(layer(x), want)
    assert torch.equal(weight.blocks, before)
    made = quantize(weight.dequantize(), "Q4_K")
    assert made.arrangement == PLANES
    monkeypatch.undo()
    assert torch.equal(quantize(weight.dequantize(), "Q4_K").blocks, made.arranged("").blocks)


def test_interleaved_blocks_stay_so_on_a_cpu(rng: torch.Generator, moves: Moves) -> None:
    """Shared ones once; the same bits; states hold the file's order and load into either."""
    to_gpu, to_cpu = moves
    weight = random_blocks("Q6_K", (64, K), rng, 0.1)
    model = nn.ModuleList((QuantEmbedding(weight), QuantLinear(weight), QuantLinear(blocks("Q6_K", rng))))
    alone = QuantEmbedding(random_blocks("Q6_K", (64, K), rng, 0.1))
    model.append(alone)
    words, x = torch.tensor([[1, 39, 63]]), torch.randn(5, K)
    want = [model[0](words), model[1](x), model[2](x), model[3](words)]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    interleave_(model)
    assert model[0].blocks is model[1].blocks
    assert [layer.spec for layer in model] == ["Q6_K:interleaved", "Q6_K:interleaved", "Q6_K", "Q6_K"]

    def check(model: nn.ModuleList) -> None:
        got = [model[0](words), model[1](x), model[2](x), model[3](words)]
        assert same(got, want)

    check(model)
    check(copy.deepcopy(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    model[1].blocks.zero_()
    model.load_state_dict(state)
    check(model)
    to_gpu(model)
    assert model[1].spec == "Q6_K:planes"
    to_cpu(model)
    assert model[1].spec == "Q6_K"
    check(model)
