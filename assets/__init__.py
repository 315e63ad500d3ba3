"""Data files the program reads at run time: styles, the model catalogue, calibration prompts."""
