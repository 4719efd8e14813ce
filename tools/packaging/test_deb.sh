#!/usr/bin/env bash
# test_deb.sh [--fresh ROOT] [build folder]: makes the .deb packages of what is built (build/release), installs them,
# builds and runs programs against what they hold, and removes them again. Needs dpkg-dev and file. Not part of the
# tests: cpack strips and compresses for a while.
#
# Without --fresh they go into an empty root, and what they depend on is this machine's. With it, apt installs them and
# all that they depend on into a bare Debian 12 in the folder ROOT, which debootstrap makes if it is not there (as root,
# a few minutes).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
fresh=
if [[ ${1:-} == --fresh ]]; then
    fresh=$2
    shift 2
fi
build=$(realpath "${1:-build/release}")
for command in dpkg-deb dpkg-shlibdeps file; do
    command -v "$command" >/dev/null || { echo "test_deb: $command is missing: apt-get install dpkg-dev file" >&2; exit 2; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && cpack --config "$build/CPackConfig.cmake" -B "$work/packages" >/dev/null)
for package in "$work"/packages/*.deb; do
    dpkg-deb --field "$package" Package Version Installed-Size Depends
    dpkg-deb --contents "$package" | grep -q '/share/doc/.*/copyright$' || { echo "no licence in $package"; exit 1; }
done
mapfile -t names < <(for package in "$work"/packages/*.deb; do dpkg-deb --field "$package" Package; done)

if [[ -n $fresh ]]; then
    [[ -e $fresh/etc/debian_version ]] || debootstrap --variant=minbase bookworm "$fresh" http://deb.debian.org/debian
    rm -rf "$fresh/tmp/headlong"
    mkdir -p "$fresh/tmp/headlong"
    cp -r "$work"/packages/*.deb tools/examples "$fresh/tmp/headlong"
    cp /etc/resolv.conf /etc/hosts "$fresh/etc"
    # a namespace of its own: what is mounted goes with it
    unshare --mount sh -c "mount -t proc proc '$fresh/proc' && exec env -i http_proxy='${http_proxy:-}' \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin chroot '$fresh' bash -euo pipefail" <<'TEXT'
cd /tmp/headlong
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
install() { apt-get install -q -y --no-install-recommends -o Dpkg::Use-Pty=0 "$@" </dev/null >/dev/null 2>log || { cat log; exit 1; }; }
apt-get update -q >/dev/null
echo "== the command line alone"
install ./headlong_*.deb
headlong generate -p "It is a truth" -n 8
echo "== C, with a C compiler and no other development files"
install gcc libc6-dev pkgconf cmake make ./libheadlong*.deb
for absent in g++ libtbb-dev libfmt-dev; do
    if dpkg-query -W -f='${db:Status-Status}\n' "$absent" 2>/dev/null | grep -qx installed; then
        echo "$absent is here, which this is to show is not needed"
        exit 1
    fi
done
cc examples/attention.c -o plain -lheadlong
./plain
cc examples/attention.c -o packaged $(pkg-config --cflags --libs headlong)
./packaged
cmake -S examples/consumer -B build_c -DWITH_CXX=OFF >/dev/null
cmake --build build_c >/dev/null
build_c/consumer_c
echo "== C++"
install g++
cmake -S examples/consumer -B build >/dev/null
cmake --build build >/dev/null
build/consumer_cxx
c++ -std=c++20 examples/event_loop.cpp -o event_loop -lheadlong
./event_loop 300 2000 | tail -n 1
echo "== removed again"
apt-get purge -q -y -o Dpkg::Use-Pty=0 headlong 'libheadlong*' g++ g++-12 </dev/null >/dev/null  # g++: for the next run
left=$(find / -xdev \( -path /tmp -o -path /proc \) -prune -o -iname '*headlong*' -print)
if [[ -n $left ]] || ldconfig -p | grep headlong; then
    printf 'left behind:\n%s\n' "$left"
    exit 1
fi
TEXT
    echo "test_deb: installed in $fresh, ran, and removed"
    exit 0
fi

root=$work/root
mkdir -p "$root"/var/lib/dpkg/{info,updates,triggers} "$root"/etc
touch "$root"/var/lib/dpkg/{status,available}
# The root has no other packages: what they depend on is the machine's own.
dpkg --root="$root" --force-depends --force-not-root --force-script-chrootless --install "$work"/packages/*.deb \
    2>"$work/complaints" || { cat "$work/complaints"; exit 1; }
library=$(dirname "$(find "$root/usr/lib" -name libheadlong.so)")
cc tools/examples/attention.c -o "$work/program" -I"$root/usr/include" -L"$library" -lheadlong
LD_LIBRARY_PATH=$library "$work/program"
LD_LIBRARY_PATH=$library "$root/usr/bin/headlong" generate -p "It is a truth" -n 8
cmake -S tools/examples/consumer -B "$work/consumer" -DCMAKE_PREFIX_PATH="$root/usr" >/dev/null
cmake --build "$work/consumer" >/dev/null
LD_LIBRARY_PATH=$library "$work/consumer/consumer_cxx"

dpkg --root="$root" --force-depends --force-not-root --force-script-chrootless --purge "${names[@]}" 2>"$work/complaints" ||
    { cat "$work/complaints"; exit 1; }
left=$(find "$root/usr" ! -type d 2>/dev/null || true)
if [[ -n $left ]]; then
    printf 'left behind:\n%s\n' "$left"
    exit 1
fi
echo "test_deb: installed, ran, and removed"
