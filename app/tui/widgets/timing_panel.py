"""The timing panel: where each token's time goes, layer by layer, and which experts it went to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.timer import Timer

from app.tui.charts import heat_legend, heat_map, layer_bars, movement, phase_summary, slowest_line
from app.tui.controller import ChatController
from app.tui.pacing import Pace
from app.tui.state import TimingArrived, Update
from app.tui.widgets.panel import Panel
from app.tui.widgets.rendered import Rendered
from engine.messages import Timing

UPDATE_S = 0.2
SLOWEST_S = 1.0
"""Between two drawings, the least and the most: they grow with what drawing costs."""


class TimingPanel(Panel):
    PANEL = "timing"
    TITLE = "Timing"
    HINT = "f5: go here, to scroll · again: close"
    HELP = (
        "Where the time of a token goes. Each bar is a layer, split into attention, router, experts, exchange between "
        "machines, waiting, and the rest; `p` changes between decoding and reading the prompt. Below, how often each "
        "expert was used: rows are layers, columns experts. Where GPU and CPU share the experts, it is said what was "
        "moved between them, and experts in GPU memory are marked. It is measured only while this panel is open."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "phase", "Prefill / decode", id="timing.phase"),
        Binding("escape", "screen.close_panel", "Close", id="panel.close"),
    ]

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._view = TimingView(controller.timing)
        self._experts = ExpertsView(controller.timing)
        self._latest = controller.timing
        self._pace = Pace(UPDATE_S, SLOWEST_S)
        self._timer: Timer | None = None

    def compose(self) -> Iterable[Rendered]:
        yield self._view
        yield self._experts

    def opened(self) -> None:
        self.app.run_worker(self._controller.link.watch(True), group="watch", exit_on_error=False)

    def closed(self) -> None:
        self.app.run_worker(self._controller.link.watch(False), group="watch", exit_on_error=False)

    def hear(self, update: Update) -> None:
        if isinstance(update, TimingArrived):
            self._latest = update.timing
            wait = self._pace.wait()
            if wait <= 0:
                self._draw()
            elif self._timer is None:
                self._timer = self.set_timer(wait, self._draw)

    def _draw(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        self._pace.drawn()
        if self._latest is not None:
            self._view.show(self._latest)
            self._experts.show(self._latest)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.call_after_refresh(self._experts.seen)

    def action_phase(self) -> None:
        self._view.change_phase()


class TimingView(Rendered):
    def __init__(self, timing: Timing | None) -> None:
        super().__init__(classes="timing")
        self._timing = timing
        self._phase: Literal["decode", "prefill"] = "decode"

    def show(self, timing: Timing) -> None:
        self._timing = timing
        self.remake()

    def change_phase(self) -> None:
        self._phase = "prefill" if self._phase == "decode" else "decode"
        self.remake()

    def make(self, width: int) -> Content:
        timing = self._timing
        if timing is None:
            return Content.assemble(
                ("Nothing was measured yet.\n\n", ""),
                ("While this panel is open the engine measures: ask something.", "$foreground-muted"),
            )
        phase = timing.decode if self._phase == "decode" else timing.prefill
        name = "Decoding" if self._phase == "decode" else "Prefill"
        parts = [
            phase_summary("Decode", timing.decode, width),
            phase_summary("Prefill", timing.prefill, width),
            Content.assemble((f"{name} by layer", "bold"), ("  ms a token", "$foreground-muted")),
            slowest_line(phase.layers),
            layer_bars(phase.layers, width),
        ]
        if phase.outside_layers:
            parts.append(
                Content.styled(
                    f"Outside the layers (embedding, head, sampling): {phase.outside_layers:.2f} ms",
                    "$foreground-muted",
                )
            )
        lines = [*parts[:1], Content(), parts[1], Content(), *parts[2:]]
        if timing.movement is not None:
            lines[4:4] = [movement(timing.movement, width), Content()]
        return Content("\n").join(line for line in lines)


class ExpertsView(Rendered):
    """The heat map. It is large and lies below what is looked at first: where nobody sees it, it is not drawn."""

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
        """The reader scrolled: draw what was left out."""
        if self._stale and self.is_on_screen:
            self._stale = False
            self.remake()

    def make(self, width: int) -> Content:
        timing = self._timing
        if timing is None or not timing.expert_use:
            return Content()
        title = Content.styled("Use of the experts", "bold")
        return Content("\n").join([Content(), title, heat_map(timing, width), heat_legend(timing, width)])


def _shape(timing: Timing | None) -> tuple[int, int, bool]:
    """What the height of the heat map depends on."""
    use = timing.expert_use if timing is not None else []
    return len(use), max(map(len, use), default=0), any(map(any, use))
