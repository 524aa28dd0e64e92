"""A whole model inside moefuse.invariant: the same logits' bits alone, in a batch, padded, in pieces and in steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefuse
import moefuse.hf
from moefuse.hf import attention

BOX = Path(moefuse.__file__).parent / "box" / "box.gguf"
HELD_OUT = Path(__file__).parents[2] / "examples" / "held_out.txt"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def boxed(request: pytest.FixtureRequest) -> tuple[Any, Tensor]:
    """The model in the box, and sixteen sequences of its text."""
    model, tokenizer = moefuse.hf.from_gguf(BOX, dtype=request.param, progress=False)
    moefuse.hf.patch(model)
    tokens = tokenizer(HELD_OUT.read_text()[:4000], return_tensors="pt").input_ids[0]
    return model, torch.stack([tokens[37 * i : 37 * i + 24] for i in range(16)])


@pytest.fixture
def inside() -> Iterator[None]:
    with moefuse.invariant(), torch.no_grad():
        yield


@pytest.mark.usefixtures("inside")
def test_logits_alone_and_in_a_batch_of_sixteen(boxed: tuple[Any, Tensor]) -> None:
    model, rows = boxed
    whole = model(rows).logits
    for i, row in enumerate(rows):
        assert torch.equal(model(row[None]).logits[0], whole[i]), i
    shuffled = torch.randperm(16)
    assert torch.equal(model(rows[shuffled]).logits, whole[shuffled])


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_shows_in_no_bit(boxed: tuple[Any, Tensor], side: str) -> None:
    model, rows = boxed
    lengths, L = [5 + i for i in range(16)], 22
    tokens, mask = torch.zeros(16, L, dtype=torch.long), torch.zeros(16, L, dtype=torch.long)
    places = [slice(L - n, L) if side == "left" else slice(0, n) for n in lengths]
    for i, (n, place) in enumerate(zip(lengths, places, strict=True)):
        tokens[i, place], mask[i, place] = rows[i, :n], 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = model(tokens, attention_mask=mask, position_ids=positions).logits
    for i, (n, place) in enumerate(zip(lengths, places, strict=True)):
        assert torch.equal(model(rows[i : i + 1, :n]).logits[0], padded[i, place]), n


@pytest.mark.usefixtures("inside")
def test_a_prompt_its_pieces_and_steps_agree(boxed: tuple[Any, Tensor]) -> None:
    model, rows = boxed
    whole = model(rows).logits
    cache, parts = None, []
    for start, stop in ((0, 9), (9, 10), (10, 20), (20, 21), (21, 22), (22, 23), (23, 24)):
        out = model(rows[:, start:stop], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.usefixtures("inside")
def test_threads_show_in_no_bit(boxed: tuple[Any, Tensor]) -> None:
    model, rows = boxed
    whole, before = model(rows).logits, torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(model(rows).logits, whole)
    finally:
        torch.set_num_threads(before)


def test_a_captured_step_is_that_of_the_mode(boxed: tuple[Any, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated alone or together, captured or not: the same logits. What was taped outside is not run inside."""
    model, rows = boxed
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "output_logits": True, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True}

    def logits(tokens: Tensor) -> Tensor:
        return torch.stack(model.generate(tokens, attention_mask=torch.ones_like(tokens), **options).logits, 1)

    with moefuse.invariant():
        want = logits(rows[:4])
    moefuse.hf.capture(model, batch=(1, 4), max_length=64)
    try:
        step = model._moefuse_steps[4]
        logits(rows[:4])
        taped = step.tape
        assert taped is not None
        assert not step.invariant
        with moefuse.invariant():
            assert torch.equal(logits(rows[:4]), want)
            assert torch.equal(logits(rows[2:3])[0], want[2])
            assert step.invariant
            assert step.tape is not taped
        monkeypatch.setattr(step, "logits", want)  # stands for a graph, which cannot be taken down anew
        assert "inside invariant()" in moefuse.hf.capture.__globals__["_why_uncaptured"](model, step, rows)
    finally:
        moefuse.hf.uncapture(model)


def test_masks_that_only_hide_are_understood() -> None:
    causal = torch.ones(5, 5).tril().bool()
    low = torch.finfo(torch.float32).min
    assert torch.equal(attention._seen(None, 5, 5, None)[0], causal)
    assert torch.equal(attention._seen(None, 2, 5, 3)[0], torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]).bool())
    assert torch.equal(attention._seen(causal[None, None], 5, 5, None)[0], causal)
    assert torch.equal(attention._seen(torch.where(causal, 0, low)[None, None], 5, 5, None)[0], causal)
    padding = torch.tensor([[0, 1, 1, 1, 1]])
    assert torch.equal(attention._seen(padding, 5, 5, None)[0], causal & padding.bool())
    assert attention._seen(torch.rand(1, 1, 5, 5), 5, 5, None) is None
    assert attention._seen(torch.zeros(1, 4, 5, 5), 5, 5, None) is None


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_sliding_window_and_plain_weights(implementation: str) -> None:
    """A model of numbers: its products of 64 rows and more would be torch's outside."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 32, "vocab_size": 99}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, use_sliding_window=True, sliding_window=7, max_window_layers=0)
    config._attn_implementation = implementation
    model = Qwen3MoeForCausalLM(config).eval()
    report = moefuse.hf.patch(model)
    assert len(report.layers) == 2
    model.lm_head = torch.nn.Identity()  # torch's own product, which docs/determinism.md speaks of
    tokens = torch.randint(99, (6, 20))
    whole = model(tokens).logits
    for i in range(6):
        assert torch.equal(model(tokens[i : i + 1, : 20 - i]).logits[0], whole[i, : 20 - i])


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen2_moe", "olmoe", "qwen3_moe"])
def test_families_whose_layers_are_all_ours(family: str) -> None:
    """Up to the last norm, padded on the left; and near to what the same model gives outside."""
    model: Any = tiny_model(family).eval()
    moefuse.hf.patch(model)
    tokens, mask = torch.randint(97, (5, 17)), torch.ones(5, 17, dtype=torch.long)
    mask[0, :6] = mask[1, :3] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)

    def hidden(tokens: Tensor, **options: Tensor) -> Tensor:
        return model.model(tokens, **options).last_hidden_state

    with torch.no_grad():
        plain = hidden(tokens, attention_mask=mask, position_ids=places)
        with moefuse.invariant():
            whole = hidden(tokens, attention_mask=mask, position_ids=places)
            for i, length in enumerate(mask.sum(-1).tolist()):
                assert torch.equal(hidden(tokens[i : i + 1, 17 - length :])[0], whole[i, 17 - length :]), i
    seen = mask.bool()
    assert (whole - plain)[seen].abs().max() < 5e-6 * plain[seen].abs().max()
