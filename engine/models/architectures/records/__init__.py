"""The records of the families that run, in one file for each, or for those that differ in little.

A file of this folder with ``FAMILIES`` is found by itself (:mod:`engine.models.architectures.families`).
"""
