#!/usr/bin/env bash
# Makes the environment where needed and runs the tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash examples/setup.sh
exec .venv/bin/python -m pytest "$@"
