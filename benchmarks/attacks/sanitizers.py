"""The kernels' attacks again, with AddressSanitizer and UndefinedBehaviorSanitizer in builds of every instruction set.

The instructions are SIMDe's, in plain C (Debian: libsimde-dev), so every set runs on every processor, and all of its
memory accesses are checked. Run ``python -m benchmarks.attacks.sanitizers --calls 200000``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.moe.kernels import bindings

NATIVE = Path(bindings.__file__).parent / "native"
EMULATED = Path(__file__).parent / "emulated"
HEADERS = Path("/usr/include/simde")

FLAGS = ("-std=c11", "-O1", "-g1", "-w", "-Wno-psabi", "-fPIC", "-pthread", "-fsanitize=address,undefined",
         "-fno-sanitize-recover=undefined")  # fmt: skip
CHANGES: Mapping[str, str] = {
    # Functions that are inlined into each other for each format would take minutes to compile with their checks.
    r"#define ALWAYS_INLINE static inline .*": "#define ALWAYS_INLINE static __attribute__((noinline, unused))",
    # What keeps a compiler from moving registers about has no meaning for vectors in memory.
    r'__asm__\("" : "\+x"[^;\n]*\)': "(void)0",
    # The compiler's own use of vectors stays within those that every processor has.
    r"#pragma GCC target\(.*\)": "",
}
"""Changes of the sources, as expressions and what is put in their places."""
X86 = {r'__builtin_cpu_supports\("\w+"\)': "1", r"has_half_conversions\(\)\)": "1)"}
ARM = {
    r"defined\(__x86_64__\)": "0",
    r"defined\(__aarch64__\)": "1",
    r"#include <(asm/hwcap|sys/auxv).h>": "",
    r'__asm__ __volatile__\("isb" ::: "memory"\)': "(void)0",
    r"\(getauxval\(\w+\) & \w+\) != 0": "1",
}
BUILDS: Mapping[str, Mapping[str, str]] = {
    "x86": X86,
    "x86 without products of bytes": {r'__builtin_cpu_supports\("avx512vnni"\)': "0", **X86},
    "ARM": ARM,
    "ARM without matrix products": {r"\(getauxval\(AT_HWCAP2\) & \w+\) != 0": "0", **ARM},
    "ARM without products of bytes": {r"\(getauxval\(\w+\) & \w+\) != 0": "0", **ARM},
}
"""Further changes of each build, by its name."""

_PROGRAM = """
import sys
from pathlib import Path
from benchmarks.attacks import campaign
from engine.moe.kernels import bindings
campaign.MOST_DATA = -1  # what the sanitizers keep of each byte of the address space counts, too
bindings.path = lambda: Path(sys.argv[1])
print("instruction sets:", *bindings.available(), file=sys.stderr)
from benchmarks.attacks.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


def missing() -> str:
    """What this machine lacks for such a build; empty if it lacks nothing."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        return "there is no gcc on Linux here"
    return "" if HEADERS.is_dir() else "SIMDe's headers are not here (Debian: libsimde-dev)"


def build(name: str, folder: Path) -> Path:
    """The library of the build ``name``, made in ``folder``. Raises CalledProcessError if it cannot be compiled."""
    changes = {**CHANGES, **BUILDS[name]}
    for source in NATIVE.iterdir():
        text = source.read_text("utf-8")
        for expression, replacement in changes.items():
            text = re.sub(expression, replacement, text)
        (folder / source.name).write_text(text, "utf-8")

    return linked(folder, sorted(folder.glob("*.c")))


def linked(folder: Path, changed: Sequence[Path]) -> Path:
    """The library of all sources in ``folder``, of which ``changed`` are compiled. Raises CalledProcessError."""

    def compiled(source: Path) -> None:
        include = [f"-I{EMULATED}", f"-I{folder}"]
        subprocess.run(["gcc", *FLAGS, *include, "-c", str(source), "-o", str(source.with_suffix(".o"))], check=True)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(compiled, changed))
    library = folder / "kernels.so"
    objects = map(str, sorted(folder.glob("*.o")))
    subprocess.run(["gcc", *FLAGS, "-shared", "-o", str(library), *objects, "-lm"], check=True)
    return library


def attack(library: Path, calls: int, seed: int) -> subprocess.CompletedProcess[str]:
    """``calls`` calls of ``library``: three of the experts for two products of matrices."""
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime.stdout.strip(),
        # Python itself leaks at its end.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", _PROGRAM, str(library), "--seed", str(seed)]
    parts = ["--only", "kernels", "--part", str(calls / 50_000)]
    return subprocess.run([*command, *parts], env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000, help="calls in all, shared among the builds")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if missing():
        print(f"Nothing was built: {missing()}.", file=sys.stderr)
        return 1
    status = 0
    for name in BUILDS:
        with tempfile.TemporaryDirectory() as folder:
            library = build(name, Path(folder))
            done = attack(library, arguments.calls // len(BUILDS), arguments.seed)
            print(f"{name}: {done.stderr}{done.stdout}")
        status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
