#!/bin/sh
# try_installers.sh [WHEEL]: installs the wheel (built here if none is named) with `uv tool` and with pipx, each into a
# temporary folder, and runs what was installed. Fetches uv, pipx and all dependencies, torch among them: it takes
# minutes and about 3 GB of disk in TMPDIR. The indexes of pip's settings are used; UV_FIND_LINKS and its kin for uv's.
# INSTALLERS=pipx tries one of them only.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
work=$(mktemp -d "${TMPDIR:-/tmp}/privatellm-installers.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

wheel=${1:-}
if [ -z "$wheel" ]; then
    (cd "$root" && "$python" -m build --wheel --no-isolation --outdir "$work/dist" >"$work/build.log" 2>&1) ||
        { tail -n 5 "$work/build.log" >&2; exit 1; }
    rm -rf "$root/build"
    wheel=$(echo "$work"/dist/*.whl)
fi

"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip --quiet --disable-pip-version-check install uv pipx

# try NAME: the program that NAME installed answers, knows its catalogue, and fetches the starter.
try() {
    export PRIVATELLM_HOME="$work/$1-home"
    program="$work/$1-bin/privatellm"
    "$program" locate data >/dev/null
    "$program" models list | grep -q starter
    "$program" models pull starter >/dev/null
    "$program" ask --max-tokens 3 --temperature 0 hi >/dev/null
    rm -rf "$PRIVATELLM_HOME"
    echo "$1: works"
}

for installer in ${INSTALLERS:-uv pipx}; do
    case $installer in
    uv)
        UV_TOOL_DIR=$work/uv UV_TOOL_BIN_DIR=$work/uv-bin UV_CACHE_DIR=$work/uv-cache \
            "$work/tools/bin/uv" tool install --quiet --python "$python" "$wheel"
        if "$work"/uv/privatellm/bin/python -c 'import pip' 2>/dev/null; then
            echo "uv: its environment has a pip, so fetching without one was not tried"
        fi
        ;;
    pipx)
        PIPX_HOME=$work/pipx PIPX_BIN_DIR=$work/pipx-bin \
            "$work/tools/bin/pipx" install --python "$python" "$wheel" >/dev/null
        ;;
    esac
    try "$installer"
    rm -rf "$work/uv" "$work/uv-cache" "$work/pipx"
done
