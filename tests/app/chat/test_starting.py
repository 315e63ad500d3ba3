"""How the chat begins: with the latest conversation, drawn at its end."""

from __future__ import annotations

from typing import Any

import pytest
from textual.geometry import Region

from app.chat.starting import Start
from app.conversations.store import ConversationStore
from tests.app.tui.screen_helpers import MakeApp, ready, wait_until


async def test_the_latest_chat_is_shown_at_its_end_and_a_scroll_is_drawn_whatever_happens_meanwhile(
    make_app: MakeApp, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, parent = store.create(model="starter").id, None
    for number in range(40):
        parent = store.add(chat, "assistant" if number % 2 else "user", f"{number} " + "words " * 90, parent=parent).id
    app = make_app()
    app._start = Start(latest=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        transcript = app.chat.transcript
        await wait_until(pilot, lambda: transcript.views and transcript.max_scroll_y > 0)
        assert transcript.following and transcript.scroll_y == transcript.max_scroll_y
        compositor = app.chat._compositor
        drawn: list[Region] = []
        draw = compositor.render_update

        def recorded(*arguments: Any, **values: Any) -> Any:
            drawn.extend(compositor._dirty_regions)
            return draw(*arguments, **values)

        monkeypatch.setattr(compositor, "render_update", recorded)
        await pilot.press("pageup")
        await wait_until(pilot, lambda: transcript.scroll_y < transcript.max_scroll_y)
        drawn.clear()
        # Textual takes what it is asked about between a scroll and a layout for what is already on the screen.
        transcript.scroll_end(animate=False, immediate=True)
        assert compositor.full_map
        app.chat.prompt.refresh(layout=True)
        await pilot.pause()
        assert any(region.contains_region(transcript.content_region) for region in drawn)
