"""Other GPU memory for experts: the model stays loaded where they share it, and is loaded again where they do not."""

from __future__ import annotations

import msgspec
import pytest

from app.chat.state import Phase
from app.conversations.store import ConversationStore
from engine.ipc.messages import Load, Resize
from tests.app.chat_helpers import Chat, running
from tests.app.fake_engine import FakeEngine


@pytest.mark.parametrize("shared", [True, False])
async def test_gpu_memory_changes_while_the_model_is_loaded(
    engine: FakeEngine, store: ConversationStore, shared: bool
) -> None:
    if shared:
        engine.facts = msgspec.structs.replace(engine.facts, policy="balanced", gpu_expert_bytes=1)
    async with running(Chat(engine, store)) as chat:
        controller = chat.controller
        await chat.until(lambda: controller.status.phase is Phase.READY)
        controller.change_settings({"gpu_expert_memory": 1.5})
        wanted = Resize if shared else Load
        await chat.until(lambda: bool(engine.sent(wanted)[-1:]) and controller.link.has(controller.options))
        assert len(engine.sent(Load)) == (1 if shared else 2)
        if shared:
            assert engine.sent(Resize)[-1].gpu_expert_bytes == 3 * 2**29
            facts = controller.status.facts
            assert facts is not None
            assert facts.gpu_expert_bytes == 3 * 2**29
        # Anything else is loaded again.
        controller.change_settings({"policy": "monde"})
        await chat.until(lambda: len(engine.sent(Load)) == (2 if shared else 3))
        await chat.until(lambda: controller.status.phase is Phase.READY)


async def test_memory_that_is_refused_leaves_it_as_it_was(engine: FakeEngine, store: ConversationStore) -> None:
    engine.facts = msgspec.structs.replace(engine.facts, policy="balanced", gpu_expert_bytes=1)
    async with running(Chat(engine, store)) as chat:
        controller = chat.controller
        await chat.until(lambda: controller.status.phase is Phase.READY)
        for times in (1, 2):
            engine.resize_error = "the GPU lacks 3 GB"
            controller.change_settings({"gpu_expert_memory": 64.0})
            await chat.until(lambda times=times: len(engine.sent(Resize)) == times)
            await chat.until(lambda: controller.status.phase is Phase.READY)
            await chat.until(lambda: controller.options.gpu_expert_memory is None)
        controller.submit("still there?")
        await chat.answered()
        assert len(engine.sent(Load)) == 1
