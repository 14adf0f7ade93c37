"""spark-report: draw report.png and report.html of a run directory again, also while the run is still going on."""

from __future__ import annotations

import argparse
import sys

from spark_megatron.report.report import make_report


def main() -> None:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(prog="spark-report", description=__doc__)
    parser.add_argument("run_dir", help="directory of the run (it holds metrics.jsonl)")
    parser.add_argument("--into", help="directory to write to (default: the run directory)")
    arguments = parser.parse_args()
    try:
        report = make_report(arguments.run_dir, arguments.into)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"spark-report: {error}")
    print(report.page)
    for missing in report.missing:
        print(f"missing: {missing}", file=sys.stderr)
