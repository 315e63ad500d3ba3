"""LaTeX's formulas are shown as Unicode, whatever a model writes between its dollars."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from app.tui.render.formula_symbols import symbol
from app.tui.render.formulas import display_formula, inline_formula
from app.tui.render.markdown import render_markdown
from tests.support.random_examples import examples


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("x^2 + y_1", "x² + y₁"),
        (r"\frac{a+b}{c}", "(a + b)/c"),
        (r"\frac12x", "1⁄2 x"),
        (r"x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}", "x = (−b ± √(b² − 4ac))/(2a)"),
        (r"\sum_{i=1}^{n} i^2 \le \sqrt{x+1}", "∑ᵢ₌₁ⁿ i² ≤ √(x + 1)"),
        (r"\int_0^\infty e^{-x^2}\,dx", "∫₀^∞ e^(−x²) dx"),
        (r"\lim_{x\to 0}\frac{\sin x}{x}=1", "lim_(x→0) (sin x)/x = 1"),
        (r"\left(\frac12\right)^2", "(1⁄2)²"),
        (r"\text{speed} = \frac{\text{distance}}{\text{time}}", "speed = distance⁄time"),
        (r"\hat{x}, \vec{v}, \overline{AB}", "x̂, v⃗, A̅B̅"),
        (r"\mathbb{R} \ni \alpha\beta \notin \mathcal{O}", "ℝ ∋ αβ ∉ 𝒪"),
        (r"A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "A = (1, 2; 3, 4)"),
        (r"a \equiv b \pmod{n}", "a ≡ b (mod n)"),
        (r"\{1,2,\ldots,n\}", "{1, 2, …, n}"),
        (r"1,000.5\%", "1,000.5%"),
        (r"f'(x) \not= 90^\circ", "f′(x) ≠ 90°"),
        (r"{n \over k} \binom{n}{k}", "n⁄k (n choose k)"),
        (r"\operatorname*{argmax}_\theta L(\theta)", "argmax_θ L(θ)"),
        (r"a \xrightarrow{f} b \quad \boxed{42}", "a →^f b [42]"),
        (r"\foo{x} + \ce{H2O}", r"\foo{x} + \ce{H2O}"),
    ],
)
def test_a_formula_in_one_line(source: str, shown: str) -> None:
    assert inline_formula(source) == shown


@pytest.mark.parametrize(
    "source", ["{{{x", "x^", "}", r"\frac{a}", r"\begin{tikzpicture}x\end{tikzpicture}", r"\end{a}"]
)
def test_what_cannot_be_read_stays_as_it_is_written(source: str) -> None:
    assert inline_formula(source) is None and display_formula(source, 80) is None
    assert render_markdown(f"a \\({source}\\) b", 80).plain == f"a \\({source}\\) b"


def test_matrices_and_cases_are_drawn_where_they_fit() -> None:
    matrix = r"A = \begin{bmatrix} 1 & 2 \\ 30 & 4 \end{bmatrix} v"
    assert display_formula(matrix, 40) == ["A = ⎡ 1   2 ⎤ v", "    ⎣ 30  4 ⎦"]
    assert display_formula(matrix, 12) == ["A = [1, 2; 30, 4] v"]
    cases = r"f(x) = \begin{cases} a & x > 0 \\ b & \text{if } x \le 0 \\ c & \text{else} \end{cases}"
    assert display_formula(cases, 40) == ["       ⎧ a  x > 0", "f(x) = ⎨ b  if x ≤ 0", "       ⎩ c  else"]
    assert display_formula(r"\begin{aligned} a &= b \\ c &= d + e \end{aligned}", 40) == ["a = b", "c = d + e"]


@pytest.mark.parametrize(
    "text",
    [
        "It costs $5 and $10.", "From $5 to $10/month, US$5-$10, $20 (or 4€/$5).", "$5 apples cost 10$ here",
        "$HOME/bin:$PATH and ${A}$B", r"\$x\$ is escaped", "`$x$` is code", "a $ b $ c", "$ x$ and $x $", "$one\ntwo$",
        "$$", "$$ alone", "paid $3, owed $4, left $5",
    ],
)  # fmt: skip
def test_prices_and_shells_are_no_formulas(text: str) -> None:
    assert render_markdown(text, 80).plain == text.replace("\\$", "$").replace("`", "")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("so $x^2$, $y$; ($z_1$).", "so x², y; (z₁)."),
        (r"\(x^2 \{a_b\}\) and \[\frac{a*b}{2}\], *no*", "x²{a_b} and (a * b)/2, no"),
        ("**$a_1 * b_2$** is *bold*", "a₁ * b₂ is bold"),
        ("The sum\n$$\n\\sum x_i\n- 1\n$$\nis it.", "The sum\n\n  ∑ xᵢ − 1\n\nis it."),
        ("\\[\nx = 1\n= y\n\\].", "  x = 1 = y."),
        ("1. one\n\n   $$x^2$$\n\n2. two", "1. one\n   \n     x²\n\n2. two"),
        ("\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}", "  a = b\n  c = d"),
        ("| f | g |\n|---|---|\n| $x^2$ | $a \\| b$ |", "f   g\n──  ───\nx²  a|b"),
        ("```\n$$x$$\n```", "▏$$x$$"),
    ],
)
def test_formulas_within_markdown(source: str, shown: str) -> None:
    assert [line.rstrip() for line in render_markdown(source, 60).plain.splitlines()] == [
        line.rstrip() for line in shown.splitlines()
    ]


PIECES = (
    "\\frac", "\\sqrt", "\\begin{matrix}", "\\end{matrix}", "\\begin{cases}", "\\end{cases}", "\\left", "\\right",
    "\\text",
    "\\foo", "\\over", "\\\\", "\\", "{", "}", "[", "]", "^", "_", "&", "'", "(", ")", "x", "12", "+", "-", "=", " ",
    "\n",
    "\\hat", "\\mathbb", "\\not", "\\binom", "\\alpha", "\\lrm", "\\NewLine", "\\substack", "\\overset", "~", "$", "*",
    "|",
)  # fmt: skip


@pytest.mark.soak
@settings(max_examples=examples(300))
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=60).map("".join), st.integers(8, 90))
def test_any_formula_can_be_shown(source: str, width: int) -> None:
    for shown in (inline_formula(source), *(display_formula(source, width) or [])):
        assert shown is None or "\n" not in shown
    for text in (f"${source}$", f"$$\n{source}\n$$", f"\\({source}\\)", f"| a |\n|---|\n| ${source}$ |"):
        content = render_markdown(text, width)
        assert not any(ord(character) < 32 and character not in "\n\t" for character in content.plain)


def test_no_command_is_a_character_that_cannot_be_seen() -> None:
    assert [symbol(name) for name in ("NewLine", "Tab", "lrm", "rlm", "zwj", "nbsp", "ZeroWidthSpace")] == [None] * 7


@pytest.mark.parametrize(
    "piece",
    ["x^{", "\\frac{a}{", "\\frac", "{", "}", "\\begin{matrix}a&b\\\\", "\\sqrt[", "\\left(", "x_1^2", "\\text{", "'",
     "&", "\\not", "\\hat", "\\foo{", "a\\\\", "\\begin{matrix}a\\\\b\\end{matrix}"],
)  # fmt: skip
def test_the_work_grows_with_the_length_and_no_faster(piece: str) -> None:
    once, twice = (_calls(lambda n=count: display_formula(piece * n, 80)) for count in (60, 120))  # type: ignore[misc]
    assert twice <= 2.6 * once + 400
    whole = display_formula(piece * 120, 80)
    assert sum(map(cell_len, whole or [])) <= 20_000


def _calls(work: Callable[[], object]) -> int:
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
