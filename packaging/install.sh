#!/bin/sh
# install.sh VENV REQUIREMENT: makes the virtual environment if it is missing or broken, and installs REQUIREMENT
# (the project itself, editable) into it. Fails with one line that says what to do.
set -eu

venv=$1
requirement=$2

fail() {
    echo "privatellm: $*" >&2
    exit 1
}

# torch has no packages for other versions of Python.
fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

# Compiled without profile-guided optimisation, as pyenv does by default, Python takes half as long again for everything.
# Packages of Linux distributions are optimised although their configuration does not say so.
is_optimised() {
    "$1" -c 'import sys, sysconfig as s; sys.exit(sys.base_prefix != "/usr" and "--enable-optimizations" not in str(s.get_config_var("CONFIG_ARGS")))' \
        >/dev/null 2>&1
}

makes_environments() {
    "$1" -c 'import venv, ensurepip' >/dev/null 2>&1
}

# Every Python on PATH that fits. python3 last: it may be newer than what all libraries have packages for.
fitting() (
    IFS=:
    for name in python3.13 python3.12 python3.14 python3.11 python3; do
        for folder in $PATH; do
            candidate=$folder/$name
            if [ -x "$candidate" ] && fits "$candidate"; then
                echo "$candidate"
            fi
        done
    done
)

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of version 3.11 to 3.14; name another one."
        echo "$PYTHON"
        return
    fi
    found=$(fitting)
    [ -n "$found" ] ||
        fail "needs Python 3.11 to 3.14, and found none; install one (Debian: apt install python3 python3-venv; macOS: brew install python@3.13, python.org or uv python install 3.13) or run make with PYTHON=/path/to/python3."
    usable=
    while read -r candidate; do
        makes_environments "$candidate" || continue
        usable=${usable:-$candidate}
        if is_optimised "$candidate"; then
            usable=$candidate
            break
        fi
    done <<EOF
$found
EOF
    echo "${usable:-$(echo "$found" | head -n 1)}"
}

# What torch and mlx have packages for on a Mac, said before pip says that there is no version of them.
check_mac() {
    if [ "$(sysctl -n hw.optional.arm64 2>/dev/null || echo 0)" != 1 ]; then
        fail "this Mac has an Intel processor, for which torch has no packages any more: privatellm needs a Mac with Apple Silicon."
    fi
    macos=$(sw_vers -productVersion 2>/dev/null || echo 0)
    if [ "${macos%%.*}" -lt 14 ]; then
        fail "this is macOS $macos, and torch and mlx need macOS 14 or newer: update macOS (System Settings > General > Software Update)."
    fi
    machine=$("$1" -c 'import platform; print(platform.machine())')
    if [ "$machine" != arm64 ] && [ "$(sysctl -n sysctl.proc_translated 2>/dev/null || echo 0)" = 1 ]; then
        fail "this terminal is run by Rosetta, and so is $1, as a program for Intel Macs: open a terminal that is not (Finder > the app > Get Info > Open using Rosetta), and run make there."
    fi
    if [ "$machine" != arm64 ]; then
        fail "$1 is a Python for Intel Macs ($machine, run by Rosetta), for which torch has no packages: install one for Apple Silicon (brew install python@3.13 in /opt/homebrew, or python.org) and run make with PYTHON=/path/to/python3."
    fi
}

# An environment whose interpreter does not run is made again; one that works is never deleted, only given pip.
if ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    if [ "$(uname -s)" = Darwin ]; then
        check_mac "$python"
    fi
    makes_environments "$python" ||
        fail "$python cannot make virtual environments: its venv module is missing (Debian: apt install python3-venv)."
    echo "Making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "$python could not make $venv; is the disk full, or the folder not writable?"
fi
fits "$venv/bin/python" || fail "$venv holds a Python that is not of version 3.11 to 3.14; delete it (make clean) and try again."

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip --upgrade >/dev/null ||
    fail "$venv has no pip and cannot be given one; delete it (make clean) and try again."

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@"
}

has_torch() {
    "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null
}

# torch alone comes from TORCH_INDEX, which need not hold anything else.
if [ -n "${TORCH_INDEX:-}" ] && ! has_torch; then
    torch=$(sed -n 's/^ *"\(torch==[^"]*\)",$/\1/p' pyproject.toml)
    [ -n "$torch" ] || fail "pyproject.toml names no version of torch."
    pip install --index-url "$TORCH_INDEX" "$torch" || fail "could not install $torch from $TORCH_INDEX."
fi

if has_torch; then
    quiet=--quiet
else
    quiet=
    echo "Installing into $venv; this downloads torch and may take some minutes."
    if [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] && [ -z "${TORCH_INDEX:-}" ] && ! command -v nvidia-smi >/dev/null; then
        echo "No NVIDIA driver here: if pip starts on gigabytes of CUDA packages, stop it and run make again with" \
            "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    fi
fi
pip install $quiet --editable "$requirement" ||
    fail "pip could not install $requirement: its last lines say why (no network, or a full disk?). Run make again: it goes on."

# The kernels are optional: pip says nothing when they could not be built.
ls engine/moe/kernels/_native*.so >/dev/null 2>&1 ||
    echo "The native kernels were not built, torch's answer instead: slower. With a C compiler (Debian: apt install gcc;" \
        "macOS: xcode-select --install), run: $venv/bin/pip install --editable ."
