#!/bin/sh
# Everything that is to be measured on a machine with an NVIDIA GPU, in one run:
#
#   sh benchmarks/gpu_run.sh SECONDS FOLDER [PART...]     parts: sanitize check kernels tune (default: all, in this order)
#
# Needs python3 with mlx (its CUDA build), mlx-lm, numpy, rich, pydantic, platformdirs, filelock and NVRTC; installs
# nothing and asks no network. FOLDER receives run.log, sanitizer.json, check.jsonl, kernels.json and suite.json, each
# as soon as it is there. A part that fails does not stop those after it. METILE_MODEL names another model to tune.
set -u
seconds=${1:-540}
folder=${2:-gpu-results}
[ $# -ge 2 ] && shift 2 || shift $#
[ $# -gt 0 ] || set -- sanitize check kernels tune
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
start=$(date +%s)

# The package is run from the checkout; what asks for its version finds it here.
facts=$(mktemp -d)
trap 'rm -rf "$facts"' EXIT
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
mkdir "$facts/metile-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: metile\nVersion: %s\n' "$version" > "$facts/metile-$version.dist-info/METADATA"
export PYTHONPATH="$root:$facts${PYTHONPATH:+:$PYTHONPATH}"
export METILE_CACHE_DIR="${METILE_CACHE_DIR:-${TMPDIR:-/tmp}/metile-gpu}"

left() { echo $((seconds - ($(date +%s) - start))); }
say() { printf '%s\n' "$*" | tee -a "$folder/run.log"; }

# run NAME SECONDS COMMAND...: in at most so many seconds, and what it prints to the log
run() {
  name=$1 most=$2
  shift 2
  say "== $name, at most $most s, $(left) s left"
  if [ "$most" -lt 10 ]; then
    say "== $name: no time is left"
    failed="$failed $name"
    return
  fi
  # The pipe must not hide how the command ended.
  { timeout -k 5 "$most" "$@" 2>&1; echo $? > "$facts/status"; } | tee -a "$folder/run.log"
  status=$(cat "$facts/status")
  say "== $name ended with $status, $(left) s left"
  [ "$status" -eq 0 ] || failed="$failed $name"
}

least() { [ "$1" -lt "$2" ] && echo "$1" || echo "$2"; }

failed=
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv,noheader 2>&1 |
  tee -a "$folder/run.log"
"$python" -c 'import mlx.core as mx; print("mlx", mx.__version__, mx.default_device())' 2>&1 | tee -a "$folder/run.log"
later=$#
for part in "$@"; do
  # What is left is shared by the parts to come; the table and the tuning take two shares each.
  case $part in
    sanitize)
      each=$(least 45 $(($(left) / (2 * later + 2))))
      run sanitize $((2 * each + 40)) "$python" benchmarks/gpu_sanitize.py --seconds "$each" \
        --output "$folder/sanitizer.json"
      ;;
    check)
      each=$(($(left) / (2 * later)))
      run check $((each + 30)) "$python" benchmarks/gpu_check.py --seconds "$each" --log "$folder/check.jsonl"
      ;;
    kernels)
      each=$(($(left) / later - 20))
      run kernels $((each + 30)) "$python" benchmarks/gpu_kernels.py --seconds "$each" \
        --sanitizer "$folder/sanitizer.json" --output "$folder/kernels.json"
      ;;
    tune)
      search=$(($(left) - 100))
      [ "$search" -ge 10 ] || search=10
      run tune "$(left)" "$python" -m metile.tune --target cuda --suite bf16-dense \
        --model "${METILE_MODEL:-random:qwen2.5-1.5b}" --offline --search-seconds "$search" \
        --output "$folder/suite.json"
      ;;
    *) say "no part $part: sanitize, check, kernels, tune" && failed="$failed $part" ;;
  esac
  later=$((later - 1))
done
say "== done in $(($(date +%s) - start)) s; not clean:${failed:- nothing}"
[ -z "$failed" ]
