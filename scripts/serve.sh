#!/usr/bin/env bash
# Serve a model: scripts/serve.sh [MODEL] [flags of `samovar serve`]. Installs into .venv on the first run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
setup ""
exec .venv/bin/samovar serve "$@"
