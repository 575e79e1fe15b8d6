#!/bin/sh
# Brings NVIDIA's run-time compiler, which Lily's CUDA kernels are compiled with, from PyPI into a folder.
#
#   packaging/nvrtc.sh FOLDER [PACKAGE]
#
# PACKAGE is nvidia-cuda-nvrtc==13.0.*, for drivers from 580 on. Older drivers run nothing that a newer major version has
# compiled: for them it is nvidia-cuda-nvrtc-cu12==12.8.*. The folder should be one that the system's loader knows (then
# `ldconfig`), or stand in LD_LIBRARY_PATH. Needs Python with pip.
set -eu
folder=$1
package=${2:-nvidia-cuda-nvrtc==13.0.*}

wheel=$(mktemp -d)
trap 'rm -rf "$wheel"' EXIT
python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$wheel" "$package"
python3 -m zipfile -e "$wheel"/*.whl "$wheel/files"

install -d "$folder"
# The compiler, and what it loads; not the variant for other C++ libraries (`.alt`).
find "$wheel/files" -name 'libnvrtc*.so.*' ! -name '*.alt.*' -exec install -m 644 {} "$folder" \;
ls "$folder"/libnvrtc.so.* "$folder"/libnvrtc-builtins.so.*
