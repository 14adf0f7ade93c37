#!/usr/bin/env bash
# Makes .venv: the exact versions of requirements/cpu.lock, and this checkout in editable mode. Where that is already
# done it ends at once. The stamp is written last, so an interrupted set-up is noticed and made anew.
# PYTHON=/path/to/python3.11 names the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=requirements/cpu.lock
log=.venv/setup.log
torch_index=https://download.pytorch.org/whl/cpu

say() { printf '[%3d s] %s\n' "$SECONDS" "$1"; }
fail() { printf 'Set-up stopped: %s\n' "$1" >&2; exit 1; }

find_python() {
  local name
  for name in ${PYTHON:-python3.11 python3}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      printf '%s\n' "$name"
      return
    fi
  done
  fail "no Python 3.11 among '${PYTHON:-python3.11 python3}'; install it, or name it with PYTHON=/path/to/python3.11."
}

# Prints what this machine lacks, nothing when all is there. pycosat, which reasoning-gym imports, is source only.
missing_parts() {
  "$1" - <<'PY'
import importlib.util, os, pathlib, platform, shutil, sysconfig
compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
needed = {
    "a Linux on x86-64": (platform.system(), platform.machine()) == ("Linux", "x86_64"),
    "the venv module (python3.11-venv)": importlib.util.find_spec("ensurepip") is not None,
    f"a C compiler ({compiler})": shutil.which(compiler) is not None,
    f"Python's headers (python3.11-dev: {header})": header.is_file(),
}
print(" and ".join(name for name, there in needed.items() if not there))
PY
}

pip_install() {
  .venv/bin/python -m pip install --quiet --no-input --no-deps --no-build-isolation "$@" >>"$log" 2>&1
}

pip_failed() {
  grep -i 'error' "$log" | tail -n 8 >&2 || tail -n 8 "$log" >&2
  fail "$1"
}

stamp="$( (pwd -P; cat "$lock" setup.py) | sha256sum)"
up_to_date() { [[ "$(cat .venv/setup.stamp 2>/dev/null)" == "$stamp" ]] && .venv/bin/python -c '' 2>/dev/null; }

exec 9>>"$lock" # two set-ups at the same time would spoil each other
flock 9
if up_to_date; then exit 0; fi

python="$(find_python)"
missing="$(missing_parts "$python")"
[[ -z "$missing" ]] || fail "this machine lacks $missing; install that (on Debian with apt-get) and run this again."

say "making .venv: about 1 GB to download and 2.5 GB on disk, 2 to 5 minutes, only this once"
rm -rf .venv
"$python" -m venv .venv
pin() { grep "^$1==" "$lock"; }
pip_install "$(pin pip)" "$(pin setuptools)" ||
  pip_failed "pip reaches no package index that has $(pin pip); check the network, or set PIP_INDEX_URL to an index in reach."

say "installing $(pin torch)"
pip_install --no-compile "$(pin torch)" || pip_install --no-compile --index-url "$torch_index" "$(pin torch)" ||
  pip_failed "neither pip's configured indexes nor $torch_index gave $(pin torch); allow one of them and run this again."

say "installing the other packages of $lock"
pip_install --no-compile -r "$lock" ||
  pip_failed "pip could not install $lock (its messages are above and in $log); mend that and run this again."
pip_install -e . || pip_failed "pip could not install this checkout (its messages are above and in $log)."

# Where no bytecode may be written later (PYTHONDONTWRITEBYTECODE), every start would compile all of it again. A few files
# are templates and no Python: that they do not compile is no failure.
say "compiling, on all cores"
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -W ignore -m compileall -q -j 0 .venv/lib >>"$log" 2>&1 || true

printf '%s\n' "$stamp" >.venv/setup.stamp
say "the environment is ready"
