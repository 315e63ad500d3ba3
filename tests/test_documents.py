"""The documents name files, commands, options, settings and figures that exist, and stay short."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest

from app.chat.commands.table import parse
from app.commands.root import privatellm
from app.settings.schema import setting_named
from app.tui.keymap import HOMES, defaults, readable
from engine.models.architectures import families, gguf_architectures, quantisation
from engine.models.formats.gguf_names import GgufChoice
from engine.models.formats.number_formats import GGML_TYPES
from engine.runtimes.mlx import families as mlx_families

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("app", "engine", "discovery", "assets", "packaging", "benchmarks", "tests", "docs")
RESULTS = ROOT / "benchmarks" / "results"
"""Printed tables, which are no documents."""
OF_PEOPLE = {"settings.toml", "personas.toml", "keymap.toml", "config.toml"}
"""Files on a person's machine."""

DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("README.md") if path.parent != RESULTS),
]
PAGES = [*DOCUMENTS, *sorted(RESULTS.glob("*.md"))]

_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=name)
pages = pytest.mark.parametrize("page", PAGES, ids=name)


def code(document: Path) -> Iterator[tuple[str, bool]]:
    """Each line of a block of code, and each piece of code in a sentence, for which the second value is true."""
    text = document.read_text(encoding="utf-8")
    for block in _FENCED.findall(text):
        yield from ((line, False) for line in block.replace("\\\n", " ").splitlines())
    yield from ((span, True) for span in _SPAN.findall(_FENCED.sub("", text)))


