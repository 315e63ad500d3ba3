"""The mlx runtime: mlx-lm's model definitions, with our blocks in place of the routed experts.

Only :mod:`engine.runtimes.mlx.runtime`, :mod:`~engine.runtimes.mlx.families`, :mod:`~engine.runtimes.mlx.eligible` and
:mod:`~engine.runtimes.mlx.configuration` can be imported on a machine without mlx.
"""
