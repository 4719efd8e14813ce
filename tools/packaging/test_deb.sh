#!/usr/bin/env bash
# test_deb.sh [build folder]: makes the .deb packages of what is built (build/release), installs them into an empty
# root, builds and runs an example against what they hold, and removes them again. Needs dpkg-dev and file. Not part of
# the tests: cpack strips and compresses for a while.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=$(realpath "${1:-build/release}")
for command in dpkg-deb dpkg-shlibdeps file; do
    command -v "$command" >/dev/null || { echo "test_deb: $command is missing: apt-get install dpkg-dev file" >&2; exit 2; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && cpack --config "$build/CPackConfig.cmake" -B "$work/packages" >/dev/null)
ls "$work"/packages/*.deb
for package in "$work"/packages/*.deb; do
    dpkg-deb --field "$package" Package Version Depends
done

root=$work/root
mkdir -p "$root"/var/lib/dpkg/{info,updates,triggers} "$root"/etc
touch "$root"/var/lib/dpkg/{status,available}
# The root has no other packages: what they depend on is the machine's own.
dpkg --root="$root" --force-depends --force-not-root --force-script-chrootless --install "$work"/packages/*.deb
library=$(dirname "$(find "$root/usr/lib" -name libheadlong.so)")
cc tools/examples/attention.c -o "$work/program" -I"$root/usr/include" -L"$library" -lheadlong
LD_LIBRARY_PATH=$library "$work/program"
LD_LIBRARY_PATH=$library "$root/usr/bin/headlong" generate -p "It is a truth" -n 8
cmake -S tools/examples/consumer -B "$work/consumer" -DCMAKE_PREFIX_PATH="$root/usr" >/dev/null
cmake --build "$work/consumer" >/dev/null
LD_LIBRARY_PATH=$library "$work/consumer/consumer_cxx"

mapfile -t names < <(for package in "$work"/packages/*.deb; do dpkg-deb --field "$package" Package; done)
dpkg --root="$root" --force-depends --force-not-root --force-script-chrootless --purge "${names[@]}"
left=$(find "$root/usr" ! -type d 2>/dev/null || true)
if [[ -n $left ]]; then
    printf 'left behind:\n%s\n' "$left"
    exit 1
fi
echo "test_deb: installed, ran, and removed"
