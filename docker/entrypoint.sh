#!/bin/sh
# Writes the configuration that Compose hands over as text to where wavegate looks for it, then becomes the command.
set -eu
if [ -n "${WAVEGATE_YAML-}" ]; then
    printf '%s\n' "$WAVEGATE_YAML" >wavegate.yaml
fi
exec "$@"
