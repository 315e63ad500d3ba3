"""Pictures of a session's questions: from the bytes of files to tokens, and to rows when a pass needs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ModelError
from engine.ipc.messages import Message
from engine.ipc.progress import ProgressCallback
from engine.pictures.decoding import PictureDecoder
from engine.pictures.folders import tower_bytes
from engine.pictures.picture import Picture
from engine.pictures.shown import ShownPictures
from engine.pictures.sight import Sight
from engine.planning.units import byte_size
from engine.system.free_memory import available_bytes

if TYPE_CHECKING:
    from engine.runtimes.torch.tower import VisionTower

StopCheck = Callable[[], bool]


class Looking:
    """Shows the pictures of messages to the model in ``folder``, whose trunk is on ``device`` (as in
    ``ModelFacts.device``). Not thread-safe.

    A file is decoded when it is asked about for the first time. The tower looks at a picture when a pass comes to its
    tokens and its rows are not kept from an earlier question.
    """

    def __init__(self, shown: ShownPictures, folder: Path, device: str = "cpu") -> None:
        self._shown = shown
        self._folder = folder
        # mlx's GPU runs no modules of torch.
        self._device = device if device.startswith("cuda") else "cpu"
        self._decoder: PictureDecoder | None = None
        self._digests: dict[bytes, bytes] = {}
        """The digest of each picture by that of its file."""
        self._asked: dict[bytes, bytes] = {}
        """The files of the current question by the digests of their pictures."""
        self._decoded: dict[bytes, Picture] = {}
        """Pictures that were decoded for the current question, by their digests."""

    @property
    def sight(self) -> Sight:
        """How the model sees."""
        return self._shown.sight

    def written(self, text: str, messages: Sequence[Message], decode: Callable[[Sequence[int]], str]) -> str:
        """``text``, which the chat template gave for ``messages``, with what the model has beside each picture.
        ``decode``: text of token ids, special ones spelled out."""
        sight = self._shown.sight
        if not sight.beside or not any(_files(messages)):
            return text
        mark = decode([sight.placeholder])
        return text.replace(mark, f"{sight.beside}{mark}{sight.beside}")

    def prompt(self, tokens: Sequence[int], messages: Sequence[Message], should_stop: StopCheck) -> list[int]:
        """``tokens``, which the chat template gave for ``messages``, with the tokens of the pictures.

        Raises ModelError (bad-input) if a picture cannot be read, or the template has no places for pictures; Cancelled
        as soon as ``should_stop()``.
        """
        files = list(_files(messages))
        self._asked, self._decoded = {}, {}
        self._expect_places(tokens, len(files))
        sight, given, prompt = self._shown.sight, iter(files), list[int]()
        for token in tokens:
            if not files or token != sight.placeholder:
                prompt.append(token)
                continue
            data = next(given)
            digest = self._digest_of(data, should_stop)
            self._asked[digest] = data
            prompt += [*sight.before, *self._shown.ids_of(digest), *sight.after]
        return prompt

    def count(self, tokens: Sequence[int], messages: Sequence[Message]) -> int:
        """Length of :meth:`prompt`, for which no picture is decoded whole. Raises ModelError as it."""
        files = list(_files(messages))
        self._expect_places(tokens, len(files))
        count, sight = len(tokens), self._shown.sight
        for data in files:
            size = self._decoding.size(data)
            count += len(sight.before) + sight.grid(size.height, size.width).tokens + len(sight.after) - 1
        return count

    def look(self, tokens: Sequence[int], progress: ProgressCallback) -> None:
        """Let the tower look at the pictures of the current question to which some of ``tokens`` belong, unless their
        rows are here.

        Raises what ``progress`` raises, and ModelError if the tower's weights are damaged or do not fit in memory.
        """
        needed, tower = set(tokens), None
        for digest, data in self._asked.items():
            if self._shown.ids_of(digest)[-1] not in needed or not self._shown.lacks(digest):
                continue
            picture = self._decoded.get(digest) or self._decoding.decode(data)
            if tower is None:
                tower = self._tower(progress)
            self._shown.put(digest, tower.rows(picture, progress))

    def _tower(self, progress: ProgressCallback) -> VisionTower:
        needed, free = tower_bytes(self._folder, self._shown.sight), available_bytes()
        if needed > free:
            raise ModelError(
                f"The part of the model that sees takes {byte_size(needed)} of memory, of which {byte_size(free)} are "
                "free; close other programs, or ask without pictures.",
                "memory",
            )
        # torch takes seconds to import, and other questions do not need it.
        from engine.runtimes.torch.tower import STAGE, VisionTower

        progress(STAGE, 0, 0, "")
        return VisionTower(self._folder, self._shown.sight, self._device)

    def turn_over(self) -> None:
        """Forget what only the current question needs."""
        self._asked, self._decoded = {}, {}
        self._shown.forget_old()

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()

    @property
    def _decoding(self) -> PictureDecoder:
        if self._decoder is None:
            self._decoder = PictureDecoder()
        return self._decoder

    def _digest_of(self, data: bytes, should_stop: StopCheck) -> bytes:
        """The digest of the picture in the file ``data``, which is shown from now on."""
        file = hashlib.sha256(data).digest()
        if file not in self._digests:
            picture = self._decoding.decode(data, should_stop)
            self._shown.show(picture)
            self._decoded[picture.digest] = picture
            self._digests[file] = picture.digest
        return self._digests[file]

    def _expect_places(self, tokens: Sequence[int], files: int) -> None:
        places = sum(token == self._shown.sight.placeholder for token in tokens)
        if files and places != files:
            raise ModelError(
                f"The model's chat template has places for {places} of {files} pictures, so it takes none; use a copy "
                "of the model with its own template.",
                "bad-input",
            )


def _files(messages: Sequence[Message]) -> Iterator[bytes]:
    return (picture.data for message in messages for picture in message.pictures)
