#!/usr/bin/env bash
# What awaits a CUDA device: each part ends within minutes and records its outcome in results/.
set -euo pipefail
python=${PYTHON:-.venv/bin/python}
"$python" benchmarks/quickstart.py
"$python" benchmarks/convergence.py --steps 300 --name convergence_gpu
