"""The prompt settings of the shown chat: system prompt, persona, values of its own. No Textual."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence

from app.chat.saving import save_setup
from app.chat.state import StatusChanged, Update, UserNotice
from app.chat.thread import Thread
from app.conversations.store import ConversationStore, StoreError
from app.settings.layers import ADJUSTABLE, ChatValues, Preset, adjustable, effective, shown
from app.settings.personas import Persona
from app.settings.schema import Settings
from app.text_safety import sanitize


class ChatSetup:
    """Changes of the shown chat's setup. They hold from the next question on, and are on disk soon if the chat is.

    ``thread`` gives the shown chat and ``settings`` the person's settings. ``use_model`` loads a model until the
    program ends and returns what went wrong. ``run`` runs a coroutine in the background. ``changed`` is called after
    each change.
    """

    def __init__(
        self,
        store: ConversationStore,
        thread: Callable[[], Thread],
        settings: Callable[[], Settings],
        *,
        use_model: Callable[[str], str],
        run: Callable[[Coroutine[None, None, None]], None],
        changed: Callable[[], None],
        emit: Callable[[Update], None],
    ) -> None:
        self._store = store
        self._thread = thread
        self._settings = settings
        self._use_model = use_model
        self._run = run
        self._changed = changed
        self._emit = emit

    @property
    def options(self) -> Settings:
        """The settings with which the chat's next answer is asked for."""
        return effective(self._settings(), self.values)

    @property
    def values(self) -> ChatValues:
        return self._thread().values

    @property
    def system(self) -> str:
        """The chat's system prompt; empty if it has none."""
        return self._thread().system

    def set_system(self, text: str) -> None:
        """Use ``text`` as the chat's system prompt; one without words is none."""
        self._thread().system = sanitize(text) if text.strip() else ""
        self._save()

    def change(self, changes: Mapping[str, object]) -> None:
        """Set the chat's own values. Raises SettingError if one is not allowed; then nothing changes."""
        self._set(self.values.having(changes))

    def change_typed(self, name: str, text: str) -> str:
        """Change the value that a person calls ``name`` to what they typed as ``text``.

        ``default`` is the model's own value, and ``reset`` gives up the chat's own. Without a text nothing changes.
        Returns the value in effect as a line. Raises SettingError.
        """
        setting, word = adjustable(name), text.strip()
        if word.casefold() == "reset":
            self.reset([setting.key])
        elif word:
            plain = setting.optional and word.casefold() == "default"
            self.change({setting.key: None if plain else setting.parse(word)})
        line = f"{setting.label} of this chat: {shown(setting, self.options.value(setting.key))}."
        return line if word else f"{line} It can be {setting.allowed}; reset gives up the chat's own."

    def reset(self, keys: Sequence[str]) -> None:
        """Give up the chat's own values of ``keys``: the persona's or the settings' apply."""
        self._set(self.values.without(keys))

    def use_preset(self, preset: Preset) -> None:
        self._set(self.values.with_preset(preset, self._settings()))

    def use_persona(self, persona: Persona) -> str:
        """Replace the chat's system prompt and values by those of ``persona``, and load the persona's model.

        Returns an error message, or an empty text.
        """
        thread = self._thread()
        thread.system = persona.system
        thread.values = ChatValues(persona.name, persona.values_over(self._settings()))
        self._save()
        if persona.model and persona.model != self._settings().model:
            return self._use_model(persona.model)
        return ""

    def leave_persona(self) -> None:
        """Return to the settings' system prompt and values, as in a new chat."""
        self._thread().system = self._settings().system_prompt
        self._set(ChatValues())

    def as_persona(self, name: str) -> Persona:
        """The chat's system prompt, the model in use and the values that differ from the settings, as a persona.

        Raises SettingError for a name that no persona can have.
        """
        return Persona(name, self.system, self._settings().model, self.values.values).checked()

    def call(self, name: str) -> None:
        """The chat's setup is the persona ``name`` from now on: it was saved under this name."""
        self._set(ChatValues(name, self.values.values))

    def _set(self, values: ChatValues) -> None:
        self._thread().values = values
        self._save()

    def _save(self) -> None:
        self._changed()
        self._emit(StatusChanged())
        self._run(self._write(self._thread()))

    async def _write(self, thread: Thread) -> None:
        try:
            await save_setup(self._store, thread)
        except StoreError as error:
            self._emit(UserNotice(f"The change holds, but is not saved: {error}", "error"))


def setup_line(thread: Thread, settings: Settings) -> str:
    """The chat's persona, whether it has a system prompt, and the values that it sets itself; may be empty."""
    values = thread.values
    parts = [values.persona] if values.persona else []
    if thread.system:
        parts.append("system prompt")
    for setting in ADJUSTABLE:
        source = values.source(setting.key, settings)
        if source == "chat":
            value = effective(settings, values).value(setting.key)
            parts.append(f"● {setting.label.lower()} {shown(setting, value)}")
    return " · ".join(parts)
