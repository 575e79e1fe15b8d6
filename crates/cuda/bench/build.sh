#!/bin/sh
# Builds decode.cu for a Hopper card: build.sh NVCC OUT [more flags]. CUDA 13; no GPU is needed to build.
# GEOMETRY=demo: the demo checkpoint's sizes. -DKV_BITS=8 behind OUT: keys and values of 8 bits. WARPGROUPS=0: products as on cards before Hopper. STAMPS=1: with times inside the graph (`decode stamps`). KERNELS: another folder of kernels.
set -eu
cd "$(dirname "$0")"
nvcc=$1; out=$2; shift 2
full="-DHIDDEN=2048 -DVOCAB=248320 -DHEADS=16 -DKV_HEADS=2 -DHEAD_DIM=256 -DROTARY_DIM=64 -DKEY_HEADS=16 -DVALUE_HEADS=32 -DKEY_DIM=128
-DVALUE_DIM=128 -DCONV_WIDTH=4 -DEXPERTS=256 -DTOP_K=8 -DEXPERT_WIDTH=512 -DSHARED_WIDTH=512 -DDELTA_LAYERS=30 -DATTN_LAYERS=10 -DRMS_EPS=1e-6f
-DMULTIPROCESSORS=132 -DSHARED_LIMIT=232448"
if [ "${GEOMETRY:-full}" = demo ]; then
  full="-DHIDDEN=256 -DVOCAB=4096 -DHEADS=8 -DKV_HEADS=1 -DHEAD_DIM=256 -DROTARY_DIM=64 -DKEY_HEADS=2 -DVALUE_HEADS=4 -DKEY_DIM=128
-DVALUE_DIM=128 -DCONV_WIDTH=4 -DEXPERTS=32 -DTOP_K=8 -DEXPERT_WIDTH=64 -DSHARED_WIDTH=64 -DDELTA_LAYERS=6 -DATTN_LAYERS=2 -DRMS_EPS=1e-6f
-DMULTIPROCESSORS=132 -DSHARED_LIMIT=232448"
fi
kernels=${KERNELS:-../kernels}
if [ -n "${STAMPS:-}" ]; then
  kernels=$(mktemp -d)
  trap 'rm -r "$kernels"' EXIT
  cp "${KERNELS:-../kernels}"/*.cu* "$kernels"
  python3 - "$kernels/common.cuh" <<'END'
import sys
path = sys.argv[1]
text = open(path).read()
helper = """
__device__ u32 stamp_count; __device__ u64 stamp_times[8192];
__device__ inline u32& stamp_slot() { static __shared__ u32 slot; return slot; }
__device__ inline bool stamp_thread() { return threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0; }
__device__ inline u64 stamp_now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
"""
launch, wait = "void launch_dependents() {", "void wait_predecessors() {"
text = text.replace("// Lets the next kernel", helper + "// Lets the next kernel")
text = text.replace(launch, launch + " if (stamp_thread()) { stamp_slot() = atomicAdd(&stamp_count, 1); stamp_times[2 * stamp_slot()] = stamp_now(); }")
text = text.replace("""asm volatile("griddepcontrol.wait;" ::: "memory");""", """asm volatile("griddepcontrol.wait;" ::: "memory"); if (stamp_thread()) stamp_times[2 * stamp_slot() + 1] = stamp_now();""")
open(path, "w").write(text)
END
  full="$full -DSTAMPS"
fi
"$nvcc" -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -cudart static -I"$kernels" $full -DWARPGROUPS="${WARPGROUPS:-1}" "$@" decode.cu -o "$out"
