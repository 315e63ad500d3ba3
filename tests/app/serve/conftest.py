"""One server for all tests of the protocols."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from app.serve.asking import Defaults
from engine.ipc.messages import Sampling
from tests.app.serve.served import MODEL, TEMPLATE, Served, served
from tests.support.speaking_model import write_speaking_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Ends with its module, as other tests start engines of their own."""
    folder = tmp_path_factory.mktemp("served")
    model = write_speaking_model(folder / MODEL, TEMPLATE)
    with served(
        model, folder / "home", defaults=Defaults(Sampling(temperature=0.0, seed=1)), names=["other"]
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made
