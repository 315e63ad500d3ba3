"""Our safetensors reader: any bytes at all end in tensors or in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from engine.errors import ModelError
from engine.models.formats.mapped_file import MappedFile
from engine.models.formats.safetensors_files import HEADER_LIMIT, encode_header, parse_header, read_header


def file_bytes(header: object, data: bytes = b"") -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(body).to_bytes(8, "little") + body + data


def entry(dtype="F32", shape=(2,), start=0, stop=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@given(st.binary(max_size=300))
@example(b"[" * 100_000)
@example(b'{"a":' * 50_000)
@example(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}')
@example(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}')
@example(b'{"\\u001b[2J":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}')
@example(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,1e999]}}')
@example(b"")
def test_any_header_ends_in_tensors_or_one_sentence(header):
    try:
        parse_header(header, 8 + len(header), "model.safetensors")
    except ModelError as error:
        assert str(error).startswith("model.safetensors is damaged: ")
        assert str(error).isprintable()
        assert len(str(error)) < 400


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", 3, None]),
        "shape": st.lists(st.integers(-1, 3), max_size=3) | st.none(),
        "data_offsets": st.lists(st.integers(-2, 30), max_size=3) | st.text(max_size=2),
    },
)


@given(st.dictionaries(st.text(max_size=4), ENTRY | st.integers(), max_size=4), st.integers(0, 40))
def test_what_is_accepted_fills_the_file_without_gaps(table, extra):
    header = json.dumps(table).encode()
    size = 8 + len(header) + extra
    try:
        tensors = parse_header(header, size, "f")
    except ModelError:
        return
    spans = [(tensor.start, tensor.stop) for tensor in tensors.values()]
    assert spans == sorted(spans)
    assert sum(stop - start for start, stop in spans) == extra


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_any_file_ends_in_tensors_or_one_sentence(tmp_path, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    try:
        read_header(path)
    except ModelError as error:
        assert "model.safetensors" in str(error)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cut off"),
        (b"\x00" * 7, "cut off"),
        ((1000).to_bytes(8, "little") + b"{}", "cut off"),
        (file_bytes({"a": entry()}, b"1234"), "cut off: it has .* bytes and should have"),
        (file_bytes({"a": entry()}, b"123456789"), "tensors end after"),
        (file_bytes(b"<html>404</html>"), "not JSON"),
        (file_bytes([]), "not a table"),
        (file_bytes(b'{"a":{},"a":{}}'), "twice"),
        (file_bytes({"a": 1}), "not a table"),
        (file_bytes({"a": entry(dtype="F4")}, b"12345678"), "unknown type F4"),
        (file_bytes({"a": entry(shape=(-2,))}, b"12345678"), "impossible shape"),
        (file_bytes({"a": entry(shape=(2, True))}, b"12345678"), "impossible shape"),
        (file_bytes({"a": entry(shape=(3,))}, b"12345678"), "does not fill"),
        (file_bytes({"a": entry(start=8, stop=0)}, b"12345678"), "impossible offsets"),
        (file_bytes({"a": entry(), "b": entry()}, b"12345678"), "does not begin where"),
        (file_bytes({"a": entry(start=4, stop=12)}, b"1234567890AB"), "does not begin where"),
    ],
)
def test_each_kind_of_damage_is_named(tmp_path, content, why):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"model.safetensors is damaged: .*{why}"):
        read_header(path)


def test_a_header_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((HEADER_LIMIT + 1).to_bytes(8, "little"))
        file.truncate(HEADER_LIMIT + 100)
    with pytest.raises(ModelError, match="over the limit"):
        read_header(path)


def test_tensors_read_as_the_safetensors_library_reads_them(tmp_path):
    generator = np.random.default_rng(0)
    tensors = {
        "matrix": generator.standard_normal((3, 5)).astype(np.float32),
        "half": generator.standard_normal(7).astype(np.float16),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 4), np.float32),
        "bytes": np.arange(3, dtype=np.uint8),
        "flags": np.array([True, False]),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    mapped = MappedFile(path)
    for name, place in read_header(path).items():
        words = mapped.tensor(place.dtype, place.shape, place.start).words
        assert words.shape == tensors[name].shape
        assert words.tobytes() == tensors[name].tobytes()


def test_files_we_write_are_read_by_the_safetensors_library(tmp_path):
    path = tmp_path / "trunk.safetensors"
    header = encode_header([("b", "F32", (2, 2)), ("a", "F16", (3,)), ("none", "U8", (0,))], {"format": "pt"})
    assert len(header) % 64 == 0
    matrix = np.array([[1, 2], [3, 4]], np.float32)
    path.write_bytes(header + matrix.tobytes() + b"\x00\x3c" * 3)
    loaded = load_file(path)
    assert np.array_equal(loaded["b"], matrix)
    assert loaded["a"].tolist() == [1, 1, 1]
    assert read_header(path).keys() == {"a", "b", "none"}


def test_writing_to_a_view_changes_no_file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(16)))
    words = MappedFile(path).tensor("U8", (16,), 0).words
    words[0] = 99
    assert words[0] == 99
    assert path.read_bytes() == bytes(range(16))


def test_a_changed_file_is_noticed(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"0123456789")
    mapped = MappedFile(path)
    mapped.check_unchanged()
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match="was changed"):
        mapped.check_unchanged()
    path.unlink()
    with pytest.raises(ModelError, match="was removed"):
        mapped.check_unchanged()


@pytest.mark.skipif(sys.platform != "linux", reason="overcommit is Linux's")
def test_a_file_larger_than_memory_can_be_mapped(tmp_path):
    """Linux refuses a private writable mapping larger than memory unless told that it will not be filled."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    code = (
        "import sys; from pathlib import Path; from engine.models.formats.mapped_file import MappedFile;"
        "mapped = MappedFile(Path(sys.argv[1])); last = mapped.tensor('U8', (1,), mapped.size - 1);"
        "print(mapped.size, last.words[0])"
    )
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        try:
            file.truncate(2 * total)
        except OSError:
            pytest.skip("the file system has no sparse files of this size")
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert result.stdout.split() == [str(2 * total), "0"], result.stderr
