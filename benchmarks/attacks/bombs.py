"""Small things that ask for much: memory without end, time without end, or both."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.attacks.campaign import Attack, Attempt, Refused
from benchmarks.attacks.files import SHAPE, answered, linked, quiet, tiny_gguf, write_tokenizer
from engine.bench.synthetic_moe import write_moe
from engine.errors import ModelError

TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 3000000000 }}",
    "{{ 'a'.ljust(4000000000) }}",
    "{{ 'a'.center(4000000000) }}",
    "{{ '%4000000000s' % 'a' }}",
    "{{ '{:4000000000}'.format('a') }}",
    "{{ 'a'.replace('a', 'a' * 99999).replace('a', 'a' * 99999) }}",
    "{{ ('a' * 99999).join('a' * 99999) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ [0] * 2000000000 }}",
    "{% set ns = namespace(s='a') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{{ range(99999) | list | tojson * 99999 }}",
    "{% for a in range(10 ** 12) %}{{ a }}{% endfor %}",
    "{{ messages | map(attribute='content') | join(', ' * 99999999) }}",
    "{{ 'a' | indent(2000000000) }}",
    "{{ ('a\n' * 99999) | indent(99999) }}",
    "{{ 'a' | center(2000000000) }}",
    "{{ lipsum(n=100000, min=1000) }}",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": 10_000, "num_local_experts": 100_000},
    {"num_hidden_layers": 2**31 - 1},
    {"num_local_experts": 2**40},
    {"head_dim": 2**63},
    {"sliding_window": 2**63 + 5},
    {"max_position_embeddings": 2**62},
    {"vocab_size": 2**62},
    {"mlp_only_layers": list(range(300_000)), "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 48},
    {"layer_types": ["full_attention"] * 500_000},
    {"rope_parameters": {"rope_type": "yarn", "factor": 1e308, "rope_theta": 1.0}},
    {"num_attention_heads": 2**31, "num_key_value_heads": 2**31},
    {"intermediate_size": 2**45},
    {"eos_token_id": list(range(2_000_000))},
    {"quantization": {"bits": 4, "group_size": 64}, "num_hidden_layers": 10_000, "num_local_experts": 100_000},
    {"id2label": {str(number): "x" for number in range(300_000)}},
)


@contextlib.contextmanager
def bombs(home: Path) -> Iterator[Attempt]:
    """Each once, in order, and again from the beginning."""
    every = [*_settings(home), *_templates(home), *_ggufs(home), *_messages(home)]
    yield lambda draw: every[draw.number % len(every)]()


def _settings(home: Path) -> Iterator[Callable[[], None]]:
    folder = write_moe(home / "model", SHAPE, quiet)
    config = json.loads((folder / "config.json").read_text())

    def use(text: str) -> None:
        hostile = linked(folder, home / "hostile", "config.json")
        (hostile / "config.json").write_text(text)
        answered(hostile)

    for settings in SETTINGS:
        yield partial(use, json.dumps(config | settings))
    yield partial(use, "[" * 1_000_000 + "]" * 1_000_000)
    yield partial(use, json.dumps(config)[:-1] + ', "rms_norm_eps": 1' + "0" * 1_000_000 + "}")

    def weights(header: bytes) -> None:
        hostile = linked(folder, home / "hostile", "model.safetensors")
        (hostile / "model.safetensors").write_bytes(header)
        answered(hostile)

    yield partial(weights, struct.pack("<Q", 10**11) + b"{")
    yield partial(weights, struct.pack("<Q", 2_000_000) + b"[" * 1_000_000 + b"]" * 1_000_000)


def _templates(home: Path) -> Iterator[Callable[[], None]]:
    from engine.ipc.messages import Message
    from engine.models.text.tokenizer import load_tokenizer

    folder = home / "tokenizer"
    write_tokenizer(folder)

    def use(template: str) -> None:
        hostile = linked(folder, home / "hostile", "chat_template.jinja")
        (hostile / "chat_template.jinja").write_text(template)
        try:
            found = load_tokenizer(hostile)
            assert found is not None
            found.encode_chat([Message("user", "hello")])
        except ModelError as error:
            raise Refused from error

    for template in TEMPLATES:
        yield partial(use, template)


def _ggufs(home: Path) -> Iterator[Callable[[], None]]:
    from engine.models.store.gguf_folder import open_gguf

    data = tiny_gguf(home / "model.gguf").read_bytes()

    def use(changed: bytes) -> None:
        (home / "hostile.gguf").write_bytes(changed)
        try:
            open_gguf(home / "hostile.gguf", quiet)
        except ModelError as error:
            raise Refused from error

    def with_number(key: str, number: int) -> bytes:
        at = data.index(key.encode()) + len(key) + 4
        return data[:at] + struct.pack("<I", number) + data[at + 4 :]

    for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length"):
        yield partial(use, with_number(f"llama.{key}", 2**31 - 1))
    for count in (2**31, 2**40, 2**63):
        yield partial(use, data[:8] + struct.pack("<Q", count) + data[16:])
        yield partial(use, data[:16] + struct.pack("<Q", count) + data[24:])
    token = struct.pack("<Q", 2) + b"ab"
    long = struct.pack("<Q", 2_000_000) + b"ab" * 1_000_000
    yield partial(use, data.replace(token, long, 1))


def _messages(home: Path) -> Iterator[Callable[[], None]]:
    """Of a head and of a node that is paired."""
    import msgspec

    from engine.cluster.commands import decode_command
    from engine.cluster.membership.control_messages import MESSAGE_LIMIT
    from engine.cluster.transport.exchange import RingProtocolError
    from engine.cluster.weights.transfer import decode_offer

    def use(decode: Callable[[bytes], object], data: bytes) -> None:
        try:
            decode(data)
        except (ModelError, RingProtocolError) as error:
            raise Refused from error

    tokens = {"type": "extend", "rows": 0, "before": 0, "tokens": [7] * (MESSAGE_LIMIT // 2), "want_logits": True}
    yield partial(use, decode_command, msgspec.msgpack.encode(tokens))
    empty_array = b"\x90"
    for count in (1 << 20, 60 << 20):
        yield partial(use, decode_offer, b"\xdd" + struct.pack(">I", count) + empty_array * count)
    for decode in (decode_command, decode_offer):
        yield partial(use, decode, b"\x91" * 200_000)


COUNT = len(SETTINGS) + 4 + len(TEMPLATES) + 12 + 5
ATTACKS = [Attack("small requests with large effects", COUNT, bombs, memory_bytes=600 << 20, cpu_s=30.0)]
