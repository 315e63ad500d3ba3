"""What loading a model would need and give, as the settings show it. Pure."""

from __future__ import annotations

from textual.content import Content

from app.text_safety import one_line
from app.tui.panels.charts import flowing
from app.tui.render.formatting import bar, rate, size
from app.tui.screens.ring_view import ring_lines
from engine.ipc.messages import DeviceMemory, Planned

_MUTED = "$foreground-muted"
_BAR = 12


def prediction(planned: Planned | str, width: int) -> Content:
    """``planned`` in a few lines: the shortfall if there is one, speed, memory of each device, reasons."""
    if isinstance(planned, str):
        return Content.assemble(("Not predicted: ", "bold"), (one_line(planned), "$text-error"))
    lines = [_speed(planned, width), *[_memory(device, width) for device in planned.memory]]
    if planned.ring is not None:
        # What the ring gives and each machine holds; the speed of the plan is the ring's, so it is said once.
        lines = [*ring_lines(planned.ring, width), *lines[1:]]
        if planned.basis:
            lines.append(Content.styled(one_line(planned.basis), _MUTED))
    if not planned.fits:
        lines.insert(0, _shortfall(planned))
    lines += [
        Content.assemble(
            (f"{one_line(choice.what)}: ", _MUTED), one_line(choice.choice), (_reason(choice.reason), _MUTED)
        )
        for choice in planned.choices
    ]
    return Content("\n").join(lines)


def _shortfall(planned: Planned) -> Content:
    missing = f"{size(planned.shortfall)} short" if planned.shortfall else "see below why"
    return Content.styled(f"{one_line(planned.model)} does not fit in memory: {missing}.", "$text-error bold")


def _speed(planned: Planned, width: int) -> Content:
    basis = Content.styled(one_line(planned.basis), _MUTED)
    if planned.tokens_per_s is None:
        items = [Content.styled("Speed not predicted", "bold"), basis]
    else:
        items = [
            Content.assemble(("Predicted ", "bold"), (f"about {rate(planned.tokens_per_s)}", "bold $text-success"))
        ]
        if planned.prefill_tokens_per_s:
            items.append(Content(f"prompts {rate(planned.prefill_tokens_per_s)}"))
        items.append(basis)
    return flowing([item for item in items if item.plain], width)


def _memory(device: DeviceMemory, width: int) -> Content:
    parts = {
        "trunk": device.trunk,
        "experts": device.experts,
        "keys and values": device.key_values,
        "workspace": device.workspace,
    }
    used = sum(parts.values())
    amount = f" {size(used)} of {size(device.total)}" if device.total else f" {size(used)}"
    head = [Content.assemble((one_line(device.device), "bold"), (amount, "$text-error" if used > device.free else ""))]
    if device.total:
        head.append(bar(used, device.total, _BAR))
        head.append(Content(f"{size(device.free)} free"))
    share = [f"{name} {size(nbytes)}" for name, nbytes in parts.items() if nbytes]
    return flowing([*head, Content.styled(" · ".join(share), _MUTED)] if share else head, width)


def _reason(reason: str) -> str:
    return f" – {one_line(reason)}" if reason else ""
