#!/usr/bin/env bash
# Runs packaging/lily.service under systemd: a clean Debian is booted in namespaces of its own, with the program as
# packaging/install.sh installs it and the demo's checkpoint as the model. As root.
#
#   tests/packaging/unit.sh FOLDER TARGET
#
# FOLDER is where the Debian is made, TARGET the folder of the programs that were built. The network is this machine's: port
# 8000 must be free. Needs systemd-nspawn, debootstrap, curl, nsenter.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
root=$1/systemd
target=$2
mkdir -p "$1"

step() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }
inside() { nsenter --target "$init" --mount --pid --uts --ipc -- "$@"; }
state() { inside systemctl show lily --property "$1" --value; }
status() { curl --silent --output /dev/null --write-out '%{http_code}' "$@"; }
health() { curl --silent --fail http://127.0.0.1:8000/health; }
# Waits up to a minute for what must become true.
until_it_holds() {
  for _ in $(seq 300); do
    if "$@" > /dev/null 2>&1; then return; fi
    sleep 0.2
  done
  echo "in vain: $*"
  inside journalctl --unit lily --no-pager | tail -n 20
  exit 1
}

step "a Debian with systemd"
[ -d "$root/etc" ] || "$here/root.sh" "$root" systemd systemd-sysv dbus
DESTDIR=$root packaging/install.sh /usr/local "$target"
install -D -m 644 packaging/lily.service "$root/etc/systemd/system/lily.service"
install -D -m 644 -t "$root/srv/models/demo" demo/checkpoint/*
rm -rf "$root/etc/systemd/system/lily.service.d"
install -d "$root/etc/lily"
echo LILY_MODEL=/srv/models/demo > "$root/etc/lily/lily.env"

step "it boots"
systemd-nspawn --register=no --keep-unit --quiet --directory "$root" --boot > "$1/boot.log" 2>&1 &
nspawn=$!
trap 'kill -TERM $nspawn 2> /dev/null; wait $nspawn' EXIT
until_it_holds pgrep --parent $nspawn
init=$(pgrep --parent $nspawn)
until_it_holds inside systemctl is-active multi-user.target

step "the service starts, as a user without rights"
inside systemctl start lily
until_it_holds health
health && echo
inside grep -E '^(Uid|CapEff|CapBnd|NoNewPrivs|Seccomp):' "/proc/$(state MainPID)/status"
[ "$(inside stat -c %u "/proc/$(state MainPID)")" -gt 1000 ]

step "it answers"
curl --silent http://127.0.0.1:8000/v1/chat/completions --header 'Content-Type: application/json' \
  --data '{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}' | grep -o '"content":"42"'

step "what systemd thinks of it"
inside systemd-analyze security lily --no-pager | tail -n 1

step "killed, it comes back"
inside systemctl kill --signal KILL lily
until_it_holds health
state NRestarts

step "with a file of keys that only root may read, whoever has none is refused"
install -D -m 644 -t "$root/etc/systemd/system/lily.service.d" packaging/keys.conf
(umask 077 && echo secret > "$root/etc/lily/keys")
inside systemctl daemon-reload
inside systemctl restart lily
until_it_holds health
[ "$(status http://127.0.0.1:8000/v1/models)" = 401 ]
[ "$(status --header 'x-api-key: secret' http://127.0.0.1:8000/v1/models)" = 200 ]

step "the part for cards does not keep it from starting where there is none"
install -D -m 644 -t "$root/etc/systemd/system/lily.service.d" packaging/nvidia.conf
inside systemctl daemon-reload
inside systemctl restart lily
until_it_holds health

step "stopped, it ends well"
inside systemctl stop lily
[ "$(state Result)" = success ]

step "a wrong flag is not tried again, a hub that is not there is"
echo LILY_FLAGS=--no-such-flag >> "$root/etc/lily/lily.env"
inside systemctl start lily
until_it_holds inside systemctl is-failed lily
state SubState
printf 'LILY_MODEL=lily/nowhere\nHF_ENDPOINT=http://127.0.0.1:1\n' > "$root/etc/lily/lily.env"
inside systemctl restart lily
waits() { [ "$(state SubState)" = auto-restart ]; }
until_it_holds waits
inside journalctl --unit lily --no-pager --output cat --lines 20 | grep 'cannot be reached'

step "all of it held"
