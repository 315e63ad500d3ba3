"""All groups of rows, in the order of the page."""

from __future__ import annotations

from benchmarks.papers.beam_rows import beam_rows
from benchmarks.papers.beyond_rows import beyond_rows
from benchmarks.papers.cluster_rows import cluster_rows
from benchmarks.papers.expert_rows import expert_rows
from benchmarks.papers.findings import Group
from benchmarks.papers.near_executed import block_rows
from benchmarks.papers.near_rows import near_rows
from benchmarks.papers.sparsity_rows import sparsity_rows
from benchmarks.papers.timed_rows import timed_rows
from benchmarks.papers.twiddler_rows import twiddler_rows

GROUPS: tuple[Group, ...] = (
    Group(
        "cluster-model",
        "Private LLMs on Apple Silicon",
        "Equation (1): tables 1, 2, 5 and 6, figure 8",
        cluster_rows,
    ),
    Group(
        "timed-ring",
        "Private LLMs on Apple Silicon",
        "The ring, timed: tables 3 and 4, footnotes 3 and 4, the other figures",
        timed_rows,
        quiet=True,
    ),
    Group("near-data", "MoNDE", "The near-data device: all tables and figures, simulated", near_rows),
    Group("near-executed", "MoNDE", "Its workflows on its models' blocks, executed", block_rows),
    Group("twiddler", "Twiddler", "Figures 4 to 8, simulated with the paper's constraints", twiddler_rows),
    Group("expert", "Twiddler", "Figure 7: one expert on the CPU, executed", expert_rows, quiet=True),
    Group("sparsity", "Twiddler", "Appendix B: values near zero", sparsity_rows),
    Group("beams", "Twiddler", "Beams: figure 6, executed", beam_rows, quiet=True),
    Group("beyond", "Beyond the papers", "Beyond the papers, measured", beyond_rows, quiet=True),
)
