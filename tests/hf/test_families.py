"""Every family on the experts interface gives eager's logits, through the experts implementation and through patch."""

from pathlib import Path

import pytest
import torch
import transformers
from families import HEADER, families, table_row, tiny_model
from packaging.version import Version
from torch import Tensor, nn

import moefuse.hf
from moefuse.hf.experts import known_activation
from moefuse.hf.support import on_interface
from moefuse.testing.compare import difference

# Two float32 computations of the same network: 2 to 4 layers of sums a few hundred terms long.
TOLERANCE = 1e-5
#: what transformers 5.22.2 has; a later release may have more
KNOWN_FAMILIES, KNOWN_PATCHED = 62, 49
#: in old releases these models fail on their small configurations before we come in
LATER = {"glm_moe_dsa", "mistral4"} if Version(transformers.__version__) < Version("5.22") else set()
#: patch leaves these alone, each for its reason
REASONS = (
    "holds more than a router weight and biases per expert",
    "follows none of the known rules",
    "not the sum of experts and shared expert",
    "normed before they are summed",
    "one tensor like its input",
    "must hold one router weight",
)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model(input_ids=tokens)
    return out.logits if "logits" in out else out.last_hidden_state


def errors_of(family: str) -> tuple[float, float, moefuse.hf.PatchReport, str]:
    """The error of the experts implementation and of patch on a fresh model of this family, and its row in the docs."""
    model = tiny_model(family)
    tokens = torch.randint(0, 97, (2, 7))
    with torch.no_grad():
        model.set_experts_implementation("eager")
        want = logits_of(model, tokens).double()
        assert want.std() > 0.03, "logits next to nothing would hide every fault"
        model.set_experts_implementation("moefuse")
        ours = difference(logits_of(model, tokens), want).worst
        model.set_experts_implementation("eager")
        report = moefuse.hf.patch(model)
        patched = difference(logits_of(model, tokens), want).worst
        moefuse.hf.unpatch(model)
        assert model.config._experts_implementation == "eager"
        assert torch.equal(logits_of(model, tokens).double(), want), "unpatch restores"
    return ours, patched, report, table_row(family, model, report)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[moefuse.hf.PatchReport, str]]:
    """What `patch` reported of each family that passed, and its row in the docs."""
    return {}


@pytest.mark.parametrize("family", families())
def test_gives_eagers_logits(family: str, outcomes: dict[str, tuple[moefuse.hf.PatchReport, str]]) -> None:
    if family in LATER:
        pytest.skip("its small configuration is for later releases of transformers")
    ours, patched, report, row = errors_of(family)
    if max(ours, patched) > TOLERANCE:
        # A router may stand between two experts by less than float32 tells apart; then three other draws must not.
        again = [errors_of(family) for _ in range(3)]
        ours, patched = (max(draw[i] for draw in again) for i in range(2))
    assert ours < TOLERANCE
    assert patched < TOLERANCE
    for reason in report.left_alone.values():
        assert any(known in reason for known in REASONS), reason
    outcomes[family] = report, row


def test_none_fell_out(outcomes: dict[str, tuple[moefuse.hf.PatchReport, str]]) -> None:
    if len(outcomes) < len(families()):
        pytest.skip("counts the outcomes of the whole sweep")
    taken = sorted(family for family, (report, _) in outcomes.items() if report.patched)
    print(f"patch takes blocks of {len(taken)} of {len(outcomes)} families")
    assert len(outcomes) >= KNOWN_FAMILIES
    assert len(taken) >= KNOWN_PATCHED


def test_the_docs_have_this_table(outcomes: dict[str, tuple[moefuse.hf.PatchReport, str]]) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    if f"transformers {transformers.__version__}" not in docs:
        pytest.skip("the docs speak of another release")
    assert HEADER in docs
    for _, row in outcomes.values():
        assert row in docs, "print the table anew: python tests/hf/families.py"


KINDS = {"qwen3_moe": "gated", "nemotron_h": "ungated", "gpt_oss": "biased", "aria": "transposed"}


@pytest.mark.parametrize("patched", [False, True], ids=["experts", "patch"])
@pytest.mark.parametrize("family", KINDS, ids=KINDS.get)
def test_gives_eagers_gradients(family: str, patched: bool) -> None:
    if family not in families():
        pytest.skip("this release of transformers has not put it on the interface")
    model = tiny_model(family)
    tokens = torch.randint(0, 97, (2, 7))

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        logits = logits_of(model, tokens)
        (logits * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
        return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

    for attempt in range(3):  # as above: a near tie in a router, three times over, is a fault
        model.set_experts_implementation("eager")
        want = gradients()
        model.set_experts_implementation("moefuse")
        if patched:
            assert moefuse.hf.patch(model).patched
        got = gradients()
        moefuse.hf.unpatch(model)
        assert set(got) == set(want)
        worst = {name: difference(got[name], want[name].double(), whole=True).worst for name in want}
        if max(worst.values()) < 5 * TOLERANCE:
            break
        tokens = torch.randint(0, 97, (2, 7))
        assert attempt < 2, {name: error for name, error in worst.items() if error > 5 * TOLERANCE}


def test_every_gate_is_fused() -> None:
    ours = ("qwen3_moe", "gpt_oss", "openai_privacy_filter", "minimax_m3_vl", "deepseek_v4", "hy_v4", "beam")
    for family in set(ours) & set(families()):
        for _, module in on_interface(tiny_model(family)):
            assert known_activation(module) is not None, family
