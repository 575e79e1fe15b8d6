#!/usr/bin/env bash
# Does with the image `lily` what a user does, as the image's user with its variables, in a root of its own. There are no network of
# its own and no control group, for which a machine without systemd has no means. As root. Needs buildah and curl.
set -euo pipefail
cd "$(dirname "$0")/../.."
port=18731

container=$(buildah from --pull-never localhost/lily)
trap 'buildah rm "$container" > /dev/null' EXIT
step() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }
in_it() { buildah run --isolation chroot "${options[@]}" "$container" -- "$@"; }
options=()
entry=$(buildah inspect --type image --format '{{range .OCIv1.Config.Entrypoint}}{{.}}{{end}}' localhost/lily)

step "who it is, and what it may write to"
in_it sh -c 'id && test "$(id -u)" != 0 && touch /models/x /var/cache/lily/x ~/x && ! touch /usr/local/bin/x 2> /dev/null'
step "$entry --version"
in_it "$entry" --version
step "$entry doctor"
in_it "$entry" doctor || echo "exit code $?"
step "the loader finds NVRTC"
in_it sh -c '/sbin/ldconfig -p | grep -F libnvrtc.so.13 && test -f /usr/local/lib/libnvrtc-builtins.so.13.0'
step "manual pages and completions are there"
in_it sh -c 'ls /usr/local/share/man/man1/lily-serve.1 /usr/local/share/bash-completion/completions/lily'

step "$entry chat"
answer=$(in_it "$entry" chat "What is 17 + 25?")
echo "$answer"
[ "$answer" = 42 ]
step "$entry chat with a checkpoint that is mounted"
options=(--volume "$PWD/demo/checkpoint:/models/demo:ro")
answer=$(in_it "$entry" chat --model-path /models/demo "What is 17 + 25?")
echo "$answer"
[ "$answer" = 42 ]

step "$entry serve, until SIGTERM, which ends it with 0"
options=()
asks() {
  for _ in $(seq 100); do
    curl --silent --fail "http://127.0.0.1:$port/health" >&2 && break
    sleep 0.2
  done
  echo stop
}
asks | in_it sh -c "$entry serve --host 0.0.0.0 --port $port & read -r _; kill -TERM \$!; wait \$!"
step "all of it held"
