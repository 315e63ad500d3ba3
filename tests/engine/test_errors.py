"""What a model's file says is put into a sentence as plain characters of one line, and not many of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.models.architectures.families import FAMILIES, check_supported
from engine.models.folders.old_bank import slab_headers
from engine.runtimes.mlx.families import family_of
from engine.runtimes.torch.loading import read_config
from engine.session.loading import settings_not_applied

EVIL = "\x1b]0;title\x07\u202e\x9b2J" + "long" * 200


def plain(text: str, folder: Path) -> bool:
    said = text.replace(str(folder), "")
    return said.isascii() and said.isprintable() and len(said) < 500


def test_generation_settings() -> None:
    for penalty in (EVIL, [EVIL], {EVIL: 1}):
        (notice,) = settings_not_applied({"repetition_penalty": penalty})
        assert "repetition_penalty" in notice and notice.isascii() and notice.isprintable() and len(notice) < 200


@pytest.mark.parametrize("manifest", [{"format": 1, EVIL: 1}, {"format": EVIL}])
def test_a_manifest(tmp_path: Path, manifest: dict[str, object]) -> None:
    (tmp_path / "bank.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError) as refused:
        slab_headers(tmp_path, {}, FAMILIES["mixtral"])
    assert plain(str(refused.value), tmp_path)


def test_a_configuration_that_transformers_refuses(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        read_config(tmp_path, {"model_type": EVIL})
    assert plain(str(refused.value), tmp_path)


def test_code_that_a_model_names() -> None:
    with pytest.raises(ModelError) as refused:
        family_of({"model_file": EVIL})
    assert plain(str(refused.value), Path("/nowhere"))


@pytest.mark.parametrize(("name", "said"), [("bert", "'bert'"), ("a\x1bb", r"'a\x1bb'")])
def test_a_family_that_is_none_stands_in_one_pair_of_quotes(name: str, said: str) -> None:
    with pytest.raises(ModelError) as refused:
        check_supported({"model_type": name})
    assert str(refused.value).startswith(f"Models of the family {said} are not supported")
