#!/usr/bin/env bash
# From an empty clone to a trained tiny model: makes the environment, trains, and says where the results are.
# Arguments are settings, for instance: bash examples/quickstart.sh total_steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash examples/setup.sh
.venv/bin/spark-train experiment=spark_tiny "$@"
newest="$(find outputs -name metrics.jsonl -printf '%T@ %h\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-)"
echo "The results are in $PWD/$newest"
