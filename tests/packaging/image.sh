#!/usr/bin/env bash
# Builds packaging/Dockerfile with a container engine and runs the image, where no registry of images can be reached: Debian
# comes from debootstrap, Rust is this machine's. Each step of the Dockerfile is run as it stands there. As root.
#
#   tests/packaging/image.sh FOLDER [TARGET]
#
# FOLDER is where the two images that stand for the registry's are made. Crates that this machine has are not fetched
# again; TARGET is a build folder of cargo's to go on from. image_run.sh runs the image then. Needs buildah and debootstrap.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
folder=$1
target=${2:-}
mkdir -p "$folder"

step() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }
image() { sed -n "s/^FROM \([^ ]*$1[^ ]*\).*/docker.io\/library\/\1/p" packaging/Dockerfile | head -n 1; }
debian=$(image debian)
rust=$(image rust)

step "$debian, from debootstrap"
[ -d "$folder/debian/etc" ] || "$here/root.sh" "$folder/debian"
container=$(buildah from scratch)
buildah add --quiet "$container" "$folder/debian" / > /dev/null
buildah config --cmd bash "$container"
buildah commit --quiet --rm "$container" "$debian" > /dev/null

step "$rust, from $(rustc --version)"
container=$(buildah from --pull-never "$debian")
buildah run --isolation chroot "$container" -- sh -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends build-essential ca-certificates > /dev/null'
toolchain=$(rustc --print sysroot)
for part in bin lib libexec; do
  buildah add --quiet "$container" "$toolchain/$part" "/usr/local/rust/$part" > /dev/null
done
buildah config --env PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  --env CARGO_HOME=/usr/local/cargo "$container"
buildah commit --quiet --rm "$container" "$rust" > /dev/null

step "packaging/Dockerfile"
volumes=(--volume "${CARGO_HOME:-$HOME/.cargo}/registry:/usr/local/cargo/registry")
[ -z "$target" ] || volumes+=(--volume "$(cd "$target" && pwd):/src/target")
buildah bud --isolation chroot --pull-never "${volumes[@]}" --file packaging/Dockerfile \
  --ignorefile packaging/Dockerfile.dockerignore --tag lily .
buildah images

"$here/image_run.sh"
