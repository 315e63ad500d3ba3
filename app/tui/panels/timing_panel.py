"""The timing panel: where each token's time goes, layer by layer, and which experts it went to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from textual.binding import Binding, BindingType
from textual.content import Content

from app.chat.controller import ChatController
from app.chat.state import TimingArrived, Update
from app.chat.words import share_words, slowest_layer_words
from app.text_safety import one_line
from app.tui.panels.charts import (
    heat_legend,
    heat_map,
    layer_bars,
    movement,
    node_line,
    overview,
    phase_summary,
)
from app.tui.panels.panel import Panel
from app.tui.render.rendered import Rendered
from app.tui.render.streaming import PacedDrawing
from engine.ipc.messages import ExpertMovement, PhaseTimes, Timing

UPDATE_S = 0.2
SLOWEST_S = 1.0
"""Seconds between two drawings, at least and at most."""


class TimingPanel(Panel):
    PANEL = "timing"
    TITLE = "Timing"
    HELP = (
        "Shows where the time of each token goes. Each bar is a layer, divided into attention, router, experts, "
        "exchange between machines, waiting, and the rest. `p` switches between decoding and prefill. The map below "
        "shows how often each expert was used: rows are layers, columns are experts. If GPU and CPU share the "
        "experts, the bytes moved between them are shown, and experts in GPU memory are marked. If several answers "
        "are under way, the rows of a pass and who has them stand first. In a ring, `n` goes from the overview, "
        "which names the slowest node of each layer, to the single nodes. Times are measured only while this panel "
        "is open. If it covers the conversation, measuring goes on after you close it. Measuring slows steps down on "
        "a GPU, so only a few steps a second are measured there."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "phase", "Prefill / decode", id="timing.phase"),
        Binding("n", "node(1)", "Next node", id="timing.node"),
        Binding("N", "node(-1)", "Node before", show=False, id="timing.node_before"),
        Binding("escape", "screen.close_panel", "Close", id="panel.close"),
    ]

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._view = TimingView(controller.timing, self)
        self._experts = ExpertsView(controller.timing)
        self._latest = controller.timing
        self._drawing = PacedDrawing(self, self._draw, UPDATE_S, SLOWEST_S)

    def compose(self) -> Iterable[Rendered]:
        yield self._view
        yield self._experts

    def opened(self) -> None:
        self.app.run_worker(self._controller.link.watch(True), group="watch", exit_on_error=False)

    def closed(self) -> None:
        if self.covers:
            return  # There is no prompt while it is open: the measuring goes on for the next question.
        self.app.run_worker(self._controller.link.watch(False), group="watch", exit_on_error=False)

    def handle_update(self, update: Update) -> None:
        if isinstance(update, TimingArrived):
            self._latest = update.timing
            self._drawing.want()

    def _draw(self) -> None:
        self._drawing.drawn()
        if self._latest is not None:
            if (len(self._latest.nodes) > 1) != self._view.has_nodes:
                self.refresh_bindings()
            self._view.show(self._latest)
            self._experts.show(self._latest)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.call_after_refresh(self._experts.seen)

    def action_phase(self) -> None:
        self._view.change_phase()

    def action_node(self, offset: int) -> None:
        self._view.change_node(offset)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "node" or bool(self._latest is not None and len(self._latest.nodes) > 1)


class TimingView(Rendered):
    def __init__(self, timing: Timing | None, panel: Panel) -> None:
        super().__init__(classes="timing")
        self._timing = timing
        self._panel = panel
        self._phase: Literal["decode", "prefill"] = "decode"
        self._node: int | None = None
        """Rank of the shown node of a ring; None: the overview."""

    @property
    def has_nodes(self) -> bool:
        return self._timing is not None and len(self._timing.nodes) > 1

    def show(self, timing: Timing) -> None:
        self._timing = timing
        if self._node is not None and self._node >= len(timing.nodes):
            self._node = None
        self.remake()

    def change_phase(self) -> None:
        self._phase = "prefill" if self._phase == "decode" else "decode"
        self.remake()

    def change_node(self, offset: int) -> None:
        """Go from the overview through the nodes and back to it."""
        if self._timing is None or not self.has_nodes:
            return
        places = len(self._timing.nodes) + 1
        place = ((0 if self._node is None else self._node + 1) + offset) % places
        self._node = place - 1 if place else None
        self.remake()

    def make(self, width: int) -> Content:
        content = self._measured(width)
        if self._timing is None:
            return content
        shared = share_words(self._timing)
        if shared:
            content = Content("\n").join(
                [Content.styled(shared[0], "bold"), *map(Content, shared[1:]), Content(), content]
            )
        if not self._timing.sampled:
            return content
        note = "Only a few steps a second are measured, because measuring slows them down on a GPU."
        return Content("\n").join([content, Content(), Content.styled(note, "$foreground-muted")])

    def _measured(self, width: int) -> Content:
        timing = self._timing
        if timing is None:
            how = (
                "The engine measures from now on. Close this panel and ask something."
                if self._panel.covers
                else "The engine measures while this panel is open. Ask something."
            )
            return Content.assemble(
                ("Nothing has been measured yet.\n\n", ""),
                (how, "$foreground-muted"),
            )
        if not timing.nodes:
            return self._one(timing.decode, timing.prefill, timing.movement, width)
        if not self.has_nodes:
            (node,) = timing.nodes
            whose = Content.assemble(("Computed by ", "$foreground-muted"), (one_line(node.name), "bold"))
            return Content("\n").join([whose, Content(), self._one(node.decode, node.prefill, None, width)])
        head = node_line(timing.nodes, self._node, width)
        if self._node is None:
            title = f"{'Decoding' if self._phase == 'decode' else 'Prefill'} by node"
            heading = Content.assemble((title, "bold"), ("  ms per token", "$foreground-muted"))
            return Content("\n").join([head, Content(), heading, overview(timing.nodes, self._phase, width)])
        node = timing.nodes[self._node]
        movement = timing.movement if self._node == 0 else None
        return Content("\n").join([head, Content(), self._one(node.decode, node.prefill, movement, width)])

    def _one(self, decode: PhaseTimes, prefill: PhaseTimes, moved: ExpertMovement | None, width: int) -> Content:
        """One machine: both phases, then the layers of one of them."""
        phase = decode if self._phase == "decode" else prefill
        name = "Decoding" if self._phase == "decode" else "Prefill"
        slowest = slowest_layer_words(phase.layers)
        parts = [
            *([Content.styled(f"{slowest}.", "$text-warning"), Content()] if slowest else []),
            phase_summary("Decode", decode, width),
            Content(),
            phase_summary("Prefill", prefill, width),
            Content(),
            *([movement(moved, width), Content()] if moved is not None else []),
            Content.assemble((f"{name} by layer", "bold"), ("  ms per token", "$foreground-muted")),
            layer_bars(phase.layers, width),
        ]
        if phase.outside_layers:
            outside = f"Outside the layers (embedding, head, sampling): {phase.outside_layers:.2f} ms"
            parts.append(Content.styled(outside, "$foreground-muted"))
        return Content("\n").join(parts)


class ExpertsView(Rendered):
    """The heat map. It is large and below the fold, so it is drawn only while it is visible."""

    def __init__(self, timing: Timing | None) -> None:
        super().__init__(classes="experts")
        self._timing = timing
        self._shape = _shape(timing)
        self._stale = False

    def show(self, timing: Timing) -> None:
        same = _shape(timing) == self._shape
        self._timing, self._shape = timing, _shape(timing)
        self._stale = same and not self.is_on_screen
        if not self._stale:
            self.remake()

    def seen(self) -> None:
        """The reader scrolled: draw the map if it is visible now and out of date."""
        if self._stale and self.is_on_screen:
            self._stale = False
            self.remake()

    def make(self, width: int) -> Content:
        timing = self._timing
        if timing is None or not timing.expert_use:
            return Content()
        title = Content.styled("Expert use", "bold")
        return Content("\n").join([Content(), title, heat_map(timing, width), heat_legend(timing, width)])


def _shape(timing: Timing | None) -> tuple[int, int, bool]:
    """The values that the height of the heat map depends on."""
    use = timing.expert_use if timing is not None else []
    return len(use), max(map(len, use), default=0), any(map(any, use))
