"""Text from a model: several prompts at once, long ones in pieces, and conversations that keep their cache."""

import pytest
import torch
from families import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from moefuse.hf import capture, patch, text
from moefuse.hf.capture import Step
from moefuse.hf.text import Generation, NotFinite, generate, joined


@pytest.fixture
def qwen3() -> PreTrainedModel:
    model = tiny_model("qwen3_moe").eval()
    patch(model)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def prompt(length: int) -> Tensor:
    return torch.randint(1, 97, (length,))


def ignore(_row: int, _text: str) -> None:
    pass


@pytest.fixture
def run_tokens(qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward was given."""
    seen: list[int] = []
    forward = qwen3.forward

    def counted(input_ids: Tensor, **options: object) -> object:
        seen.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(qwen3, "forward", counted)
    monkeypatch.setattr(Step, "_taped", Step._forward)  # which runs the model's forward each time
    return seen


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "phimoe"])
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(family: str) -> None:
    model = tiny_model(family).eval()
    patch(model)
    x, mask = torch.randint(1, 97, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    padded = mask.clone()
    padded[1, :5] = 0  # more than a piece
    done: list[int] = []
    with torch.no_grad():
        for given in (None, mask, padded):
            whole, step = (Step(model, 2, 16) for _ in range(2))
            step.piece, step.progress = 5 if given is not None else 4, done.append
            for _ in range(2):  # what is left of the last prompt must not show
                places = None if given is None else (given.cumsum(-1) - 1).clamp_min(0)
                want = model(input_ids=x, attention_mask=given, position_ids=places).logits[:, -1]
                for got in (whole.prefill(x, given), step.prefill(x, given)):
                    assert (got - want).norm() <= 1e-5 * want.norm()
                for token in x.T[:4]:
                    want, got = whole(token), step(token)
                    assert (got - want).norm() <= 1e-5 * want.norm()
    assert done == 2 * [4, 8, 11] + 4 * [5, 10, 11]


@pytest.mark.parametrize("captured", [True, False])
def test_several_prompts_write_what_each_writes_alone(
    qwen3: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, captured: bool
) -> None:
    prompts = [prompt(length) for length in (3, 9, 6)]
    free = [generate(qwen3, tokenizer, [p], 10, ignore) for p in prompts]
    # One ends where it wrote its fifth token for the first time, the others perhaps, perhaps not.
    qwen3.generation_config.eos_token_id = [int(free[1].tokens[0][9 + 4])]
    alone = [generate(qwen3, tokenizer, [p], 10, ignore) for p in prompts]
    if captured:
        capture(qwen3, 3, 19)
    shown: list[tuple[int, str]] = []
    done = generate(qwen3, tokenizer, prompts, 10, lambda row, said: shown.append((row, said)))
    for row, one in enumerate(alone):
        assert torch.equal(done.tokens[row], one.tokens[0])
        assert done.texts[row] == one.texts[0] == tokenizer.decode(one.tokens[0][len(prompts[row]) :])
    lengths = [len(one.tokens[0]) - len(p) for one, p in zip(alone, prompts, strict=True)]
    assert lengths[1] <= 5
    assert sorted(shown) == list(enumerate(done.texts))
    assert [lengths[row] for row, _ in shown] == sorted(lengths), "each is shown when it is done"
    assert done.prompt_tokens == 18
    assert done.decode_tokens == sum(lengths) - 3
    assert done.decode_rate == done.decode_tokens / done.decode_seconds


def test_one_prompt_is_shown_as_it_comes(qwen3: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    capture(qwen3, 1, 20)
    shown: list[str] = []
    done = generate(qwen3, tokenizer, [prompt(4)], 8, lambda _, said: shown.append(said))
    assert len([said for said in shown if said]) > 4
    assert "".join(shown) == done.texts[0] == tokenizer.decode(done.tokens[0][4:])


def test_the_first_token_is_shown_before_the_second_is_made(
    qwen3: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, run_tokens: list[int]
) -> None:
    capture(qwen3, 1, 20)
    made: list[int] = []
    done = generate(qwen3, tokenizer, [prompt(4)], 3, lambda *_: made.append(len(run_tokens)))
    assert made[:2] == [1, 2]
    assert run_tokens == [4, 1, 1], "nothing is run for nothing"
    assert done.decode_tokens == 2


def test_a_long_prompt_goes_in_by_pieces(
    qwen3: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, run_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE", 6)
    capture(qwen3, 1, 30)
    x, done = prompt(15), list[int]()
    want = generate(qwen3, tokenizer, [x], 4, ignore)
    del run_tokens[:]
    got = generate(qwen3, tokenizer, [x], 4, ignore, progress=done.append)
    assert torch.equal(got.tokens[0], want.tokens[0])
    assert done == [6, 12, 15]
    assert run_tokens == [6, 6, 3, 1, 1, 1]
    del run_tokens[:]
    generate(qwen3, tokenizer, [x], 1, ignore)
    assert run_tokens == [15], "without a bar, at once"


def test_a_conversation_runs_new_tokens_only(
    qwen3: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, run_tokens: list[int]
) -> None:
    x = prompt(7)
    capture(qwen3, 1, 60)

    def turn(tokens: Tensor) -> Generation:
        want = generate(qwen3, tokenizer, [tokens], 4, ignore, conversation=False)
        assert want.prompt_tokens == len(tokens)
        return want

    def kept(tokens: Tensor) -> Generation:
        del run_tokens[:]
        return generate(qwen3, tokenizer, [tokens], 4, ignore, conversation=True)

    first = kept(x)
    assert run_tokens == [7, 1, 1, 1]
    more = torch.cat((first.tokens[0], prompt(5)))
    second = kept(more)
    assert run_tokens == [6, 1, 1, 1], "the last answer's last token and five more"
    assert second.prompt_tokens == 6
    other = second.tokens[0].clone()
    other[9] = (other[9] + 1) % 97
    third = kept(torch.cat((other, prompt(2))))
    assert run_tokens == [len(other) + 2 - 9, 1, 1, 1], "it is run from where it differs"
    kept(third.tokens[0][:8])
    assert run_tokens == [1, 1, 1, 1], "the last token's logits are wanted"
    # All of it is what is written without a cache from before, which is forgotten then.
    for done, tokens in ((first, x), (second, more), (third, third.tokens[0][:-4])):
        assert torch.equal(turn(tokens).tokens[0], done.tokens[0])
    kept(more)
    assert run_tokens[0] == len(more)
    total = joined([first, second, third])
    assert total.prompt_tokens == 7 + 6 + third.prompt_tokens
    assert total.decode_tokens == 9
    assert total.first_token == first.first_token
    assert total.texts == [*first.texts, *second.texts, *third.texts]


def test_a_turn_that_fails_is_forgotten(
    qwen3: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, run_tokens: list[int]
) -> None:
    capture(qwen3, 1, 60)
    x = prompt(7)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    generate(qwen3, tokenizer, [x], 4, ignore, conversation=True)
    with pytest.raises(KeyboardInterrupt):
        generate(qwen3, tokenizer, [prompt(7)], 4, stop, conversation=True)
    del run_tokens[:]
    generate(qwen3, tokenizer, [x], 1, ignore, conversation=True)
    assert run_tokens == [7]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite(
    qwen3: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float, captured: bool, value: float
) -> None:
    with torch.no_grad():
        qwen3.model.layers[1].self_attn.o_proj.weight[3, 5] = value
    if captured:
        capture(qwen3, 2, 20)
    shown: list[str] = []
    with pytest.raises(NotFinite, match=r"it began in model.layers.1.self_attn"):
        generate(qwen3, tokenizer, [prompt(4), prompt(2)], 5, lambda _, said: shown.append(said), temperature)
    assert not any(shown)
