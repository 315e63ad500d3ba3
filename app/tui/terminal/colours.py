"""Text that can be read in every theme: its colours are moved until they stand out from what they are drawn on. Pure.

The measure is the contrast of the Web Content Accessibility Guidelines. A theme gives the hues; how light or dark text
is follows from the measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from textual.color import Color

LEAST_CONTRAST = 4.5
"""Ratio of luminances between a text and its background, at least (WCAG 2.1, level AA)."""
TEXTS = (
    "foreground", "foreground-muted", "foreground-disabled", "text-muted", "text-disabled", "text-primary",
    "text-secondary", "text-accent", "text-success", "text-warning", "text-error",
)  # fmt: skip
"""Variables with the colours of texts, each of which may be drawn on each of :data:`FIELDS`."""
FIELDS = ("background", "surface", "line-marked", "code-background")
"""Variables with backgrounds. ``line-marked`` is the marked line of a list, ``code-background`` that of code."""
PAIRS = (
    ("footer-foreground", "footer-background"),
    ("footer-key-foreground", "footer-background"),
    ("footer-description-foreground", "footer-background"),
    ("block-cursor-foreground", "block-cursor-background"),
    ("block-cursor-blurred-foreground", "block-cursor-blurred-background"),
    ("input-cursor-foreground", "input-cursor-background"),
    ("input-selection-foreground", "input-selection-background"),
)
"""Further variables of texts, each with the one background that it is drawn on."""
EDGES = ("surface-lighten-2", "surface-lighten-3")
"""Variables of frames, lines and scrollbars, all of which stand on the background."""
LEAST_EDGE, MOST_FOOTER = 1.6, 2.0
"""Ratios of luminances to the background: of an edge at least, of the line of keys at most."""
HEATS = 10
"""Number of steps of the map of expert use: ``heat-0`` to ``heat-9``, with the texts ``heat-text-0`` and so on."""

_WHITE, _BLACK = Color(255, 255, 255), Color(0, 0, 0)
_MARKED, _CODE = 0.10, 0.06
"""Fractions by which the two fields differ from the surface, towards white or black."""
_ANSI_COMMON = {
    "foreground-muted": "ansi_default", "foreground-disabled": "ansi_default", "text-muted": "ansi_default",
    "text-disabled": "ansi_default", "line-marked": "ansi_default", "code-background": "ansi_default",
    "code-edge": "ansi_default", "warning-muted": "ansi_default",
    "input-selection-background": "ansi_cyan", "input-selection-foreground": "ansi_black",
    "screen-selection-background": "ansi_cyan", "screen-selection-foreground": "ansi_black",
    **{f"heat-{step}": "ansi_default" for step in range(HEATS)},
    **{f"heat-text-{step}": "ansi_default" for step in range(HEATS)},
}  # fmt: skip
_ANSI_DARK = {
    "text-primary": "ansi_cyan", "text-error": "ansi_bright_red", "text-warning": "ansi_bright_yellow",
    "footer-key-foreground": "ansi_cyan", "primary": "ansi_cyan",
}  # fmt: skip
_ANSI_LIGHT = {
    "text-secondary": "ansi_blue", "text-warning": "ansi_red", "text-success": "ansi_blue",
}  # fmt: skip
"""Names among a terminal's own sixteen colours that stand out in most terminals' default palette."""


def contrast(one: Color, other: Color) -> float:
    """The ratio of the luminances of two opaque colours, from 1 to 21."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: Color) -> float:
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in color.normalized
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def legible(variables: Mapping[str, str], *, dark: bool) -> dict[str, str]:
    """A theme's variables with legible texts, and with those of :data:`FIELDS` and :data:`HEATS` that are our own.

    ``dark`` counts for themes of the terminal's own colours, whose values are not known.
    """
    if variables["background"].startswith("ansi"):
        return {**variables, **_ANSI_COMMON, **(_ANSI_DARK if dark else _ANSI_LIGHT)}
    colours = dict(variables)
    background = Color.parse(colours["background"])
    surface = background + Color.parse(colours["surface"])
    away = better(background)
    colours["line-marked"] = surface.blend(away, _MARKED).hex
    colours["code-background"] = colours["code-edge"] = surface.blend(away, _CODE).hex
    colours["screen-selection-background"] = colours["block-cursor-blurred-background"] = colours["line-marked"]
    fields = [background + Color.parse(colours[name]) for name in FIELDS]
    for name in TEXTS:
        colours[name] = _moved(seen(colours[name], background), fields).hex
    for name in EDGES:
        # Textual makes them lighter also where the background is light.
        if contrast(seen(colours[name], background), background) < LEAST_EDGE:
            colours[name] = _moved(background, [background], LEAST_EDGE).hex
    if contrast(seen(colours["footer-background"], background), background) > MOST_FOOTER:
        # The keys would be the brightest thing on the screen, and differ from their names by weight only.
        colours["footer-background"], colours["footer-key-foreground"] = colours["panel"], colours["accent"]
        colours["footer-foreground"] = colours["footer-description-foreground"] = colours["foreground"]
    for text, field in PAIRS:
        on = seen(colours[field], surface)
        colours[field], colours[text] = on.hex, _moved(seen(colours[text], on), [on]).hex
    accent = Color.parse(colours["accent"])
    for step in range(HEATS):
        heat = background.blend(accent, (step + 0.5) / HEATS)
        colours[f"heat-{step}"], colours[f"heat-text-{step}"] = heat.hex, better(heat).hex
    return colours


def better(field: Color) -> Color:
    """Black or white, whichever stands out more from ``field``."""
    return max(_WHITE, _BLACK, key=lambda color: contrast(color, field))


def seen(value: str, field: Color) -> Color:
    """The opaque colour of a variable's ``value`` on ``field``: ``#RRGGBBAA``, ``#RRGGBB 30%``, ``auto 60%``."""
    name, _, share = value.partition(" ")
    alpha = float(share.rstrip("%")) / 100 if share else 1.0
    color = field.get_contrast_text(1.0) if name == "auto" else Color.parse(name)
    return field + color.multiply_alpha(alpha)


def _moved(text: Color, fields: Iterable[Color], least: float = LEAST_CONTRAST) -> Color:
    """``text``, moved towards black or white until its contrast with all ``fields`` is ``least``."""
    fields = list(fields)
    away = better(fields[-1])
    for step in range(101):
        color = text.blend(away, step / 100)
        if all(contrast(color, field) >= least for field in fields):
            return color
    return away
