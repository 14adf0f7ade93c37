#!/usr/bin/env bash
# From an empty clone to a trained tiny model: makes the environment and trains; the last line names the report.
# Arguments are settings, for instance: bash examples/quickstart.sh trainer.total_steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash examples/setup.sh
exec .venv/bin/spark-train experiment=spark_tiny "$@"
