"""Figures, models and thoughts in words, for every front end of the chat. Pure; no Textual."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from app.chat.state import Guesses, PromptRead, Status
from app.conversations.records import Thoughts
from app.ring_words import latency, ring_name
from app.text_safety import one_line
from engine.ipc.messages import LayerTimes, ModelFacts, NodeTimes, PhaseTimes, Progress, ReadingCause, Timing, UnderWay
from engine.planning.units import byte_size

size = functools.partial(byte_size, fine=True)
"""An amount of memory as the chat words it, where small ones are watched, too."""


def rate(tokens_per_s: float) -> str:
    """``8.1 tok/s``, ``1,069 tok/s``; empty if nothing was measured."""
    if tokens_per_s <= 0:
        return ""
    return f"{tokens_per_s:,.0f} tok/s" if tokens_per_s >= 1000 else f"{tokens_per_s:.1f} tok/s"


def share_of_speed(under_way: UnderWay) -> str:
    """``9.8 of 24 tok/s``: the own part of what is generated; empty if nothing was measured."""
    own, whole = under_way.own_tokens_per_s, under_way.tokens_per_s
    return f"{own:.1f} of {rate(whole)}" if own > 0 else ""


def progress_text(progress: Progress) -> str:
    """``weights 12 of 30 layers``, ``model.safetensors 1.2 of 3.4 GB``."""
    stage = progress.stage
    if not progress.total:
        return stage
    if progress.unit == "bytes":
        return f"{stage} {size(progress.done)} of {size(progress.total)}"
    return f"{stage} {progress.done} of {progress.total} {progress.unit}".rstrip()


def engine_name(facts: ModelFacts) -> str:
    """Trunk and executor: ``native (avx2, 2 threads)`` if both are the same, otherwise ``transformers (torch, cpu) ·
    local (torch, cpu)``."""
    trunk, executor = facts.trunk or facts.runtime, facts.executor
    name = trunk.partition(" ")[0]
    if executor == name or executor.startswith((f"{name} ", f"{name}:")):
        return trunk if facts.trunk else executor
    return f"{trunk} · {executor}"


def thought_figures(thoughts: Thoughts) -> str:
    """``12 s, 340 tokens``; empty if nothing was counted."""
    figures = []
    if thoughts.seconds:
        figures.append(f"{thoughts.seconds:.0f} s" if thoughts.seconds >= 10 else f"{thoughts.seconds:.1f} s")
    if thoughts.tokens:
        figures.append(f"{thoughts.tokens:,} token{'' if thoughts.tokens == 1 else 's'}")
    return ", ".join(figures)


def parameters(count: int) -> str:
    """``30.5 B parameters``, ``393 M parameters``."""
    return f"{count / 1e9:.1f} B parameters" if count >= 1e9 else f"{count / 1e6:.0f} M parameters"


def status_words(status: Status) -> list[str]:
    """All that the status line may show, in sentences: it has no room for all of it, and shows it in few words."""
    lines = [f"Activity: {status.phase.value}."]
    if status.problem:
        lines.append(f"No model is loaded: {status.problem}")
    facts = status.facts
    if facts is None:
        lines.append(f"Model: {status.model}, not loaded.")
    else:
        experts = f"{facts.experts} experts, {facts.experts_per_token} active per token" if facts.experts else "dense"
        about = [facts.name, facts.weights, parameters(facts.parameters), experts]
        lines.append(f"Model: {', '.join(filter(None, about))}.")
        lines.append(f"Engine: {engine_name(facts)}.")
        if facts.ring is not None:
            lines.append(f"Machines: {ring_name(facts.ring, status.away)}.")
        used, limit = status.context_used or 0, facts.context_limit
        if limit:
            lines.append(f"Context: {used:,} of {limit:,} tokens ({used / limit:.0%}).")
    if status.warm_up is not None and status.warm_up.total:
        share = f"{100 * status.warm_up.done // status.warm_up.total} %"
        lines.append(f"Weights in memory: {share}; the rest is being loaded in the background.")
    if status.memory is not None:
        mapped = f", and {size(status.memory.mapped)} of mapped files, which the system drops when it needs room"
        lines.append(f"Memory: {size(status.memory.own)} of the engine's own{mapped * bool(status.memory.mapped)}.")
    if status.under_way is not None:
        share = share_of_speed(status.under_way)
        lines.append(f"Answers under way: {status.under_way.answers}{f'; this one has {share}' * bool(share)}.")
    if status.tokens_per_s > 0:
        first = f", first token after {latency(status.ttft_s)}" if status.ttft_s is not None else ""
        lines.append(f"Speed of the last answer: {rate(status.tokens_per_s)}{first}.")
    if status.guesses is not None:
        lines.append(guesses_words(status.guesses))
    if status.prompt is not None:
        lines.append(prompt_words(status.prompt))
    if status.beams > 1:
        lines.append(f"Beams: {status.beams}.")
    if status.served_at:
        lines.append(f"Other programs are answered at {', '.join(status.served_at)} (privatellm serve).")
    if status.waiting + status.queued:
        lines.append(f"Questions that wait: {status.waiting + status.queued}.")
    if status.unsaved:
        lines.append(f"Not saved: {status.unsaved}")
    return [one_line(line) for line in lines]


CAUSES: dict[ReadingCause, str] = {
    "changed": "an earlier message differs from what was kept",
    "tokens": "the same text is split into other tokens than were kept",
    "memory": "the conversation was given up for memory",
    "state": "the model's state goes back to a checkpoint only",
    "written": "what was written before is written again, so that the answer is the same",
    "restarted": "the model was loaded again",
}
"""Why a prompt was read again, in words."""


def guesses_words(guesses: Guesses) -> str:
    """How much guessing ahead saved, in a sentence."""
    after_the_first = guesses.tokens - 1
    passes = max(1, after_the_first - guesses.accepted)
    taken = f"{guesses.accepted / guesses.drafted:.0%} of {guesses.drafted:,} guessed ones were right"
    return f"Guessing ahead: {after_the_first / passes:.1f} tokens a pass; {taken}."


def prompt_words(prompt: PromptRead) -> str:
    """How much of a prompt was kept, why the rest was read again, and the first difference, in sentences."""
    text = f"Prompt of the last answer: {prompt.tokens:,} tokens, {prompt.kept:,} of them kept from before."
    why = prompt.why
    if why is None:
        return text
    text += f" Older ones were read again because {CAUSES[why.cause]}"
    if why.message is not None:
        text += f": message {why.message + 1} ({why.role})"
        if why.before or why.now:
            text += f", “{one_line(why.before)}” became “{one_line(why.now)}”"
    return f"{text}."


# --- times of layers -------------------------------------------------------------------------------------------------


PARTS = ("attention", "router", "experts", "exchange", "wait", "other")
"""The parts of a layer's time, in the order in which they are shown."""
WAITING = ("exchange", "wait")
"""The parts in which a node of a ring waits for others."""


