"""Which models the GGUF files of a repository are, and what a tag names."""

from __future__ import annotations

import pytest

from engine.models.formats.gguf_names import choices_of, listed, matching, recommended, tag_of, tower_among

GB = 10**9
REPOSITORY = {
    "Model-A3B-IQ2_K.gguf": 11 * GB,
    "Model-A3B-Q4_K_M.gguf": 18 * GB,
    "Model-A3B-UD-Q4_K_XL.gguf": 19 * GB,
    "Q8_0/Model-A3B-Q8_0-00001-of-00002.gguf": 20 * GB,
    "Q8_0/Model-A3B-Q8_0-00002-of-00002.gguf": 12 * GB,
    "BF16/Model-A3B-BF16-00001-of-00003.gguf": 30 * GB,
    "BF16/Model-A3B-BF16-00003-of-00003.gguf": 30 * GB,
    "mmproj-F16.gguf": GB,
    "Model-A3B-imatrix.gguf": GB,
    "imatrix_unsloth.gguf": GB,
    "../../Model-A3B-Q5_K_M.gguf": GB,
    "README.md": 100,
    "config.json": 100,
}


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Qwen3-30B-A3B-Instruct-2507-Q4_K_M.gguf", "Q4_K_M"),
        ("UD-Q4_K_XL/M-UD-Q4_K_XL-00001-of-00002.gguf", "UD-Q4_K_XL"),
        ("mixtral-8x7b-instruct-v0.1.Q4_K_M.gguf", "Q4_K_M"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("M.i1-IQ4_XS.gguf", "IQ4_XS"),
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("M-Q8_0-imatrix.gguf", "Q8_0"),
        ("ggml-model-f16.gguf", "F16"),
        ("phi-2_Q4_K_M.gguf", "Q4_K_M"),
        ("Mistral-7B.gguf", "Mistral-7B"),
        ("q4_k_m", "Q4_K_M"),
        ("ud-q4_k_xl", "UD-Q4_K_XL"),
    ],
)
def test_the_tag_in_a_name(name: str, tag: str) -> None:
    assert tag_of(name) == tag


def test_parts_belong_together_and_what_is_no_model_is_left_out() -> None:
    found = {choice.tag: choice for choice in choices_of(REPOSITORY)}
    assert list(found) == ["IQ2_K", "Q4_K_M", "UD-Q4_K_XL", "Q8_0", "BF16"], "the smallest first"
    assert found["Q8_0"].paths == tuple(name for name in REPOSITORY if "Q8_0" in name)
    assert found["Q8_0"].nbytes == 32 * GB and found["Q8_0"].complete
    assert not found["BF16"].complete
    assert [tag for tag, choice in found.items() if not choice.runs] == ["IQ2_K"]


@pytest.mark.parametrize(
    ("wanted", "tags"),
    [
        ("Q4_K_M", ["Q4_K_M"]),
        ("q4_k_m", ["Q4_K_M"]),
        ("UD-Q4_K_XL", ["UD-Q4_K_XL"]),
        ("q4_k_xl", ["UD-Q4_K_XL"]),
        ("Model-A3B-Q4_K_M.gguf", ["Q4_K_M"]),
        ("model-a3b-q8_0", ["Q8_0"]),
        ("Q8_0/Model-A3B-Q8_0-00001-of-00002.gguf", ["Q8_0"]),
        ("Model-A3B-Q8_0-00002-of-00002.gguf", ["Q8_0"]),
        ("A3B", ["IQ2_K", "Q4_K_M", "UD-Q4_K_XL", "Q8_0", "BF16"]),
        ("Q4_K", []),
        ("Q5_K_M", []),
        ("latest", []),
        ("(", []),
    ],
)
def test_what_a_word_after_the_colon_names(wanted: str, tags: list[str]) -> None:
    assert [choice.tag for choice in matching(choices_of(REPOSITORY), wanted)] == tags


def test_an_exact_tag_comes_before_one_that_adds_to_it() -> None:
    choices = choices_of({"M-Q4_K_XL.gguf": 1, "M-UD-Q4_K_XL.gguf": 2})
    assert [choice.tag for choice in matching(choices, "q4_k_xl")] == ["Q4_K_XL"]


def test_two_models_with_one_tag_are_called_by_their_files() -> None:
    choices = choices_of({"Small-Q8_0.gguf": 1, "Large-Q8_0.gguf": 2, "Large-Q4_0.gguf": 1})
    assert {choice.tag for choice in choices} == {"Small-Q8_0", "Large-Q8_0", "Q4_0"}
    assert [choice.stem for choice in matching(choices, "small-q8_0.gguf")] == ["Small-Q8_0"]


@pytest.mark.parametrize(
    ("names", "tag"),
    [
        (["M-Q8_0.gguf", "M-Q4_K_M.gguf", "M-Q2_K.gguf"], "Q4_K_M"),
        (["M-Q8_0.gguf", "M-UD-Q4_K_XL.gguf"], "UD-Q4_K_XL"),
        (["M-Q6_K.gguf", "M-Q8_0.gguf"], "Q6_K"),
        (["M-Q2_K.gguf", "M-Q6_K.gguf", "M-Q8_0.gguf"], "Q6_K"),
        (["M-Q2_K.gguf", "M-IQ3_S.gguf"], "IQ3_S"),
        (["M-IQ2_K.gguf", "M-IQ4_KS.gguf"], None),
    ],
)
def test_the_recommended_one(names: list[str], tag: str | None) -> None:
    found = recommended(choices_of({name: size for size, name in enumerate(names)}))
    assert (found.tag if found else None) == tag


@pytest.mark.parametrize(
    ("stem", "runs"),
    [
        ("M-Q4_K_M", True),
        ("M-UD-Q8_K_XL", True),
        ("M-q4", True),
        ("M", True),
        ("M-mxfp4", True),
        ("M-Q4_0_4_8", False),
        ("M-Q3_K_L", True),
        ("M-UD-IQ3_S", True),
        ("M-Q3_K_L_4", False),
        ("M-UD-IQ1_S", True),
        ("M-TQ1_0", True),
        ("M-UD-Q2_K_XL", True),
        ("M-IQ2_KT", False),
        ("M-IQ4_KS", False),
    ],
)
def test_which_names_speak_of_formats_that_run(stem: str, runs: bool) -> None:
    (choice,) = choices_of({f"{stem}.gguf": 1})
    assert choice.runs == runs
    assert [other.runs for other in choices_of({f"{stem}.gguf": 1, f"Other{stem}.gguf": 2})] == [runs, runs]


def test_choices_are_listed_with_their_sizes() -> None:
    choices = choices_of(REPOSITORY)
    assert listed(choices[:3]) == "Q4_K_M (18.0 GB), UD-Q4_K_XL (19.0 GB), and 1 in formats that do not run here"
    assert listed(choices[:1]) == "IQ2_K (11.0 GB)"


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (("m-Q4_K_M.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"), "mmproj-BF16.gguf"),
        (("mmproj-model-f16.gguf", "mmproj-Q8_0.gguf"), "mmproj-model-f16.gguf"),
        (("Qwen3.5-9B.mmproj-f32.gguf", "mmproj-x.gguf"), "Qwen3.5-9B.mmproj-f32.gguf"),
        (("mmproj-b.gguf", "mmproj-a.gguf"), "mmproj-a.gguf"),
        (("m.gguf", "mmproj.txt", "mmproj-\n.gguf", "../mmproj.gguf"), None),
    ],
)
def test_the_best_tower_of_a_folder(names: tuple[str, ...], taken: str | None) -> None:
    assert tower_among(names) == taken
