"""A machine that lacks a model, for tests of what it takes from others, and what these are like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.cluster.weights.transfer import Offer, Wanted, offer_whole, stream
from tests.support.progress import quiet

TinyModel = Callable[..., Path]
KEY, NAME = "owner--tiny", "owner/tiny"


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the machine that lacks the model."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "models").mkdir(parents=True)
    return tmp_path / "home" / "models"


@pytest.fixture
def there(tiny_model: TinyModel) -> Path:
    """The model where it is whole."""
    return tiny_model("mixtral", dtype="bfloat16", shards=True)


class Having:
    """A machine that has ``folder``, says of it what a test makes it say, and does to chunks on their way what a test
    makes it do."""

    name = "studio"

    def __init__(self, folder: Path, offered: Offer | None = None) -> None:
        self.folder = folder
        self.offered = offered or offer_whole(folder, quiet, NAME)
        self.asked: list[Wanted] = []
        self.change: Callable[[bytes], bytes] = lambda data: data

    @property
    def asked_keys(self) -> list[str]:
        return [self.offered.items[want.item].key for want in self.asked]

    def chunks(self, wanted: Sequence[Wanted]) -> Iterator[bytes]:
        self.asked += wanted
        yield from map(self.change, stream(self.folder, self.offered, wanted))