def total(times: LayerTimes) -> float:
    """Milliseconds of a layer."""
    return sum(float(getattr(times, name)) for name in PARTS)


def slowest_layers(layers: Sequence[LayerTimes], count: int = 3) -> list[tuple[int, float, str]]:
    """The ``count`` slowest layers: index, milliseconds per token, and the part that took longest."""
    order = sorted(range(len(layers)), key=lambda index: total(layers[index]), reverse=True)
    return [
        (index, total(layers[index]), max(PARTS, key=lambda part: float(getattr(layers[index], part))))
        for index in order[:count]
        if total(layers[index]) > 0
    ]


def work_of(times: LayerTimes) -> float:
    """Milliseconds in which the node itself worked. The other nodes wait for the longest."""
    return sum(float(getattr(times, name)) for name in PARTS if name not in WAITING)


@dataclass(frozen=True)
class Slowest:
    """The slowest node of one layer, its times, and how much longer than the fastest it worked."""

    node: int
    times: LayerTimes
    gap: float
    """Milliseconds a token."""


def slowest_by_layer(nodes: Sequence[Sequence[LayerTimes]]) -> list[Slowest]:
    """The slowest node of each layer that all nodes measured; of equals the first. ``nodes``: each node's layers."""
    if not nodes:
        return []
    slowest_nodes = []
    for layer in range(min(map(len, nodes))):
        work = [work_of(node[layer]) for node in nodes]
        slowest = max(range(len(work)), key=work.__getitem__)
        slowest_nodes.append(Slowest(slowest, nodes[slowest][layer], work[slowest] - min(work)))
    return slowest_nodes


