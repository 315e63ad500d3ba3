"""How long the screen stalls while an answer of one kind grows: a list, a fence, a table, plain paragraphs.

    python -m benchmarks.stalls

The real transcript runs without a terminal, 120 columns by 40 lines, and gets a token at a time as fast as the screen
takes them. A stall is the time in which the event loop does nothing else; what is typed meanwhile is drawn after it. A
task that wants to run every millisecond measures it as processor time of the loop's thread between two runs, so that
other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence

from textual.app import ComposeResult

from app.chat.state import Entry
from app.tui.chat.transcript import UPDATE_S, Transcript
from app.tui.render.highlighting import Highlighter
from app.tui.render.thumbnails import Thumbnails
from app.tui.terminal.application import TerminalApp
from benchmarks.measuring import table

MOST_MS = 50.0
"""Longest stall, in milliseconds, that nobody who types notices."""
PROBE_S = 0.001
"""Seconds between two looks of the probe."""
ITEMS = 60
"""Items of the list, lines of the fence, rows of the table, and sentences of the paragraphs."""
KINDS = {
    "paragraphs": "Rain falls upon the roof and nobody minds it **very** much at all.\n\n",
    "list": "- an item with `code` and **bold** words, long enough to be wrapped where the terminal is narrow\n",
    "nested list": "- an item\n  - below it another one, with *words* of its own\n",
    "fence": "    value = function(argument, another={number})  # a comment\n",
    "table": "| a cell | another **cell** | {number} |\n",
}
BEGINNINGS = {"fence": "```python\ndef function():\n", "table": "| first | second | third |\n|---|---|--:|\n"}


class TranscriptApp(TerminalApp):
    """A transcript alone, in the colours of the chat."""

    CSS = "Transcript { height: 1fr; layout: stream; } .message, .tail { height: auto; }"

    def compose(self) -> ComposeResult:
        self.highlighter = Highlighter()
        yield Transcript(self.highlighter, Thumbnails(self._write_sequences, self.sixels), id="transcript")

    async def keep(self) -> None:
        """There is nothing to save."""


def tokens(kind: str) -> list[str]:
    """The text of ``kind``, four characters at a time."""
    text = BEGINNINGS.get(kind, "") + "".join(KINDS[kind].format(number=number) for number in range(ITEMS))
    return [text[start : start + 4] for start in range(0, len(text), 4)]


async def _probe(found: list[float]) -> None:
    while True:
        before = time.thread_time()
        await asyncio.sleep(PROBE_S)
        found.append(1000 * (time.thread_time() - before))


async def measure(pieces: Sequence[str]) -> list[float]:
    """The stalls in milliseconds while ``pieces`` arrive, longest last."""
    app, found = TranscriptApp(), list[float]()
    async with app.run_test(size=(120, 40)) as pilot:
        transcript = app.query_one(Transcript)
        entry = Entry("assistant", "", state="writing", tokens_per_s=30.0)
        await transcript.show_path([Entry("user", "go"), entry])
        await pilot.pause()
        probe = asyncio.create_task(_probe(found))
        for piece in pieces:
            entry.content += piece
            transcript.change(entry, live=True)
            await asyncio.sleep(UPDATE_S / 8)
        entry.state = "complete"
        transcript.change(entry, live=False)
        await asyncio.sleep(2 * UPDATE_S)
        probe.cancel()
        await app.highlighter.close()
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=argparse.FileType("w"), help="write the numbers to this file")
    chosen = parser.parse_args(arguments)
    rows, result = [], {}
    for kind in KINDS:
        asyncio.run(measure(tokens(kind)[:20]))  # what is imported and compiled once
        gc.freeze()  # as the chat does when it starts
        stalls = asyncio.run(measure(tokens(kind)))
        median, late = stalls[len(stalls) // 2], stalls[int(0.99 * len(stalls))]
        result[kind] = {"median_ms": median, "p99_ms": late, "longest_ms": stalls[-1]}
        verdict = "met" if stalls[-1] <= MOST_MS else "not met"
        rows.append([kind, f"{median:.1f} ms", f"{late:.1f} ms", f"{stalls[-1]:.1f} ms", verdict])
    print("\n".join(table(["what grows", "median", "99 of 100", "longest", f"longest ≤ {MOST_MS:.0f} ms"], rows)))
    if chosen.json:
        json.dump(result, chosen.json, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
