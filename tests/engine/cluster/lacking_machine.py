"""A machine that lacks a model, for tests of what it takes from others, and what these are like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.head.lacked_model import _copy
from engine.cluster.head.model_sources import ModelSources
from engine.cluster.weights.own_shard import OwnShard
from engine.cluster.weights.source import RemoteSource, Tick
from engine.cluster.weights.transfer import Offer, Wanted, offer, stream
from engine.ipc.progress import ProgressCallback
from engine.models.store import local_models
from engine.models.store.local_models import ResolvedModel
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


class Having(RemoteSource):
    """A machine that has ``folder``, says of it what a test makes it say, and does to chunks on their way what a test
    makes it do."""

    def __init__(self, folder: Path, offered: Offer | None = None, name: str = "studio") -> None:
        super().__init__(name, offered or offer(folder, quiet, NAME))
        self.node_id = name
        self.folder = folder
        self.asked: list[str] = []
        """Keys of the items that were requested."""
        self.change: Callable[[bytes], bytes] = lambda data: data

    def sent(self, wanted: Sequence[Wanted], tick: Tick) -> Iterator[bytes]:
        self.asked += [self.offered.items[want.item].key for want in wanted]
        yield from map(self.change, stream(self.folder, self.offered, wanted))


class Machines(ModelSources):
    """The machines that have the model whole, and those that have parts of it."""

    def __init__(
        self, model: ResolvedModel, wholes: Sequence[Having], parts: Sequence[Having], progress: ProgressCallback
    ) -> None:
        super().__init__(None, model, progress)  # type: ignore[arg-type]
        self._machines = (list(wholes), list(parts))  # type: ignore[assignment]

    def _offered_by(self, machine: Any, tick: Tick) -> Any:
        self._asked.add(machine.node_id)
        return machine


def copied(
    *wholes: Having, parts: Sequence[Having] = (), progress: ProgressCallback = quiet, model: str = NAME
) -> Path | None:
    """The folder of the model, copied from these machines; None if they have not all of it."""
    resolved = local_models.resolve(model)
    found = _copy("me", resolved, Machines(resolved, wholes, parts, progress))
    return None if found is None else found[0]


def own_shard(*sources: Having) -> OwnShard:
    """A shard begun from ``sources``."""
    return OwnShard.begin(sources, "me", quiet, lambda: None)
