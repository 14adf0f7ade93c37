#!/usr/bin/env bash
# Runs the engine's tests with the newest megatron-core, in an environment of its own.
#
#     PYTHON=/path/to/python3.12 bash tools/newest_megatron.sh [arguments of pytest; without any: tests/engine]
#
# The environment holds requirements/newest_megatron.txt and lies in .venv-newest, or in the folder that FOLDER names.
# It is made once; to be rid of it, delete the folder. Neither tests/run.sh nor CI runs this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
requirements=requirements/newest_megatron.txt
folder="${FOLDER:-.venv-newest}"
disk_mb=6000 # 2.6 GB of downloads, unpacked and compiled

say() { printf '[%3d s] %s\n' "$SECONDS" "$1"; }
fail() { printf 'Stopped: %s\n' "$1" >&2; exit 1; }

find_python() {
  local name
  for name in ${PYTHON:-python3.12 python3}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
      printf '%s\n' "$name"
      return
    fi
  done
  fail "no Python 3.12 among '${PYTHON:-python3.12 python3}'; install it, or name it with PYTHON=/path/to/python3.12."
}

free_mb() { df --output=avail -m "$(dirname "$folder")" | tail -n 1; }

stamp="$( (realpath "$folder"; cat "$requirements") | sha256sum)"
made() { [[ "$(cat "$folder/made.stamp" 2>/dev/null)" == "$stamp" ]] && "$folder/bin/python" -c '' 2>/dev/null; }

make_environment() {
  local python log="$folder/setup.log"
  python="$(find_python)"
  "$python" -c 'import ensurepip' 2>/dev/null || fail "$python lacks the venv module; install python3.12-venv."
  if [[ -e "$folder" ]]; then
    [[ -f "$folder/pyvenv.cfg" ]] || fail "$folder exists and is no Python environment; name another with FOLDER=."
    rm -r "$folder"
  fi
  (($(free_mb) >= disk_mb)) || fail "$folder needs $disk_mb MB of disk, $(free_mb) are free; name another with FOLDER=."
  say "making $folder: 2.6 GB to download and 5 GB on disk, 2 to 5 minutes, only this once"
  "$python" -m venv "$folder"
  if ! "$folder/bin/python" -m pip install --no-input --no-cache-dir --no-deps --no-compile -r "$requirements" >"$log" 2>&1
  then
    grep -i 'error' "$log" | tail -n 8 >&2 || tail -n 8 "$log" >&2
    fail "pip could not install $requirements (its messages are above and in $log)."
  fi
  say "compiling, on all cores" # a few files are templates and no Python: that they do not compile is no failure
  env -u PYTHONDONTWRITEBYTECODE "$folder/bin/python" -W ignore -m compileall -q -j 0 "$folder/lib" >>"$log" 2>&1 || true
  printf '%s\n' "$stamp" >"$folder/made.stamp" # last, so that an interrupted set-up is noticed and made anew
}

made || make_environment
say "$("$folder/bin/python" -m pip list --format freeze | grep -E '^(megatron-core|torch|transformers)=' | tr '\n' ' ')"
exec "$folder/bin/python" -m pytest "${@:-tests/engine}"
