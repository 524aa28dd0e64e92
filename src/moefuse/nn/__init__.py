"""Modules. Parameters live here and only here."""

from moefuse.nn.lora import ExpertsLoRA, add_lora, merge_lora
from moefuse.nn.moe import MoE
from moefuse.nn.placement import Placement
from moefuse.nn.quantized import QuantEmbedding, QuantLinear
from moefuse.nn.routing_tape import RoutingTape
from moefuse.nn.stats import RoutingStats
from moefuse.nn.training import (
    RouterTraining,
    auxiliary_loss,
    load_balancing_loss,
    router_z_loss,
    update_selection_bias,
)

__all__ = [
    "ExpertsLoRA",
    "MoE",
    "Placement",
    "QuantEmbedding",
    "QuantLinear",
    "RouterTraining",
    "RoutingStats",
    "RoutingTape",
    "add_lora",
    "auxiliary_loss",
    "load_balancing_loss",
    "merge_lora",
    "router_z_loss",
    "update_selection_bias",
]
