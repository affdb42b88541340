# Sourced by serve.sh and test.sh: makes .venv and installs into it, or returns at once if nothing changed.
# Needs python3 (3.11 or newer) with its venv module. pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS, PIP_NO_INDEX, ...) are respected. PYTHON names the interpreter to use.

say() { printf '%s\n' "$*" >&2; }

die() {
    say "samovar: $*"
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
        say "samovar: $candidate is $("$candidate" -V 2>&1), 3.11 or newer is needed"
    done
    return 1
}

# What an installation depends on, as one number.
fingerprint() {
    "$1" - "$2" <<'PYTHON'
import hashlib, pathlib, sys

digest = hashlib.sha256(f"{sys.version}|{sys.argv[1]}".encode())
sources = sorted(str(path) for path in pathlib.Path("native").glob("*") if path.is_file())
for name in ("pyproject.toml", "constraints.txt", "CMakeLists.txt", *sources):
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PYTHON
}

# setup "" for serving, setup dev for testing.
setup() {
    local extra="$1" name="${1:-base}" python stamp wanted
    python="$(find_python)" || die "no python3 of version 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3 $0"
    stamp=".venv/.installed-$name"
    if [ -x .venv/bin/python ] && [ -f "$stamp" ]; then
        wanted="$(fingerprint .venv/bin/python "$extra")"
        [ "$(cat "$stamp")" = "$wanted" ] && return 0
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python cannot make virtual environments: its venv module is missing (Debian, Ubuntu: apt install python3-venv)"
    if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        say "samovar: making .venv with $("$python" -V)"
        "$python" -m venv --clear .venv || die "could not make .venv here; is the disk full or the folder read-only?"
    fi
    report_machine
    say "samovar: installing (once; later starts skip this)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${extra:+[$extra]}" ||
        die "pip could not install the packages (see above). It needs a network, or PIP_INDEX_URL, PIP_FIND_LINKS and the like."
    fingerprint .venv/bin/python "$extra" >"$stamp"
    say "samovar: installed into .venv; to use the samovar command in a terminal: . .venv/bin/activate"
}

report_machine() {
    local compiler
    compiler="$(command -v "${CXX:-c++}" || command -v g++ || command -v clang++ || true)"
    say "samovar: C++ compiler: ${compiler:-none; plain torch is used, which always works, several times slower (Debian, Ubuntu: apt install g++)}"
    if [ "$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ] && [ -z "${PIP_EXTRA_INDEX_URL:-}${PIP_INDEX_URL:-}${PIP_FIND_LINKS:-}" ]; then
        say "samovar: no NVIDIA GPU here, and pip's usual torch is a CUDA build of several GB. A CPU build is enough: set"
        say "         PIP_EXTRA_INDEX_URL to PyTorch's CPU index first (README.md, 'Smaller installs'). Going on without."
    fi
}
