#!/bin/sh
# Rewrites every golden file for the checkpoint in demo/checkpoint. Run it whenever that checkpoint changes.
# PYTHON names an interpreter that has requirements.txt; one core is enough and keeps sums in one order.
set -eu
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1
python=${PYTHON:-python3}
"$python" transformers_golden.py --demo ../demo --out golden
"$python" mlx_golden.py --demo ../demo --out golden
