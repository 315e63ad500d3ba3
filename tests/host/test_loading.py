"""What loading says about a model's own settings."""

from __future__ import annotations

from engine.loading import settings_not_applied


def test_a_repetition_penalty_that_is_not_applied_is_said() -> None:
    assert settings_not_applied({}) == settings_not_applied({"repetition_penalty": 1.0}) == []
    (line,) = settings_not_applied({"repetition_penalty": 1.05})
    assert "repetition_penalty of 1.05 is not applied" in line
