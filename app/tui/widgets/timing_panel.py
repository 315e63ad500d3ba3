"""The timing panel: where each token's time goes, layer by layer, and which experts it went to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from textual.binding import Binding, BindingType
from textual.content import Content

from app.tui.charts import heat_legend, heat_map, layer_bars, phase_summary, slowest_line
from app.tui.controller import ChatController
from app.tui.state import TimingArrived, Update
from app.tui.widgets.panel import Panel
from app.tui.widgets.rendered import Rendered
from engine.messages import Timing


class TimingPanel(Panel):
    PANEL = "timing"
    TITLE = "Timing"
    HINT = "f5: go here, to scroll · again: close"
    HELP = (
        "Where the time of a token goes. Each bar is a layer, split into attention, router, experts, exchange between "
        "machines, waiting, and the rest; `p` changes between decoding and reading the prompt. Below, how often each "
        "expert was used: rows are layers, columns experts. It is measured only while this panel is open."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "phase", "Prefill / decode", id="timing.phase"),
        Binding("escape", "screen.close_panel", "Close", id="panel.close"),
    ]

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._view = TimingView(controller.timing)

    def compose(self) -> Iterable[Rendered]:
        yield self._view

    def opened(self) -> None:
        self.app.run_worker(self._controller.link.watch(True), group="watch", exit_on_error=False)

    def closed(self) -> None:
        self.app.run_worker(self._controller.link.watch(False), group="watch", exit_on_error=False)

    def hear(self, update: Update) -> None:
        if isinstance(update, TimingArrived):
            self._view.show(update.timing)

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
        if timing.expert_use:
            lines += [Content(), Content.styled("Use of the experts", "bold"), heat_map(timing, width)]
            lines.append(heat_legend(width))
        return Content("\n").join(line for line in lines)
