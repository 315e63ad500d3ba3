"""Pictures and a model that sees, for the tests of the app."""

from __future__ import annotations

import io

import msgspec
from PIL import Image

from app.attachments.attachment import AttachedPicture, Attachment
from engine.ipc.messages import ModelFacts
from engine.pictures.sight import Sight
from tests.app.fake_engine import FACTS

SIGHT = Sight("qwen3_5", placeholder=9, patch=16, merge=2, most=2048)
"""A token is a square of 32 pixels."""
SEEING: ModelFacts = msgspec.structs.replace(FACTS, sight=SIGHT)


def png(width: int = 64, height: int = 32, colour: str = "red", form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, form)
    return file.getvalue()


def picture(name: str, width: int = 64, height: int = 32, colour: str = "red") -> Attachment:
    return Attachment(name, picture=AttachedPicture(png(width, height, colour), width, height))
