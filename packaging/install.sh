#!/bin/sh
# Installs what `cargo build --release` has built: programs, manual pages, completions.
#
#   packaging/install.sh [PREFIX [FOLDER]]
#
# PREFIX is /usr/local where nothing is said, FOLDER target/release. DESTDIR in the environment stands before PREFIX, for
# packages.
set -eu
prefix=${DESTDIR:-}${1:-/usr/local}
built=${2:-target/release}

for program in lily lily-server; do
  [ -x "$built/$program" ] || { echo "there is no $built/$program: run \`cargo build --release --locked\` first" >&2; exit 1; }
  install -d "$prefix/bin"
  install -m 755 "$built/$program" "$prefix/bin/$program"
done

"$built/lily" man "$prefix/share/man/man1" > /dev/null

# Each shell's own name for the completions of a program, where it looks for them.
complete() {
  install -d "$prefix/share/$2"
  "$built/lily" completions "$1" --program "$4" > "$prefix/share/$2/$3"
}
for program in lily lily-server; do
  complete bash bash-completion/completions "$program" "$program"
  complete zsh zsh/site-functions "_$program" "$program"
  complete fish fish/vendor_completions.d "$program.fish" "$program"
done
echo "lily is in $prefix/bin"
