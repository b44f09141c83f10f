#!/usr/bin/env bash
# The measurements that await a CUDA device, the most telling first; each is recorded in results/ within 8 minutes.
#   benchmarks/gpu.sh                     all of them, one after the other
#   benchmarks/gpu.sh plan_vs_gpu 1/3     one of them, here a third of it
#   benchmarks/gpu.sh --dry FOLDER        all that runs without a GPU, tiny and on the processor; records go to FOLDER
# One that fails stops none behind it; a table at the end says what ran. PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
limit=${LIMIT:-480}  # seconds

table=()
failed=0

measure() {  # NAME [ARGUMENT ...]: run benchmarks/NAME.py, and note how that went
  local name=$1 began=$SECONDS status outcome
  shift
  echo "== $name $*"
  timeout --kill-after=10 "$limit" "$python" "benchmarks/$name.py" "$@"
  status=$?
  case $status in
    0) outcome="went well" ;;
    124 | 137) outcome="took longer than $limit seconds" ;;
    *) outcome="ended with status $status" ;;
  esac
  [ "$status" = 0 ] || failed=1
  table+=("$(printf '%-40s %5d s  %s' "$name $*" $((SECONDS - began)) "$outcome")")
}

part() {  # NAME [PART]
  if [ -n "$dry" ]; then
    dry_part "$@"
    return
  fi
  case $1 in
    context_bytes | calibration | cuda_op_tables | quickstart) measure "$1" ;;
    plan_vs_gpu) measure plan_vs_gpu --part "${2:-1/1}" --minutes 7.5 ;;
    beyond_gpu) measure beyond_gpu --minutes 7.5 ;;
    allocator_snapshots) measure allocator_snapshots --output results/allocator_snapshots ;;
    convergence) measure convergence --steps 300 --name convergence_gpu ;;
    record_ladders)
      case ${2:-} in
        *-jax) measure record_ladders "$2" --minutes 7.5 ;;
        *) measure record_ladders "${2:-bert-large}" --peer plain --peer hf-trainer --minutes 7.5 ;;
      esac
      ;;
    frontier) measure frontier --budget "${2:-24GB}" --minutes 7.5 ;;
    *)
      echo "gpu.sh: '$1' is not one of context_bytes, calibration, cuda_op_tables, plan_vs_gpu, beyond_gpu, record_ladders," \
        "frontier, allocator_snapshots, quickstart, convergence" >&2
      exit 2
      ;;
  esac
}

dry_part() {  # as part
  case $1 in
    plan_vs_gpu) measure plan_vs_gpu --device cpu --part "${2:-1/1}" --minutes 2 ;;
    beyond_gpu) measure beyond_gpu --dry "$dry" --minutes 2 ;;
    frontier) [ "${2:-8GB}" != 8GB ] || measure frontier --dry "$dry" --minutes 2 ;;
    record_ladders) measure record_ladders "$2" --scale reduced --minutes 1 ;;
    quickstart) measure quickstart max_steps=4 ;;
    convergence) measure convergence --steps 6 --name convergence_gpu --only "fp32 adamw" ;;
    calibration) HOME=$dry measure calibration ;;  # kept there, and not as this machine's
    *) table+=("$(printf '%-40s          needs a GPU' "$1")") ;;
  esac
}

dry=
if [ "${1:-}" = --dry ]; then
  dry=$(mkdir -p "${2:?--dry: name a folder for the records}" && cd "$2" && pwd) || exit
  export TIGHTFIT_RESULTS=$dry
  shift 2
fi
if [ $# -gt 0 ]; then
  part "$@"
else
  part context_bytes
  part calibration
  part cuda_op_tables
  part plan_vs_gpu 1/3
  part beyond_gpu
  for number in 2 3; do part plan_vs_gpu "$number/3"; done
  part beyond_gpu  # what the first part of its time did not come to
  for name in bert-large transformer-156m transformer-156m-jax fp16-batch; do part record_ladders "$name"; done
  for budget in 8GB 16GB 24GB 80GB; do part frontier "$budget"; done
  part allocator_snapshots
  part quickstart
  part convergence
fi

echo
printf '%s\n' "${table[@]}"
exit "$failed"
