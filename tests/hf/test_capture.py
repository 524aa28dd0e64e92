"""A decode step over memory that never moves: `generate` writes what it wrote, whatever it is asked for."""

import logging

import pytest
import torch
from families import tiny_model
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from moefuse.hf import capture, patch, uncapture
from moefuse.hf.cache import StepCache, StepLayer
from moefuse.hf.capture import Step

#: all layers attend with our op; windows and sinks; attention that runs itself; nothing patched at all
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral", "phimoe")
PLAIN = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param).eval()


@pytest.fixture
def qwen3() -> PreTrainedModel:
    return tiny_model("qwen3_moe").eval()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch of each step that ran."""
    seen: list[int] = []
    run = Step.__call__

    def counted(self: Step, tokens: Tensor) -> Tensor:
        seen.append(len(tokens))
        return run(self, tokens)

    monkeypatch.setattr(Step, "__call__", counted)
    return seen


def prompts(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(1, 97, (batch, length))


def test_the_text_is_that_of_the_stock_model(model: PreTrainedModel, steps: list[int]) -> None:
    x, mask = prompts(), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    want = model.generate(x, max_new_tokens=20, **PLAIN)
    padded = model.generate(x, attention_mask=mask, max_new_tokens=20, **PLAIN)
    patch(model)
    said = capture(model, 2, max_length=40)
    assert said.startswith("decode step prepared for batch 2, 40 places, in ")
    for _ in range(2):  # new requests after old ones
        assert torch.equal(model.generate(x, max_new_tokens=20, **PLAIN), want)
        assert torch.equal(model.generate(x, attention_mask=mask, max_new_tokens=20, **PLAIN), padded)
    assert len(steps) >= 4 * 19
    uncapture(model)
    assert "generate" not in vars(model)
    del steps[:]
    assert torch.equal(model.generate(x, max_new_tokens=20, **PLAIN), want)
    assert not steps


def test_logits_are_those_of_a_whole_pass_over_200_tokens(qwen3: PreTrainedModel) -> None:
    x, text = prompts(1, 5), prompts(1, 200)
    patch(qwen3)
    with torch.no_grad():
        step = Step(qwen3, 1, 205)
        got = [step.prefill(x, None)]
        got += [step(token).clone() for token in text[0, :-1, None]]
        want = qwen3(input_ids=torch.cat((x, text), 1)).logits[0, 4:-1]
    assert (torch.cat(got) - want).norm() <= 1e-5 * want.norm()


def test_it_is_taken_for_its_batch_sizes_and_left_for_others(qwen3: PreTrainedModel, steps: list[int]) -> None:
    patch(qwen3)
    capture(qwen3, (1, 3), max_length=20)
    for batch in (1, 2, 3):
        qwen3.generate(prompts(batch), max_new_tokens=4, **PLAIN)
    assert set(steps) == {1, 3}
    del steps[:]
    qwen3.generate(prompts(1), num_return_sequences=3, do_sample=True, max_new_tokens=4, pad_token_id=0)
    assert set(steps) == {3}


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"use_cache": False},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_it_does_not_do_runs_as_before(
    qwen3: PreTrainedModel, steps: list[int], options: dict[str, object]
) -> None:
    x = prompts(1)
    want = qwen3.generate(x, max_new_tokens=5, **PLAIN, **options)
    patch(qwen3)
    capture(qwen3, 1, max_length=20)
    got = qwen3.generate(x, max_new_tokens=5, **PLAIN, **options)
    if not isinstance(want, Tensor):
        got, want = got.sequences, want.sequences
    assert torch.equal(got, want)
    assert not steps


class _Forbid(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        scores[:, ::2] = -torch.inf
        return scores


class _AtLength(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:  # noqa: ARG002
        return torch.full((len(input_ids),), input_ids.shape[1] >= 11, device=input_ids.device)


def test_processors_criteria_streamers_and_scores(qwen3: PreTrainedModel) -> None:
    x = prompts(1)

    class Heard(TextStreamer):
        def __init__(self) -> None:
            self.tokens: list[Tensor] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.tokens.append(value)

        def end(self) -> None:
            self.ended = True

    results, heard = [], []
    for _ in range(2):
        heard.append(Heard())
        results.append(
            qwen3.generate(
                x,
                max_new_tokens=9,
                logits_processor=LogitsProcessorList([_Forbid()]),
                stopping_criteria=StoppingCriteriaList([_AtLength()]),
                streamer=heard[-1],
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
                **PLAIN,
            )
        )
        patch(qwen3)
        capture(qwen3, 1, max_length=20)
    want, got = results
    assert got.sequences.shape == (1, 11)
    assert torch.equal(got.sequences, want.sequences)
    assert (got.sequences[:, 7:] % 2 == 1).all()
    for name in ("scores", "logits"):
        assert len(got[name]) == len(want[name]) == 4
        for a, b in zip(got[name], want[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    flat = [torch.cat([t.flatten() for t in each.tokens]) for each in heard]
    assert torch.equal(*flat)
    assert all(each.ended for each in heard)


def test_a_seed_draws_the_same_tokens(qwen3: PreTrainedModel) -> None:
    x = prompts(2)
    options = {
        "max_new_tokens": 12,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "pad_token_id": 0,
    }
    torch.manual_seed(3)
    want = qwen3.generate(x, **options)
    patch(qwen3)
    capture(qwen3, 2, max_length=30)
    torch.manual_seed(3)
    assert torch.equal(qwen3.generate(x, **options), want)


def test_sequences_end_one_by_one(qwen3: PreTrainedModel) -> None:
    x = prompts(3)
    free = qwen3.generate(x, max_new_tokens=12, **PLAIN)
    end = [int(free[0, 9]), int(free[1, 12])]
    want = qwen3.generate(x, max_new_tokens=12, eos_token_id=end, **PLAIN)
    patch(qwen3)
    capture(qwen3, 3, max_length=30)
    assert torch.equal(qwen3.generate(x, max_new_tokens=12, eos_token_id=end, **PLAIN), want)


def test_what_does_not_fit_is_refused(qwen3: PreTrainedModel) -> None:
    capture(qwen3, 1, max_length=16)
    with pytest.raises(ValueError, match="the prompt must be shorter than the cache of 16 places, got 20 tokens"):
        qwen3.generate(prompts(1, 20), max_new_tokens=4, **PLAIN)
    with pytest.raises(ValueError, match="must fit into the cache of 16 places, got max_length 17"):
        qwen3.generate(prompts(1, 7), max_new_tokens=10, **PLAIN)
    assert qwen3.generate(prompts(1, 7), max_new_tokens=9, **PLAIN).shape == (1, 16)


def test_wrong_arguments() -> None:
    model = tiny_model("qwen3_moe")
    with pytest.raises(TypeError, match="must be a transformers model that generates, got Linear"):
        capture(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        capture(model, 0)
    with pytest.raises(TypeError, match="max_length must be an int, got str"):
        capture(model, 1, "long")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must keep keys and values, got linear_attention"):
        capture(tiny_model("qwen3_next"))
    assert not hasattr(model, "_moefuse_steps")


def test_other_inputs_say_why_they_run_uncaptured(qwen3: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    capture(qwen3, 1, max_length=16)
    with caplog.at_level(logging.INFO, "moefuse"):
        qwen3.generate(prompts(2), max_new_tokens=3, **PLAIN)
    assert "generate runs uncaptured: another batch size" in caplog.text


def test_a_second_prompt_goes_behind_the_first(qwen3: PreTrainedModel) -> None:
    """The cache itself, as a conversation uses it: tokens in pieces give what all of them give at once."""
    patch(qwen3)
    x = prompts(2, 12)
    cache = StepCache(2, 20, torch.device("cpu"))
    with torch.no_grad():
        want = qwen3(input_ids=x).logits
        for start, stop in ((0, 5), (5, 6), (6, 12)):
            places = torch.arange(start, stop).expand(2, -1)
            got = qwen3(input_ids=x[:, start:stop], position_ids=places, past_key_values=cache, use_cache=True).logits
            cache.length = stop
            assert (got - want[:, start:stop]).norm() <= 1e-5 * want[:, start:stop].norm()


def test_a_tape_gives_the_bits_of_the_model_itself(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(model)
    capture(model, 2, max_length=40)
    step = model._moefuse_steps[2]
    x, tokens = prompts(), [torch.randint(1, 97, (2,)) for _ in range(8)]
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0

    def logits(given: Tensor | None) -> list[Tensor]:
        with torch.no_grad():
            step.prefill(x, given)
            return [step(one).clone() for one in tokens]

    got = [logits(None), logits(mask), logits(None)]
    if step.tapes:
        assert step.proven
    else:
        assert type(model).__name__ not in ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM")
    monkeypatch.setattr(Step, "_taped", Step._forward)
    for found, given in zip(got, (None, mask, None), strict=True):
        for a, b in zip(found, logits(given), strict=True):
            assert torch.equal(a, b)


def test_a_tape_is_made_anew_for_other_threads(qwen3: PreTrainedModel) -> None:
    patch(qwen3)
    capture(qwen3, 1, max_length=20)
    step = qwen3._moefuse_steps[1]
    threads = torch.get_num_threads()
    with torch.no_grad():
        step.prefill(prompts(1), None)
        for _ in range(3):
            step(torch.tensor([3]))
        first = step.tape
        try:
            torch.set_num_threads(threads + 1)
            step(torch.tensor([3]))
        finally:
            torch.set_num_threads(threads)
    assert step.tape is not first
    assert step.tape.threads == threads + 1


def test_a_step_that_looks_at_numbers_is_run_as_it_is(qwen3: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    x = prompts(1)
    want = qwen3.generate(x, max_new_tokens=8, **PLAIN)
    norm = qwen3.model.norm
    forward = norm.forward
    norm.forward = lambda rows: forward(rows) if float(rows.abs().max()) >= 0 else rows
    capture(qwen3, 1, max_length=20)
    with caplog.at_level(logging.INFO, "moefuse"):
        assert torch.equal(qwen3.generate(x, max_new_tokens=8, **PLAIN), want)
    assert "decode steps are not taken down: it looks at numbers" in caplog.text


def test_a_tape_without_a_write_to_the_cache_is_dropped(
    qwen3: PreTrainedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = prompts(1)
    want = qwen3.generate(x, max_new_tokens=8, **PLAIN)
    update = StepLayer.update

    def unseen(layer: StepLayer, *states: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        with torch._C.DisableTorchFunction():
            return update(layer, *states, **options)

    monkeypatch.setattr(StepLayer, "update", unseen)
    capture(qwen3, 1, max_length=20)
    with caplog.at_level(logging.INFO, "moefuse"):
        assert torch.equal(qwen3.generate(x, max_new_tokens=8, **PLAIN), want)
    assert "run again, one gave other numbers" in caplog.text


def test_a_step_that_is_not_the_same_again_is_run_as_it_is(
    qwen3: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A number of Python's changes from step to step, and no tape can know."""
    x = prompts(1)
    norm, count = qwen3.model.norm, list[int]()
    forward = norm.forward

    def changing(rows: Tensor) -> Tensor:
        count.append(1)
        return forward(rows) * float(len(count))

    norm.forward = changing
    capture(qwen3, 1, max_length=20)
    with caplog.at_level(logging.INFO, "moefuse"):
        qwen3.generate(x, max_new_tokens=8, **PLAIN)
    assert "run again, one gave other numbers" in caplog.text
    assert qwen3._moefuse_steps[1].tape is None
    assert len(count) == 8, "each step ran the model"
