"""``bench beams``: what a step costs with 1, 4, 8 and 12 rows, as a beam search of that width has them."""

from __future__ import annotations

from engine.bench.setting import WARM_UP_STEPS, Setting, median, random_tokens, read_prompt, steps
from engine.calibration.spread import Spread, milliseconds, per_second
from engine.ipc.messages import BenchResult

WIDTHS = (1, 4, 8, 12)
STEPS = 6


def bench_beams(setting: Setting, request_id: int) -> BenchResult:
    """Milliseconds per step of each width, and relative to one row of the same round. Raises ModelError, Cancelled."""
    prompt = random_tokens(1, setting.prompt_tokens(STEPS + WARM_UP_STEPS), setting.facts.vocabulary)
    seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    total = setting.rounds * len(WIDTHS)
    for index in range(setting.rounds):
        single = setting.model.start()
        read_prompt(setting, single, prompt)
        turned = index % len(WIDTHS)  # a slow moment of the machine should not always meet the same width
        for place, width in enumerate(WIDTHS[turned:] + WIDTHS[:turned]):
            setting.report(f"stepping {width} row{'s' * (width != 1)}", index * len(WIDTHS) + place, total, "")
            rows = single.fan_out(width)
            seconds[width].append(median(steps(setting, rows, STEPS, seed=100 + 1000 * width)))
            del rows
        del single
    relative = {
        width: [many / one for many, one in zip(found, seconds[1], strict=True)] for width, found in seconds.items()
    }
    return BenchResult(
        id=request_id,
        title=f"Beam steps, {setting.facts.name}",
        columns=["rows", "ms/step", "relative to 1 row", "tokens/s, all rows"],
        rows=[
            [width, str(milliseconds(found)), str(Spread.of(relative[width])), str(per_second(found, width))]
            for width, found in seconds.items()
        ],
        notes=[
            f"Rows of different tokens after a common prompt of {len(prompt)}; a round is the median of {STEPS} steps. "
            "Beams that resemble one another use fewer experts and cost less."
        ],
        data={
            "prompt_tokens": len(prompt),
            "steps_per_round": STEPS,
            "seconds_per_step": {str(width): found for width, found in seconds.items()},
            "relative_to_one_row": {str(width): found for width, found in relative.items()},
        },
    )
