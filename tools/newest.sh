#!/usr/bin/env bash
# Runs the suite with the newest version of each dependency: pyproject.toml's ceilings are ignored, exact pins are kept.
#
#   tools/newest.sh [--resolve] [path of tests]...      (default: tests)
#
# Makes an environment in build/newest (NEWEST=<folder> for another, EXTRAS=<extras> as for make), prints each dependency
# that is newer than in constraints.txt as "package tested -> newest", and ends with pytest's exit status. --resolve
# prints these lines and neither installs nor tests anything. Needs uv and Python 3.11. On machines without an NVIDIA
# GPU torch comes from PyTorch's index of CPU builds (UV_TORCH_BACKEND=cu130 names another, an empty one uses uv's own
# indexes only).
set -euo pipefail
cd "$(dirname "$0")/.."

ENVIRONMENT=${NEWEST:-build/newest}
EXTRAS=${EXTRAS:-maniskill,metaworld,math,data,serve,bench,dev}
PYTHON=${PYTHON:-python3.11}
RESOLVE_ONLY=false
if [ "${1:-}" = --resolve ]; then
    RESOLVE_ONLY=true
    shift
fi

export UV_TORCH_BACKEND=${UV_TORCH_BACKEND-auto}
[ -n "$UV_TORCH_BACKEND" ] || unset UV_TORCH_BACKEND

mkdir -p "$ENVIRONMENT"
FLOORS=$ENVIRONMENT/floors.txt
NEWEST_VERSIONS=$ENVIRONMENT/versions.txt
# overrides replace the requirements of all packages: here the ranges of pyproject.toml without their ceilings
grep -oE '"[A-Za-z][A-Za-z0-9._-]*(\[[a-z0-9_,]+\])?>=[0-9.]+,<[0-9.]+' pyproject.toml |
    sed -E 's/^"//; s/,<.*//' | sort -u >"$FLOORS"
mapfile -t EXTRA_OPTIONS < <(tr ',' '\n' <<<"$EXTRAS" | sed 's/^/--extra=/')
uv pip compile -q pyproject.toml "${EXTRA_OPTIONS[@]}" --python-version 3.11 --overrides "$FLOORS" \
    --no-annotate --no-header --upgrade -o "$NEWEST_VERSIONS" >/dev/null

NAMES=$(sed -E 's/[[>=].*//' "$FLOORS")
for name in $NAMES; do
    tested=$(grep -i "^$name==" constraints.txt | sed 's/.*==//') || continue
    newest=$(grep -i "^$name==" "$NEWEST_VERSIONS" | sed -E 's/.*==//; s/\+.*//') || continue
    [ "$tested" = "$newest" ] || echo "$name $tested -> $newest"
done
echo "$(grep -c == "$NEWEST_VERSIONS") packages are in $NEWEST_VERSIONS"
if "$RESOLVE_ONLY"; then
    exit
fi

uv venv -q --clear --python "$PYTHON" "$ENVIRONMENT/venv"
uv pip install -q --python "$ENVIRONMENT/venv/bin/python" -r "$NEWEST_VERSIONS"
uv pip install -q --python "$ENVIRONMENT/venv/bin/python" --no-deps -e .
exec "$ENVIRONMENT/venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${@:-tests}"
