"""Routers that several families have: parts of their records."""

from engine.models.architectures.record import RouterRecord

GROUPED = RouterRecord(
    ("mlp.gate.weight",),
    scoring="sigmoid",
    normalise="norm_topk_prob",
    least_sum=1e-20,
    correction="mlp.gate.e_score_correction_bias",
    groups=True,
    scaled=True,
)
"""Routers as those of DeepSeek V3."""
