#!/usr/bin/env bash
# The measurements that await a CUDA device, the most telling first; each adds to its record in results/ as it goes.
#   benchmarks/gpu.sh                       all of them, one after the other, each within 8 minutes
#   benchmarks/gpu.sh --minutes 9           as many as that takes; called again, it goes on behind the last that ended
#   benchmarks/gpu.sh NAME [ARGUMENT ...]   benchmarks/NAME.py alone
#   benchmarks/gpu.sh --prepare h200        plans for that card in build/gpu_plans/, made on a machine without it; with
#                                           them, and the same source, PyTorch and transformers, time goes into measuring
#   benchmarks/gpu.sh --dry FOLDER          all that runs without a GPU, tiny and on the processor; records go to FOLDER
# One that fails stops none behind it; a table at the end says what ran, and results/gpu_parts-GPU.txt what --minutes
# has behind it: without its line there, a part is run again. PYTHON names the interpreter; nothing has to be
# installed in it but what tightfit imports. For a machine that cannot fetch what it lacks, --wheels FOLDER, before the
# rest, unpacks wheels brought along. What an installation of torch, transformers and JAX usually lacks takes 20 MB:
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#     --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d FOLDER \
#     annotated-types datasets dill==0.4.1 greenlet liger-kernel multiprocess==0.70.19 plotly pydantic==2.14.3 \
#     pydantic-core==2.50.4 torch-optimi torchao typing-inspection
# After the last call, where there is time: benchmarks/plan_vs_gpu.py --again and benchmarks/beyond_gpu.py --plan h200,
# which take the measured calibration into what was planned, and make docs.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
longest=${LIMIT:-480}  # seconds

# Seconds at most, and what is run: a quarter of an hour reaches the frontier, half an hour JAX's ladder. {minutes} is
# what is left of the seconds.
parts() {
  cat << 'END'
90 context_bytes
120 calibration
330 beyond_gpu --minutes {minutes}
80 gpu_tests --left
160 plan_vs_gpu --plain --minutes {minutes}
180 quickstart max_steps=400 warmup_steps=40 eval_steps=100
300 frontier --budget 24GB --minutes {minutes}
200 record_ladders bert-large --minutes {minutes}
120 gpu_ops --minutes {minutes}
60 allocator_snapshots
200 record_ladders transformer-156m-jax --minutes {minutes}
320 beyond_gpu --minutes {minutes}
300 plan_vs_gpu --plain --minutes {minutes}
200 plan_vs_gpu --minutes {minutes}
400 frontier --budget 24GB --minutes {minutes}
480 plan_vs_gpu --minutes {minutes}
480 beyond_gpu --minutes {minutes}
480 frontier --budget 16GB --minutes {minutes}
480 frontier --budget 80GB --minutes {minutes}
480 frontier --budget 8GB --minutes {minutes}
480 record_ladders bert-large --peer plain --peer hf-trainer --minutes {minutes}
480 record_ladders transformer-156m --peer plain --peer hf-trainer --minutes {minutes}
480 record_ladders fp16-batch --peer plain --peer hf-trainer --minutes {minutes}
480 convergence
END
}

dry_parts() {  # the same measurements where they can be tried
  cat << END
120 gpu_tests --collect-only -q
300 calibration
120 gpu_ops --device cpu --minutes 1.5
240 plan_vs_gpu --device cpu --minutes 2
240 beyond_gpu --dry '$dry' --minutes 3
180 record_ladders bert-large --scale reduced --minutes 2
180 record_ladders transformer-156m-jax --scale reduced --minutes 2
240 frontier --dry '$dry' --minutes 3
180 convergence --steps 6 --only "fp32 adamw"
180 quickstart max_steps=4
END
}

table=()
failed=0

measure() {  # SECONDS NAME [ARGUMENT ...]: run benchmarks/NAME.py, and note how that went
  local limit=$1 name=$2 began=$SECONDS status outcome
  shift 2
  echo "== $name $*"
  timeout --kill-after=10 "$limit" "$python" "benchmarks/$name.py" "$@"
  status=$?
  case $status in
    0) outcome="went well" ;;
    124 | 137) outcome="took longer than $limit seconds" ;;
    *) outcome="ended with status $status" ;;
  esac
  [ "$status" = 0 ] || failed=1
  table+=("$(printf '%-64s %5d s  %s' "$name $*" $((SECONDS - began)) "$outcome")")
}

all() {  # NAME OF A LIST: measure its parts, as far as there is time; what ended of them is not begun again
  local number=0 seconds wanted left words ended began
  ended=${TIGHTFIT_RESULTS:-results}/gpu_parts-$card.txt
  while read -r seconds words; do
    number=$((number + 1))
    [ "$seconds" -le "$longest" ] || seconds=$longest
    wanted=$seconds
    if [ -n "$minutes" ]; then
      grep -qsxF "$number $words" "$ended" && continue
      left=$(awk "BEGIN {print int(60 * $minutes - $SECONDS)}")
      [ "$left" -ge 40 ] || { table+=("no time was left from here on: $words"); break; }
      [ "$seconds" -le "$left" ] || seconds=$left
    fi
    began=$SECONDS
    eval "measure $seconds ${words//\{minutes\}/$(awk "BEGIN {print ($seconds - 20) / 60}")}" < /dev/null  # 20 s to end
    [ -n "$minutes" ] || continue
    # What the call's end left less than half of its time goes on in the next.
    if [ $((2 * seconds)) -ge "$wanted" ] || [ $((SECONDS - began)) -lt $((seconds - 25)) ]; then
      echo "$number $words" >> "$ended"
    fi
  done < <("$1")
}

dry= minutes= card=cpu
while [ $# -gt 0 ]; do
  case $1 in
    --wheels)
      site=$(mktemp -d) || exit
      "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "${2:?}"/*.whl || exit
      export PYTHONPATH=$PYTHONPATH:$site
      shift 2
      ;;
    --minutes) minutes=${2:?} && shift 2 ;;
    --prepare)
      for name in plan_vs_gpu beyond_gpu frontier; do
        "$python" "benchmarks/$name.py" --plan "${2:?}" || exit
      done
      exit
      ;;
    --dry)
      dry=$(mkdir -p "${2:?--dry: name a folder for the records}" && cd "$2" && pwd) || exit
      export TIGHTFIT_RESULTS=$dry HOME=$dry  # a calibration is kept there, and not as this machine's
      shift 2
      ;;
    *) break ;;
  esac
done

if [ -z "$dry" ] && command -v nvidia-smi > /dev/null; then
  card=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0 | tr ' A-Z' '-a-z')
  nvidia-smi --query-gpu=name --format=csv -l 30 > /dev/null &  # keeps the driver loaded between processes
  trap "kill $!" EXIT
fi
if [ $# -gt 0 ]; then
  [ -f "benchmarks/$1.py" ] || { echo "gpu.sh: there is no benchmarks/$1.py" >&2 && exit 2; }
  measure "$longest" "$@"
elif [ -n "$dry" ]; then
  all dry_parts
else
  all parts
fi

echo
printf '%s\n' "${table[@]}"
exit "$failed"
