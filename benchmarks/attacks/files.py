"""Model files of somebody else: configurations, headers, manifests, GGUFs, tokenizers, and what a head offers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.attacks.campaign import Attack, Attempt, Refused
from benchmarks.attacks.mutating import spoiled, spoiled_tree
from engine.bench.synthetic_moe import MoeShape, write_moe
from engine.errors import ModelError

SHAPE = MoeShape(layers=2, hidden=32, ffn=48, experts=4, experts_per_token=2, heads=4, key_value_heads=2, vocabulary=96)
PROMPT = [5, 17, 80, 42]


def quiet(stage: str, done: int, total: int, unit: str) -> None:
    """Nobody looks at the progress."""


def linked(source: Path, target: Path, but: str) -> Path:
    """A folder with the files of ``source``, as links, but for one that is to be written."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in source.rglob("*"):
        place = target / file.relative_to(source)
        if file.is_dir():
            place.mkdir()
        elif str(file.relative_to(source)) != but:
            os.link(file, place)
    return target


def answered(folder: Path) -> None:
    """Plan, load and run the model in ``folder``. Raises Refused; a plan that loading then refuses is an error, but for
    what only the weights or a forward pass can show."""
    from engine.ipc.messages import Generate, Load, Plan, Sampling
    from engine.session.loading import load_session
    from engine.session.plan_model import plan_model

    class Control:
        owner = "somebody"

        def cancelled(self) -> bool:
            return False

        def watching(self) -> bool:
            return False

    load = Load(id=1, model=str(folder), runtime="native", cpu_threads=1, keep_resident=False, context_limit=64)
    try:
        plan_model(Plan(id=1, load=load))
        session = load_session(load, quiet)
    except ModelError as error:
        raise Refused from error
    try:
        request = Generate(id=2, prompt_ids=PROMPT, max_tokens=2, sampling=Sampling(temperature=0.0))
        session.generate(request, lambda event: None, Control())
    except ModelError as error:
        raise Refused from error
    finally:
        session.close()


@contextlib.contextmanager
def configurations(home: Path) -> Iterator[Attempt]:
    folder = write_moe(home / "model", SHAPE, quiet)
    config = json.loads((folder / "config.json").read_text())
    answered(folder)

    def attempt(draw: random.Random) -> None:
        hostile = linked(folder, home / "hostile", "config.json")
        tree = spoiled_tree(config, draw)
        data = json.dumps(tree, ensure_ascii=True).encode()
        (hostile / "config.json").write_bytes(data if draw.random() < 0.9 else spoiled(data, draw))
        answered(hostile)

    yield attempt


@contextlib.contextmanager
def headers(home: Path) -> Iterator[Attempt]:
    """Safetensors files whose first bytes, the table of tensors, are spoiled, as bytes or as JSON."""
    folder = write_moe(home / "model", SHAPE, quiet)
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])

    def attempt(draw: random.Random) -> None:
        hostile = linked(folder, home / "hostile", "model.safetensors")
        if draw.random() < 0.5:
            changed = spoiled(data[: 8 + length], draw) + data[8 + length :]
        else:
            name = draw.choice(list(table))
            tree = {**table, name: spoiled_tree(table[name], draw)}
            header = json.dumps(tree).encode()
            header += b" " * draw.choice((0, -len(header) % 8))
            changed = len(header).to_bytes(8, "little") + header + data[8 + length :]
        (hostile / "model.safetensors").write_bytes(changed)
        answered(hostile)

    yield attempt


@contextlib.contextmanager
def prepared_indexes(home: Path) -> Iterator[Attempt]:
    """Prepared folders with a spoiled index."""
    from engine.models.folders.model_folder import INDEX
    from engine.models.folders.prepare import prepare

    prepare(write_moe(home / "model", SHAPE, quiet), home / "prepared", quiet)
    index = json.loads((home / "prepared" / INDEX).read_bytes())
    answered(home / "prepared")

    def attempt(draw: random.Random) -> None:
        hostile = linked(home / "prepared", home / "hostile", INDEX)
        data = json.dumps(spoiled_tree(index, draw)).encode()
        (hostile / INDEX).write_bytes(data if draw.random() < 0.7 else spoiled(data, draw))
        answered(hostile)

    yield attempt


@contextlib.contextmanager
def ggufs(home: Path) -> Iterator[Attempt]:
    """GGUFs of a dense model with spoiled bytes, most of them in the header."""
    from engine.models.folders.opening import open_model
    from engine.models.store.gguf_folder import open_gguf

    data = tiny_gguf(home / "model.gguf").read_bytes()
    path = home / "hostile.gguf"
    open_gguf(home / "model.gguf", quiet)

    def attempt(draw: random.Random) -> None:
        header = draw.choice((256, 4096, len(data)))
        path.write_bytes(spoiled(data[:header], draw) + data[header:])
        try:
            folder = open_gguf(path, quiet)
            for _, tensor in open_model(folder).trunk():
                tensor.words.max()
            shutil.rmtree(folder)
        except ModelError as error:
            raise Refused from error

    yield attempt


