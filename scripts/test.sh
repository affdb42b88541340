#!/usr/bin/env bash
# Every gate and every fast test: scripts/test.sh [flags of pytest, such as -m slow or -k name]. Installs on the first run.
# All steps run even if one fails; the exit code is 1 if any did.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
setup dev

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false
failed=()

step() {
    local name="$1"
    shift
    printf '\n== %s\n' "$name"
    "$@" || failed+=("$name")
}

step "gates" .venv/bin/python -m tools.check
step "types" .venv/bin/python -m mypy --no-error-summary
step "tests" .venv/bin/python -m pytest -q -n 2 --dist loadfile "$@"

if [ "${#failed[@]}" -gt 0 ]; then
    printf '\nFAILED: %s\n' "${failed[*]}"
    exit 1
fi
