"""Conversations of other programs. Their files are untrusted: every value is checked, and sizes are limited."""