def tiny_gguf(path: Path) -> Path:
    """A llama of two layers, as llama.cpp's converter writes it, with a small tokenizer."""
    import numpy as np
    from gguf import GGUFWriter

    hidden, ffn, heads, vocabulary = 32, 48, 4, 96
    tokens = ["<unk>", "<s>", "</s>", "ab", "cd", *(chr(code) for code in range(33, 124))]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (vocabulary - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    random_numbers = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, random_numbers.standard_normal(shape, dtype=np.float32) * np.float32(0.1))

    tensor("token_embd.weight", vocabulary, hidden)
    tensor("output.weight", vocabulary, hidden)
    tensor("output_norm.weight", hidden)
    for layer in range(2):
        for name in ("attn_norm", "ffn_norm"):
            tensor(f"blk.{layer}.{name}.weight", hidden)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{layer}.{name}.weight", hidden, hidden)
        tensor(f"blk.{layer}.ffn_gate.weight", ffn, hidden)
        tensor(f"blk.{layer}.ffn_up.weight", ffn, hidden)
        tensor(f"blk.{layer}.ffn_down.weight", hidden, ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@contextlib.contextmanager
def tokenizers(home: Path) -> Iterator[Attempt]:
    """Folders with a spoiled ``tokenizer.json``, settings of it, or chat template; a conversation is rendered."""
    from engine.ipc.messages import Message
    from engine.models.text.tokenizer import load_tokenizer

    folder = home / "tokenizer"
    files = write_tokenizer(folder)
    talk = [Message("user", "hello <s> there"), Message("assistant", "a b")]

    def use(folder: Path) -> None:
        found = load_tokenizer(folder)
        if found is not None:
            found.decode(found.encode_chat(talk))

    use(folder)

    def attempt(draw: random.Random) -> None:
        name = draw.choice(list(files))
        hostile = linked(folder, home / "hostile", name)
        if name.endswith(".json") and draw.random() < 0.8:
            (hostile / name).write_text(json.dumps(spoiled_tree(files[name], draw)))
        else:
            (hostile / name).write_bytes(spoiled((folder / name).read_bytes(), draw))
        try:
            use(hostile)
        except ModelError as error:
            raise Refused from error

    yield attempt


def write_tokenizer(folder: Path) -> dict[str, Any]:
    """A small byte-level tokenizer with a chat template; its files by name, JSON as trees."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    library = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel()
    library.add_special_tokens(tokens[:3])
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return {
        "tokenizer.json": json.loads((folder / "tokenizer.json").read_text()),
        "tokenizer_config.json": settings,
        "chat_template.jinja": None,
    }


@contextlib.contextmanager
def offers(home: Path) -> Iterator[Attempt]:
    """What a head offers a node, and the pieces of it, spoiled on the way."""
    from engine.cluster.transport.exchange import RingProtocolError
    from engine.cluster.weights.shard_store import ShardStore
    from engine.cluster.weights.transfer import decode_chunk, decode_offer, encode_offer, offer, stream

    folder = write_moe(home / "model", SHAPE, quiet)
    made = offer(folder, quiet).part({layer: [0, 2] for layer in range(SHAPE.layers)}, trunk=True)
    encoded = encode_offer(made)
    (home / "node").mkdir()
    shares = ShardStore(home / "node", "head")
    need = shares.need(made, quiet)
    chunks = list(stream(folder, made, need.wanted))

    def attempt(draw: random.Random) -> None:
        try:
            if draw.random() < 0.5:
                shares.need(decode_offer(spoiled(encoded, draw)), quiet)
            else:
                changed = [spoiled(chunk, draw) if draw.random() < 0.2 else chunk for chunk in chunks]
                for chunk in changed:
                    decode_chunk(chunk)
                shares.receive(made, need.wanted, iter(changed), quiet)
        except (ModelError, RingProtocolError) as error:
            raise Refused from error

    yield attempt


ATTACKS = [
    Attack("configurations of models", 20_000, configurations),
    Attack("headers of weights", 20_000, headers),
    Attack("indexes of prepared models", 10_000, prepared_indexes),
    Attack("GGUF files", 20_000, ggufs),
    Attack("tokenizers and templates", 10_000, tokenizers),
    Attack("offers and pieces of shards", 20_000, offers),
]