def node_name(node: NodeTimes) -> str:
    """The machine's name, or its number: ranks count from 0, numbers for people from 1."""
    return one_line(node.name) or f"node {node.rank + 1}"


def slowest_layer_words(layers: Sequence[LayerTimes]) -> str:
    """``Layer 12 takes longest: experts 1.9 of 2.4 ms``; empty if nothing was measured."""
    found = slowest_layers(layers, 1)
    if not found:
        return ""
    index, time, part = found[0]
    return f"Layer {index} takes longest: {part} {_ms(float(getattr(layers[index], part)))} of {_ms(time)} ms"


def slowest_node_words(nodes: Sequence[NodeTimes], phase: str) -> str:
    """``studio is slowest in 9 of 12 layers``; empty if nothing was measured. ``phase``: ``decode`` or ``prefill``."""
    found = slowest_by_layer([getattr(node, phase).layers for node in nodes])
    if not any(work_of(layer.times) for layer in found):
        return ""
    (node, count), *_ = Counter(layer.node for layer in found).most_common(1)
    return f"{node_name(nodes[node])} is slowest in {count} of {len(found)} layers"


def slowest_words(timing: Timing) -> str:
    """The slowest part of a decoding step, in words: the slowest node of a ring, otherwise the slowest layer."""
    if len(timing.nodes) > 1:
        return slowest_node_words(timing.nodes, "decode")
    return slowest_layer_words(timing.nodes[0].decode.layers if timing.nodes else timing.decode.layers)


def share_words(timing: Timing) -> list[str]:
    """The rows of a pass, and who shares it, a line for each program; empty if it is one answer's single row."""
    answers = sum(share.answers for share in timing.shares)
    if answers < 2 and timing.rows_per_pass <= 1:
        return []
    lines = [f"{_counted(answers)}, {timing.rows_per_pass:.1f} rows per pass"]
    for share in timing.shares:
        doing = f"{share.rows:.1f} rows, {rate(share.tokens_per_s)}" if share.tokens_per_s > 0 else "reading"
        lines.append(f"{share.program or 'another program'}: {_counted(share.answers)}, {doing}")
    return lines


def _counted(answers: int) -> str:
    return f"{answers} answer{'' if answers == 1 else 's'}"


def timing_words(timing: Timing) -> list[str]:
    """The times of both phases in sentences."""
    if len(timing.nodes) > 1:
        lines = [slowest_node_words(timing.nodes, "decode")]
        lines += [f"{node_name(node)}: {line}" for node in timing.nodes for line in _phases(node.decode, node.prefill)]
    else:
        whole = timing.nodes[0] if timing.nodes else timing
        lines = [slowest_layer_words(whole.decode.layers), *_phases(whole.decode, whole.prefill)]
    return [f"{line}." for line in [*share_words(timing), *lines] if line]


def _phases(decode: PhaseTimes, prefill: PhaseTimes) -> list[str]:
    lines = []
    for name, phase in (("Decoding", decode), ("Prefill", prefill)):
        if not phase.tokens:
            continue
        sums = {part: sum(float(getattr(layer, part)) for layer in phase.layers) for part in PARTS}
        sums["other"] += phase.outside_layers
        whole = sum(sums.values()) or 1.0
        shares = [f"{part} {value / whole:.0%}" for part, value in sums.items() if value > 0]
        lines.append(f"{name} {_ms(phase.per_token)} ms per token: {', '.join(shares)}")
    return lines


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"
