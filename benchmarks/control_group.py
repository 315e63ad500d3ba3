"""A memory limit for child processes that counts the pages of files too: a control group of Linux."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_VERSION_1, _VERSION_2 = "memory.limit_in_bytes", "memory.max"


def _own_groups() -> Iterator[tuple[Path, str]]:
    """The folders of this process's control groups that may limit memory, with the names of their limits."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _MOUNT / "memory" / path.lstrip("/"), _VERSION_1
        elif not controllers:
            yield _MOUNT / path.lstrip("/"), _VERSION_2


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[list[str]]:
    """The beginning of a command line that runs what follows with ``nbytes`` of memory, pages of files included.

    The group is made below this process's own, so every limit around it still holds, and removed at the end. Raises
    SystemExit where this process may not make one.
    """
    reasons = []
    for parent, limit in _own_groups():
        group = parent / f"privatellm-benchmark-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            reasons.append(f"{group}: {error.strerror}")
            continue
        try:
            # Version 2 hands a limit down only to a group whose parent has no processes: here the file is missing.
            with (group / limit).open("r+", encoding="ascii") as file:
                file.write(str(nbytes))
            yield ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
            return
        except OSError as error:
            reasons.append(f"{group / limit}: {error.strerror}")
        finally:
            group.rmdir()
    raise SystemExit(
        f"No control group with a memory limit can be made here ({'; '.join(reasons) or 'there are none'}); start this "
        f"within one: systemd-run --scope -p MemoryMax={nbytes} -p MemorySwapMax=0 COMMAND."
    )
