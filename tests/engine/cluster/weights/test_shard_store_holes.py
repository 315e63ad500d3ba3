"""Parts of files that are given back to the disk, where the file system can do that."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from engine.cluster.weights import shard_store as holes

BYTES = 1 << 20


def test_what_is_given_back_reads_as_zeros(tmp_path: Path) -> None:
    (tmp_path / "experts").write_bytes(b"\1" * BYTES)
    freed = holes.punch(tmp_path, [("experts", 0, BYTES // 2)])
    content = (tmp_path / "experts").read_bytes()
    assert len(content) == BYTES and content[BYTES // 2 :] == b"\1" * (BYTES // 2)
    assert freed in (0, BYTES // 2)
    assert content[: BYTES // 2] == (bytes(BYTES // 2) if freed else b"\1" * (BYTES // 2))


@pytest.mark.parametrize("code", ["ENOTSUP", "EOPNOTSUPP", "EINVAL", "ENOTTY", "ENOSYS"])
def test_where_it_cannot_be_done_the_bytes_stay(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on exFAT or SMB on a Mac, where the number of ENOTSUP is another than that of EOPNOTSUPP."""

    def refuse(descriptor: int, start: int, stop: int) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(holes, "_punch_mac", refuse)
    monkeypatch.setattr(sys, "platform", "darwin")
    (tmp_path / "experts").write_bytes(b"\1" * BYTES)
    assert holes.punch(tmp_path, [("experts", 0, BYTES)]) == 0
    assert (tmp_path / "experts").read_bytes() == b"\1" * BYTES
    assert errno.ENOTSUP in holes._UNABLE
