"""The chat without its screen: questions, answers, the engine behind them, and what is on disk. No Textual."""
