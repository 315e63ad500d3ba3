"""Panels beside the chat: beams, timing, and their charts."""
