#!/usr/bin/env bash
# On the machine without network: unpacks what tools/stage_gpu.sh built and starts, in the background, whatever the
# pieces that have arrived allow: bytecode, model conversion, kernel compilation. Call it once for each piece or set of
# pieces that arrives; the last time with --finish, which waits for all of that and checks that everything imports.
#
# usage: tools/gpu_unpack.sh [--finish] [--no-warm] PIECES
#   PIECES     folder that holds part_*.tar; those unpacked before may be there still, or gone
#   --finish   wait for the background work (each step is bounded), check, say where to go on
#   --no-warm  start no throw-away server that compiles the kernels for SmolLM2's shapes
#
# Everything goes to GPU_PREFIX (default: raytune-gpu in the folder for temporary files). Then:
#   source $GPU_PREFIX/env.sh && raytune-eagle run ...
set -euo pipefail

usage() { sed -n '6,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }

tools=$(cd "$(dirname "$0")" && pwd)
prefix=${GPU_PREFIX:-${TMPDIR:-/tmp}/raytune-gpu}
state=$prefix/state log=$prefix/log models=$prefix/models/smollm2_135m
finish="" warm=yes pieces=""
for argument; do
  case $argument in
    --finish) finish=yes ;;
    --no-warm) warm="" ;;
    -*) usage ;;
    *) [[ -z $pieces ]] || usage; pieces=$argument ;;
  esac
done
[[ -n $pieces ]] || usage
SECONDS=0
say() { printf '## %3ds %s\n' "$SECONDS" "$*"; }

begin() { # begin NAME LIMIT_S COMMAND...: runs on after this script has ended; state/NAME.begun, then state/NAME.ended
  local name=$1 limit=$2; shift 2
  [[ -e $state/$name.begun ]] && return
  touch "$state/$name.begun"
  # shellcheck disable=SC2016 # expanded by the inner shell
  setsid bash -c '
    state=$1 name=$2; shift 2; start=$SECONDS; code=0
    "$@" || code=$?
    echo "$code $((SECONDS - start))" >"$state/$name.ended.new"
    mv "$state/$name.ended.new" "$state/$name.ended"
  ' begin "$state" "$name" timeout -k 15 "$limit" "$@" >"$log/$name.log" 2>&1 </dev/null &
}

await() { # await NAME LIMIT_S: true if it ended well
  local name=$1 until=$((SECONDS + $2)) rc took
  [[ -e $state/$name.begun ]] || return 0
  while [[ ! -e $state/$name.ended ]] && ((SECONDS < until)); do sleep 0.2; done
  [[ -e $state/$name.ended ]] || { say "$name: still running after $2 s of waiting"; return 1; }
  read -r rc took <"$state/$name.ended"
  say "$name: $took s, exit $rc"
  ((rc == 0)) || tail -n 15 "$log/$name.log"
  return "$rc"
}

write_env() {
  mkdir -p "$prefix/bin"
  printf '#!/bin/sh\nexec python3 -m raytune_eagle "$@"\n' >"$prefix/bin/raytune-eagle"
  chmod +x "$prefix/bin/raytune-eagle"
  cat >"$prefix/env.sh" <<END
export PYTHONPATH=$prefix/site:$(dirname "$tools")
export PATH=$prefix/bin:\$PATH
export TVM_FFI_CACHE_DIR=$prefix/jitcache SGLANG_ENABLE_JIT_DEEPGEMM=0
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
export SMOLLM2=$models
unset PYTHONDONTWRITEBYTECODE
END
}

start_what_can() {
  local arrived
  arrived=$(find "$state" -name 'part_*' | wc -l)
  [[ -d $prefix/site ]] && begin "bytecode_$arrived" 150 flock "$state/lock" nice python3 -m compileall -q -j 8 "$prefix/site"
  if [[ -e $state/target && -e $state/engine ]]; then
    begin model 120 python3 "$tools/gguf_to_hf.py" "$prefix/gguf/model.gguf" "$models/target"
  fi
  if [[ -n $warm && -e $state/draft && -e $state/engine ]]; then
    begin warm 130 python3 "$tools/gpu_warm.py" "$models/draft" "$prefix/warm" 39871 110
  fi
}

free_gpus() { # the throw-away server must be gone before anything is measured
  local tries
  for tries in $(seq 20); do
    [[ -z $(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null) ]] && return 0
    sleep 0.5
  done
  say "a process still holds a GPU after $((tries / 2)) s"
  return 1
}

check() {
  timeout 150 python3 - <<'END'
import importlib, os, time
for name in ("torch", "ray", "optuna", "duckdb", "pandas", "pyarrow", "aiohttp", "httptools", "uvloop", "pydantic", "rich", "psutil", "pynvml",
             "transformers", "sgl_kernel", "sglang", "sglang.srt.server_args", "raytune_eagle"):
    start = time.monotonic()
    try:
        module = importlib.import_module(name)
    except Exception as error:  # say them all
        print(f"   {name}: {type(error).__name__}: {error}")
        os.environ["BAD"] = "1"
        continue
    print(f"   {name} {getattr(module, '__version__', '')} {time.monotonic() - start:.1f} s")
raise SystemExit("BAD" in os.environ)
END
}

mkdir -p "$state" "$log"
write_env
python3 "$tools/gpu_unpack.py" "$pieces" "$prefix"
# shellcheck disable=SC1091 # written above
source "$prefix/env.sh"
start_what_can
if [[ -z $finish ]]; then
  say "unpacked; begun: $(cd "$state" && echo *.begun)"
  exit 0
fi
code=0
await model 130 || code=1
[[ -e $models/target/config.json ]] || { say "no target model: not all pieces arrived?"; code=1; }
check || code=1
say "imports checked"
for step in "$state"/bytecode_*.begun; do
  step=$(basename "$step" .begun)
  await "$step" 60 || true # only slower without
done
await warm 45 || true # likewise
if [[ -e $state/warm.begun && ! -e $state/warm.ended ]]; then
  kill -TERM "$(<"$prefix/warm/pid")" || true
  await warm 15 || true
fi
free_gpus || code=1
if ((code)); then say "NOT ready, see above"; else say "ready; models: $models; next: source $prefix/env.sh"; fi
exit "$code"
