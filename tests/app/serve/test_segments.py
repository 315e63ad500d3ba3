"""Single events of streams, and whom they must not confuse."""

from __future__ import annotations

import msgspec

from app.serve import anthropic_messages, openai_fields, openai_responses
from app.serve.anthropic_messages import _changed
from app.serve.replies import Refused, event_frame
from app.serve.segments import AnswerSegment, SegmentChange

BREAKING = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei\nj\rk"


def test_a_frame_is_one_line_for_clients_that_cut_at_every_line_end() -> None:
    for kind in ("", "delta"):
        *names, data = event_frame({"text": BREAKING}, kind).decode().rstrip("\n").splitlines()
        assert names == ([f"event: {kind}"] if kind else [])
        assert msgspec.json.decode(data.removeprefix("data: ")) == {"text": BREAKING}
    for failure in (openai_fields.failure, openai_responses.failure, anthropic_messages.failure):
        assert failure(Refused(BREAKING)).decode().count("\n") == len(failure(Refused(BREAKING)).decode().splitlines())


def test_thoughts_end_with_a_signature() -> None:
    thoughts, text = AnswerSegment(0, "thoughts", "hm"), AnswerSegment(1, "text", "So.")
    signed, stopped = (
        msgspec.json.decode(frame.partition(b"data: ")[2])
        for frame in _changed(SegmentChange("ended", thoughts)).rstrip().split(b"\n\n")
    )
    assert signed["delta"] == {"type": "signature_delta", "signature": ""} and signed["index"] == 0
    assert stopped == {"type": "content_block_stop", "index": 0}
    assert b"signature" not in _changed(SegmentChange("ended", text))
