"""Questions with pictures, asked of a session: the answers are those of transformers' whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ModelError
from engine.ipc.messages import CountTokens, Generate, Load, Message, PictureFile, Prefill, Progress
from engine.pictures.folders import read_sight
from engine.pictures.picture import Picture
from engine.runtimes.torch import tower
from engine.session import looking
from engine.session.loading import load_session
from engine.session.prefix_cache import CHECKPOINT_TAIL
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.engine.runtimes.seeing_oracle import Prompt, as_native_runs, whole_logits
from tests.engine.runtimes.subjects import needs_mlx
from tests.engine.session.asking import Ask
from tests.support.pairwise import pairwise
from tests.support.tiny_seeing import TINY_SEEING, png, random_picture, write_speaking_seeing

FIRST, SECOND = random_picture(40, 24), random_picture(40, 24, seed=1)
OPTIONS: dict[str, Any] = {"max_tokens": 4}

Open = Callable[..., Ask]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("seeing")
    return {kind: write_speaking_seeing(root / kind, kind) for kind in TINY_SEEING}


@pytest.fixture
def opened() -> Iterator[Open]:
    asked: list[Ask] = []

    def open_model(folder: Path, runtime: str = "native", **options: Any) -> Ask:
        folder = as_native_runs(folder) if runtime == "native" else folder
        load = Load(id=1, model=str(folder), runtime=runtime, partitioning="cpu", cpu_threads=1, **options)  # type: ignore[arg-type]
        session = load_session(load, lambda *_: None)
        session._ends = frozenset()
        asked.append(Ask(session))
        return asked[-1]

    yield open_model
    for ask in asked:
        ask.session.close()


def question(*pictures: Picture, text: str = "see?", place: int = 3) -> Message:
    return Message("user", text, pictures=[PictureFile(png(picture), place) for picture in pictures])


def ask_about(ask: Ask, *messages: Message, **options: Any) -> Any:
    return ask(None, messages=list(messages), **(OPTIONS | options))


def prompt_of(folder: Path, *parts: str | Picture) -> Prompt:
    """Tokens of texts as the byte tokenizer makes them, and pictures with what stands around them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sight = read_sight(folder)
    assert sight is not None
    prompt: list[int | Picture] = []
    beside = tokenizer.encode(sight.beside).ids
    for part in parts:
        seen = [*beside, *sight.before, part, *sight.after, *beside] if isinstance(part, Picture) else []
        prompt += seen or tokenizer.encode(str(part)).ids
    return prompt


def greedy(folder: Path, prompt: Prompt, count: int = 4) -> list[int]:
    answer: list[int] = []
    while len(answer) < count:
        answer.append(int(np.argmax(whole_logits(folder, [*prompt, *answer])[-1])))
    return answer


ASKED = ("<|im_start|>user\nsee[", FIRST, "]?<|im_end|>\n<|im_start|>assistant\n")


NEEDS = {"native": (needs_kernels,), "torch": (), "mlx": (needs_mlx,)}
EVERY_RUN = (TINY_SEEING, tuple(NEEDS), (512, 8))
SAMPLED = pairwise(*EVERY_RUN)


@pytest.mark.parametrize(
    ("kind", "runtime", "chunk"),
    [
        pytest.param(*row, marks=[*NEEDS[row[1]], *(() if row in SAMPLED else (pytest.mark.soak,))])
        for row in product(*EVERY_RUN)
    ],
)
def test_an_answer_is_the_whole_models(
    folders: dict[str, Path], opened: Open, kind: str, runtime: str, chunk: int
) -> None:
    ask = opened(folders[kind], runtime, prefill_chunk=chunk)
    assert ask.session.facts.sight == read_sight(folders[kind]) and ask.session.facts.runtime == runtime
    found = ask_about(ask, question(FIRST))
    prompt = prompt_of(folders[kind], *ASKED)
    assert found.token_ids == greedy(folders[kind], prompt)
    tokens = len(prompt) - 1 + read_sight(folders[kind]).grid(40, 24).tokens  # type: ignore[union-attr]
    assert found.prompt_tokens == tokens
    counted = ask.session.count_tokens(CountTokens(id=2, texts=[], question=Generate(id=2, messages=[question(FIRST)])))
    assert counted.counts == [tokens]
    assert [event.stage for event in ask.of(Progress)][:1] == [tower.STAGE]
    assert ask.of(Prefill)[-1].done == tokens


@needs_kernels
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma4"])
def test_rows_are_reused_for_the_same_picture_only(
    folders: dict[str, Path], opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Picture] = []
    rows = tower.VisionTower.rows

    def counted(self: Any, picture: Picture, progress: Any) -> Any:
        looked.append(picture)
        return rows(self, picture, progress)

    monkeypatch.setattr(tower.VisionTower, "rows", counted)
    ask = opened(folders[kind])
    first = ask_about(ask, question(FIRST))
    again = ask_about(ask, question(FIRST))
    # A state cannot be cut back to the prompt's end.
    assert (again.token_ids, again.prefilled_tokens) == (first.token_ids, CHECKPOINT_TAIL if kind == "qwen3_5" else 0)
    other = ask_about(ask, question(SECOND))
    begin = len(prompt_of(folders[kind], "<|im_start|>user\nsee["))
    assert other.prefilled_tokens >= other.prompt_tokens - begin - 1
    assert other.token_ids == greedy(folders[kind], prompt_of(folders[kind], ASKED[0], SECOND, ASKED[2]))
    going_on = ask_about(ask, question(FIRST), Message("assistant", "x"), question(SECOND, text="and", place=0))
    expected = prompt_of(
        folders[kind], *ASKED, "x<|im_end|>\n<|im_start|>user\n[", SECOND, "]and<|im_end|>\n<|im_start|>assistant\n"
    )
    assert going_on.token_ids == greedy(folders[kind], expected)
    assert looked == [FIRST, SECOND], "each was looked at once"


