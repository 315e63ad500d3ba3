#!/bin/sh
# formula.sh WHEEL URL [HOMEPAGE]: prints the Homebrew formula for the built WHEEL, which can be fetched from URL (an
# https address, or file:///... to try it on this Mac). HOMEPAGE: the address before the last slash of URL otherwise.
set -eu

wheel=$1
url=$2
homepage=${3:-${url%/*}}
version=$(basename "$wheel" | cut -d- -f2)
sum=$( (sha256sum "$wheel" 2>/dev/null || shasum -a 256 "$wheel") | cut -d' ' -f1)

[ -n "$sum" ] || { echo "privatellm: $wheel cannot be read." >&2; exit 1; }
case $(basename "$wheel") in
    privatellm-*.whl) ;;
    *) echo "privatellm: $wheel is not a wheel of privatellm; build one with python -m build --wheel." >&2; exit 1 ;;
esac

sed -e "s|@URL@|$url|" -e "s|@HOMEPAGE@|$homepage|" -e "s|@VERSION@|$version|" -e "s|@SHA256@|$sum|" \
    "$(dirname "$0")/privatellm.rb.in"
