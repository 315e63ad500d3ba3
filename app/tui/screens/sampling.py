"""How the shown chat's answers are sampled: each value, where it comes from, presets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from app.chat.controller import ChatController
from app.chat.state import StatusChanged, Update
from app.settings.fields import Setting, Value
from app.settings.layers import ADJUSTABLE, PRESETS, SAMPLED, Source, preset_in, value_in_effect
from app.text_safety import one_line
from app.tui.keymap import bound, key
from app.tui.render.key_footer import KeyFooter
from app.tui.screens.value_editor import ValueEditor, ValueRow


class ChatValueList:
    """The shown chat's values for a ValueEditor."""

    def __init__(self, controller: ChatController) -> None:
        self._controller = controller

    def rows(self) -> Sequence[ValueRow]:
        setup, settings = self._controller.setup, self._controller.options
        options, facts = setup.options, self._controller.status.facts
        own = facts.sampling if facts is not None else None
        rows = []
        for setting in ADJUSTABLE:
            source = setup.values.source(setting.key, settings)
            idle = setting.key in SAMPLED and options.beams > 1
            idle |= setting.key == "length_penalty" and options.beams == 1
            value = value_in_effect(setting.key, options, own)
            if value is None and setting.key == "max_tokens" and facts is not None:
                value = facts.answer_limit
            words = _words(source, setting, value, setup.values.persona, defaults_known=facts is not None)
            rows.append(ValueRow(setting, value, words, source in ("chat", "persona"), idle))
        return rows

    def change(self, key: str, value: Value) -> None:
        self._controller.setup.change({key: value})

    def reset(self, key: str) -> None:
        self._controller.setup.reset([key])


def _words(source: Source, setting: Setting, value: Value, persona: str, *, defaults_known: bool) -> str:
    """The origin of ``value``, as shown. ``defaults_known``: the model's own defaults are known."""
    match source:
        case "chat":
            return "● chat"
        case "persona":
            return f"◆ {persona}"
        case "settings":
            return "  settings"
        case _ if setting.key == "seed":
            return "  new each time"
        case _ if setting.key == "max_tokens" and value is None and defaults_known:
            return "  no limit"
        case _:
            return "  from model" if setting.optional or setting.default == "auto" else "  default"


class SamplingScreen(Screen[None]):
    """The values of the shown chat. Each change holds from the next question on."""

    HELP = (
        "These values hold for this chat only, from the next question on. A new chat begins with the settings'. "
        "`●` marks a value of this chat, `◆` one of its persona. `enter` changes the marked value, or just type a "
        "number; `backspace` gives up the chat's own value. `e`, `b` and `c` set the presets: exact, balanced, "
        "creative. `/set temperature 0.2` does the same from the prompt."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        *[
            Binding(preset.name[0], f"preset({index})", preset.name.title(), id=f"sampling.{preset.name}")
            for index, preset in enumerate(PRESETS)
        ],
        Binding("escape," + bound("sampling"), "dismiss(None)", "Close", key_display="esc", id="sampling.close"),
        Binding(bound("help"), "app.help", "Help", id="sampling.help"),
    ]

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._editor = ValueEditor(ChatValueList(controller))

    def compose(self) -> ComposeResult:
        yield Static("Sampling of this chat", classes="screen-title", markup=False)
        yield Static("", id="presets", markup=False)
        yield self._editor
        yield Static("", id="sampling-note", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self._editor.focus_list()
        self._draw()

    def handle_update(self, update: Update) -> None:
        """The controller changed something."""
        if isinstance(update, StatusChanged):
            self._editor.draw()
            self._draw()

    def _draw(self) -> None:
        options = self._controller.setup.options
        active = preset_in(options)
        words = [
            Content.assemble(
                ("● " if preset is active else "  ", "$text-accent"),
                (preset.name[0], "bold underline"),
                (preset.name[1:], "bold" if preset is active else ""),
                "  ",
            )
            for preset in PRESETS
        ]
        about = one_line(active.about) if active is not None else ""
        self.query_one("#presets", Static).update(Content.assemble(*words, (about, "$foreground-muted")))
        note = self.query_one("#sampling-note", Static)
        note.display = options.beams > 1
        note.update(
            f"With {options.beams} beams nothing is sampled: temperature, limits and seed have no effect. "
            f"{key('beams')} in the chat shows what beams cost."
        )

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return not self._editor.is_typing or action not in ("preset", "dismiss")

    def action_preset(self, index: int) -> None:
        self._controller.setup.use_preset(PRESETS[index])