def arguments(line: str, program: str) -> Iterator[list[str]]:
    """The arguments of every call of ``program`` in a line of shell."""
    lexer = shlex.shlex(line.replace("<(", "; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    call: list[str] | None = None
    first = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation mark of another language than the shell's
        return
    for word in [*words, ";"]:
        if set(word) <= set("();<>|&"):
            if call is not None:
                yield call
            call, first = None, True
        elif call is not None:
            call.append(word)
        elif first and Path(word).name == program:
            call = []
        else:
            first = first and re.match(r"\w+=", word) is not None


def parsed(command: click.Command, call: list[str], *, mentioned: bool) -> None:
    """Raises click.UsageError for a command, an option or a value that does not exist."""
    if isinstance(command, click.Group) and call and not call[0].startswith("-"):
        _, inner, rest = command.resolve_command(click.Context(command), call)
        assert inner is not None
        parsed(inner, rest, mentioned=mentioned)
        return
    try:
        command.make_context(command.name, list(call))
    except click.exceptions.Exit:
        pass  # --help and --version
    except click.MissingParameter:
        if not mentioned:
            raise


@pytest.fixture(scope="module")
def files() -> list[str]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return ["/" + path.relative_to(ROOT).as_posix() for path in [*found, *ROOT.glob("*.*")]]


@documents
def test_every_file_that_is_named_exists(document: Path, files: list[str]) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.(?:py|c|h|toml|sql|svg)\b", text)) - OF_PEOPLE
    missing = sorted(name for name in named if not any(path.endswith("/" + name.lstrip("/")) for path in files))
    assert missing == []


def anchors(page: Path) -> set[str]:
    """The parts of ``page`` that a link can name, as GitHub makes them of headings."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    text = _SPAN.sub("", _FENCED.sub("", page.read_text(encoding="utf-8")))
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    for target in targets:
        path, _, part = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        assert not part or part in anchors(file), target


@documents
def test_every_command_of_the_program_exists_with_its_options(document: Path) -> None:
    for line, mentioned in code(document):
        for call in arguments(line, "privatellm"):
            try:
                parsed(privatellm, call, mentioned=mentioned)
            except click.UsageError as error:
                pytest.fail(f"{line}: {error.format_message()}")


@documents
def test_every_model_that_is_named_is_in_the_catalogue(document: Path) -> None:
    catalogue = tomllib.loads((ROOT / "assets" / "catalogue.toml").read_text(encoding="utf-8"))
    names = {model["name"] for model in catalogue["model"]}
    for line, _ in code(document):
        for call in arguments(line, "privatellm"):
            words = " ".join(call)
            named = re.findall(r"^(?:plan|models (?:pull|prepare|remove)) ([\w.-]+)(?!\S)", words)
            named += re.findall(r"--model ([\w.-]+)(?!\S)", words)
            assert set(named) - {"M"} <= names, line


def test_a_command_that_does_not_exist_is_noticed() -> None:
    for wrong in ("sing", "ask Hi --loud", "models push M", "locate moon", "ask --beams many"):
        (call,) = arguments(f"cat a | .venv/bin/privatellm {wrong} > b", "privatellm")
        with pytest.raises(click.UsageError):
            parsed(privatellm, call, mentioned=True)


@documents
def test_every_target_of_make_and_every_benchmark_exists(document: Path) -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line, _ in code(document):
        for call in arguments(line, "make"):
            assert not call or call[0] in rules, line
        for module, rest in re.findall(r"\b(benchmarks(?:\.\w+)+)\b([^|&#]*)", line):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), line
            text = "".join(source.read_text(encoding="utf-8") for source in (ROOT / "benchmarks").rglob("*.py"))
            for option in re.findall(r"(?<!\S)--[a-z-]+", rest):
                assert f'"{option}"' in text, line


@documents
def test_every_command_of_the_chat_exists(document: Path) -> None:
    if document.name == "serve.md":
        return  # its slashes are paths of HTTP
    for span, mentioned in code(document):
        if mentioned and re.match(r"/[a-z]+\b(?!/)", span):
            assert parse(span) is not None, span


def test_the_keys_of_the_chat_are_those_of_the_program() -> None:
    keys = [{readable(key) for key in defaults(function)} for function in HOMES]
    text = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (f\d) \| (\S+) \|", text, re.MULTILINE)
    assert len(rows) == 8
    assert [row for row in rows if not any(set(row) <= function for function in keys)] == []
    alone = re.findall(r"^\| (\S+) \| +\|", text, re.MULTILINE)
    assert {"enter", "esc", "ctrl+s", "ctrl+q"} <= set(alone)
    assert set(alone) - set().union(*keys) == {"ctrl+z"}


@documents
def test_every_setting_that_is_named_exists(document: Path) -> None:
    for span, mentioned in code(document):
        if mentioned and re.fullmatch(r"(?:ring|prefix)_[a-z_]+", span):
            assert setting_named(span).key == span


def test_the_messages_about_rings_are_those_of_the_program() -> None:
    said = (ROOT / "tests" / "inventory" / "inventory.txt").read_text(encoding="utf-8").splitlines()
    text = (ROOT / "docs" / "ring.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \|", text[text.index("## When it does not form") :], re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r'"([^"]+)"', row) if message != "AP isolation"]
    assert len(messages) > 8
    for message in messages:
        parts = [part.strip() for part in re.split(r"…|[\d.]+ GB|\b\d+ minutes|\d+ or \d+", message)]
        assert any(all(part in line for part in parts) for line in said), message


def test_the_table_of_models_is_what_runs() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (head,) = re.findall(r"^\| family \|.*", text, re.MULTILINE)
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    lines = [line.strip("|").split("|") for line in text[text.index(head) :].split("\n\n")[0].splitlines()[2:]]
    rows = [dict(zip(columns, map(str.strip, cells), strict=True)) for cells in lines]

    def having(column: str) -> set[str]:
        """The families of all rows that do not say no in ``column``."""
        named = [re.sub(r" \(.*\)", "", row["family"]) for row in rows if row[column] != "no"]
        return {family for names in named for family in names.split(", ")}

    def listed(names: Iterable[str]) -> set[str]:
        return {name.removesuffix("_text") for name in names}

    assert having("torch") == listed(families.SUPPORTED)
    assert having("native") == listed(name for name, family in families.FAMILIES.items() if family.native)
    assert having("mlx") == listed(mlx_families.SUPPORTED)
    assert having("mlx-lm, 2 to 8 bits") == listed(quantisation.FAMILIES_OF_MLX)
    in_rows = [
        name
        for name, family in families.FAMILIES.items()
        if family.separate_experts or not any(tensor.strided for layout in family.layouts[:1] for tensor in layout)
    ]
    assert having("FP8") == listed(in_rows)
    files = {name for row in rows if row["GGUF"] != "no" for name in row["GGUF"].split(", ")}
    assert files == set(gguf_architectures.ARCHITECTURES)


def test_the_families_whose_experts_have_no_tensors_of_their_own_are_named() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"^- The experts of (.*?)\s+are\s+one tensor", text, re.MULTILINE | re.DOTALL)
    together = {name for name, family in families.FAMILIES.items() if family.moe and not family.separate_experts}
    assert set(re.split(r",\s+|\s+and\s+", named)) == {name.removesuffix("_text") for name in together}


def test_the_first_page_says_how_many_families_run() -> None:
    """In words, of the tens that are more than full."""
    words_of = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tens,) = re.findall(r"\[More than (\w+) families\]", text)
    assert words_of[tens] < len(families.SUPPORTED) <= words_of[tens] + 10


def test_the_most_downloaded_models_are_those_that_run() -> None:
    text = (RESULTS / "most_downloaded.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 40
    for model, architecture, files, runs in rows[2:]:
        assert runs.startswith("yes") == (architecture in gguf_architectures.ARCHITECTURES), model
        tags = [tag for tag in re.findall(r"[A-Z0-9_-]+", files) if "_" in tag or tag == "MXFP4"]
        assert all(GgufChoice(tag, (f"M-{tag}.gguf",), 0).runs for tag in tags), model


def test_the_number_formats_of_gguf_files_are_those_that_run() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^- \*\*GGUF\*\*: (.*?), one file or split", text, re.MULTILINE | re.DOTALL)
    assert sorted(re.split(r",\s+|\s+and\s+", listed)) == sorted(GGML_TYPES.values())


def test_the_speeds_of_the_first_page_are_printed_in_the_results() -> None:
    printed = (RESULTS / "packed.md").read_text(encoding="utf-8")
    figures = re.findall(r"([\d.]+ / [\d.]+): \*\*([\d.]+)\*\*", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(figures) == 18
    assert [figure for figure in figures if f"{figure[0]}: {figure[1]} " not in printed] == []


def test_the_architecture_takes_two_pages() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 120


def words(document: Path) -> int:
    return len(document.read_text(encoding="utf-8").split())


def test_the_first_page_is_short() -> None:
    assert words(ROOT / "README.md") <= 1_200


def test_all_documents_are_short() -> None:
    assert sum(map(words, DOCUMENTS)) <= 20_000


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each.name == "README.md"][1:], ids=name)
def test_a_package_is_described_on_one_page(document: Path) -> None:
    assert words(document) <= 650