@needs_kernels
def test_beams_and_several_pictures(folders: dict[str, Path], opened: Open) -> None:
    ask = opened(folders["qwen3_5_moe"])
    found = ask_about(ask, question(FIRST, SECOND, FIRST, place=0), beams=2, max_tokens=2)
    prompt = prompt_of(
        folders["qwen3_5_moe"],
        "<|im_start|>user\n[", FIRST, "][", SECOND, "][", FIRST, "]see?<|im_end|>\n<|im_start|>assistant\n",
    )  # fmt: skip
    scores = {}
    first = _logprobs(whole_logits(folders["qwen3_5_moe"], prompt)[-1])
    for token in np.argsort(first)[-2:].tolist():
        second = _logprobs(whole_logits(folders["qwen3_5_moe"], [*prompt, token])[-1])
        for after in np.argsort(second)[-2:].tolist():
            scores[token, after] = float(first[token] + second[after])
    best = max(scores, key=lambda pair: scores[pair])
    assert tuple(found.token_ids) == best
    assert found.beams[0].score == pytest.approx(scores[best] / 2, abs=1e-3)


def _logprobs(logits: Any) -> Any:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@needs_kernels
def test_looking_is_cancelled(folders: dict[str, Path], opened: Open) -> None:
    ask = opened(folders["gemma4"])

    class Impatient:
        owner = "somebody"
        asked = 0

        def cancelled(self) -> bool:
            self.asked += 1
            return ask.of(Progress) != []

        def watching(self) -> bool:
            return False

    request = Generate(id=7, messages=[question(FIRST)], **OPTIONS)
    found = ask.session.generate(request, ask.events.append, Impatient())
    assert (found.finish_reason, found.prefilled_tokens) == ("cancelled", 0)
    assert ask_about(ask, question(FIRST)).token_ids == greedy(folders["gemma4"], prompt_of(folders["gemma4"], *ASKED))


@needs_kernels
def test_a_mark_in_the_text_is_no_picture(folders: dict[str, Path], opened: Open) -> None:
    ask = opened(folders["qwen3_5"])
    marked = ask_about(ask, question(FIRST, text="a<|image|>b", place=1))
    assert marked.prompt_tokens > ask_about(ask, question(FIRST, text="ab", place=1)).prompt_tokens + 5


@needs_kernels
def test_what_cannot_be_shown_is_a_sentence(folders: dict[str, Path], opened: Open, tmp_path: Path) -> None:
    ask = opened(folders["qwen3_5"])
    with pytest.raises(ModelError, match="cannot be read"):
        ask_about(ask, Message("user", "x", pictures=[PictureFile(b"no picture")]))
    with pytest.raises(ModelError, match="times as long as wide"):
        ask_about(ask, question(random_picture(1, 300)))
    blind = opened(
        write_speaking_seeing(tmp_path / "blind", "qwen3_5", "{% for m in messages %}<|im_start|>{% endfor %}")
    )
    with pytest.raises(ModelError, match="places for 0 of 1 pictures"):
        ask_about(blind, question(FIRST))
    assert ask_about(ask, question(FIRST)).token_ids == greedy(
        folders["qwen3_5"], prompt_of(folders["qwen3_5"], *ASKED)
    )


@needs_kernels
def test_a_tower_that_does_not_fit_is_a_sentence(
    folders: dict[str, Path], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = opened(folders["qwen3_5"])
    with monkeypatch.context() as patch:
        patch.setattr(looking, "available_bytes", lambda: 1000)
        with pytest.raises(ModelError, match="that sees takes") as caught:
            ask_about(ask, question(FIRST))
    assert caught.value.kind == "memory"
    assert ask_about(ask, question(FIRST)).completion_tokens == 4


@needs_kernels
def test_damaged_settings_of_pictures_leave_the_text(opened: Open, tmp_path: Path) -> None:
    folder = write_speaking_seeing(tmp_path / "damaged", "qwen3_5")
    (folder / "preprocessor_config.json").write_text('{"patch_size": 7}')
    ask = opened(folder)
    assert ask.session.facts.sight is None and ask.session.facts.way_to_see
    assert any("patch_size is 7" in notice for notice in ask.session.facts.notices)
    assert ask_about(ask, Message("user", "hello")).completion_tokens == 4
    with pytest.raises(ModelError, match="sees none"):
        ask_about(ask, question(FIRST))


@needs_kernels
def test_rows_with_pictures_are_not_kept_on_disk(folders: dict[str, Path], opened: Open) -> None:
    ask = opened(folders["gemma4_e2b"], prefix_disk_bytes=1 << 30)
    cache, disk = ask.session._cache, ask.session._disk
    assert disk is not None
    for message, kept in ((Message("user", "long " * 60), True), (question(FIRST, text="long " * 60), False)):
        ask_about(ask, message, conversation="chat1")
        assert disk.due(cache._latest, last=True) == kept
