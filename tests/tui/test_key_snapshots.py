"""How the popup of completions looks. `pytest --snapshot-update` takes what is drawn now as right."""

from __future__ import annotations

from collections.abc import Callable

from screen_helpers import MakeApp, wait_until
from test_snapshots import app_of, at_sizes, ready
from textual.pilot import Pilot

from app.tui.chat.completion import CompletionPopup

Compare = Callable[..., bool]


@at_sizes((80, 24), (40, 20))
def test_slash_completion(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("slash", "b")
        popup = app_of(pilot).screen.query_one(CompletionPopup)
        await wait_until(pilot, lambda: popup.display)
        await pilot.press("down")

    assert snap_compare(make_app(), terminal_size=size, run_before=before)
