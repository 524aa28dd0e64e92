"""One rank of test_parallel.py: logits of a saved model in each way of splitting it, written by rank 0."""

import sys
from pathlib import Path

import torch
import torch.distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations.moe import ExpertsInterface

import moefuse.hf
from moefuse.hf.experts import experts_forward
from moefuse.hf.register import register

MASKED = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
MODES = {
    "tensor": DistributedConfig(tp_size=2),
    "masked": DistributedConfig(tp_size=2, ep_size=2, ep_plan=MASKED),
    "dispatched": DistributedConfig(tp_size=2, ep_size=2),
}


def main(folder: Path, *modes: str) -> None:
    torch.set_num_threads(1)
    tokens = torch.load(folder / "tokens.pt")
    for mode in modes:
        model = AutoModelForCausalLM.from_pretrained(
            folder, experts_implementation="moefuse", distributed_config=MODES[mode]
        ).eval()
        calls: list[tuple[int, ...]] = []

        def watched(module, hidden_states, ids, weights, calls=calls):
            calls.append((*ids.shape, int(ids.max()), *module.down_proj.shape))
            return experts_forward(module, hidden_states, ids, weights)

        ExpertsInterface.register("moefuse", watched)
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
            report = moefuse.hf.patch(model)
            patched = model(input_ids=tokens).logits
        register()
        rank = torch.distributed.get_rank()
        torch.save(
            {"logits": logits, "patched": patched, "calls": calls, "report": str(report)}, folder / f"{mode}.{rank}.pt"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
