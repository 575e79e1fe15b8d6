#!/usr/bin/env bash
# Makes a clean Debian in a folder: what the tests beside this file run in. As root.
#
#   tests/packaging/root.sh FOLDER [PACKAGE…]
#
# Packages come from MIRROR, or from where this machine's own come from; certificates that this machine trusts besides are
# trusted there, too. Needs debootstrap.
set -euo pipefail
root=$1
shift

mirror=${MIRROR:-$(cat /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources 2> /dev/null |
  grep -v '^#' | grep -m 1 -oE 'https?://[^ ]+' || true)}
[ -n "$mirror" ] || { echo "MIRROR is to say where Debian's packages come from"; exit 1; }
packages=$(IFS=,; echo "$*")
debootstrap --variant=minbase ${packages:+--include="$packages"} bookworm "$root" "$mirror" > "$root.log" ||
  { tail "$root.log"; exit 1; }
mkdir -p "$root/usr/local/share/ca-certificates"
cp -r /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates"
