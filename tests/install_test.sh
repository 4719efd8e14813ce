#!/usr/bin/env bash
# install_test.sh <build folder> <source folder>: installs what is built, moves the tree, and builds and runs programs
# against it: by find_package, by pkg-config, and by the compiler alone.
set -euo pipefail
build=$1
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
examples=$source/tools/examples

cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/moved"  # nothing in the tree knows where it was
prefix=$work/moved
library=$(dirname "$(find "$prefix" -name 'libheadlong.so')")
export LD_LIBRARY_PATH=$library

step() { printf '== %s\n' "$*"; }
# built_with <option>...: whether all of these are on in the build that was installed
built_with() {
    local option
    for option in "$@"; do grep -qE "^$option:[A-Z]+=(ON|TRUE|1)$" "$build/CMakeCache.txt" || return 1; done
}

step "nothing names a folder of this machine"
if grep -rIlF -e "$work" -e "$build" -e "$source" "$prefix"; then exit 1; fi

step "find_package, C and C++"
cmake -S "$examples/consumer" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Debug >/dev/null
cmake --build "$work/cmake" >/dev/null
"$work/cmake/consumer_c"
"$work/cmake/consumer_cxx"
step "find_package, C without a C++ compiler"
CXX=/nonexistent cmake -S "$examples/consumer" -B "$work/cmake_c" -DCMAKE_PREFIX_PATH="$prefix" -DWITH_CXX=OFF >/dev/null
cmake --build "$work/cmake_c" >/dev/null
"$work/cmake_c/consumer_c"
if built_with HEADLONG_TBB HEADLONG_MIMALLOC; then
    step "find_package, the archive and the adapters"
    cmake -S "$source/tests/adapters" -B "$work/adapters" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Debug >/dev/null
    cmake --build "$work/adapters" >/dev/null
    "$work/adapters/adapters"
    env -u LD_LIBRARY_PATH "$work/adapters/archive"
fi

step "the compiler alone"
cc "$examples/attention.c" -o "$work/plain" -I"$prefix/include" -L"$library" -lheadlong
"$work/plain"
step "C99, and every header on its own in C++"
cc -std=c99 -pedantic -Wall -Wextra -Werror -fsyntax-only -x c "$prefix/include/headlong/headlong.h"
for header in "$prefix"/include/headlong/*.hpp; do
    [[ $header != */tbb.hpp ]] || continue  # needs oneTBB's
    c++ -std=c++20 -Wall -Wextra -Werror -Wno-pragma-once-outside-header -fsyntax-only -I"$prefix/include" \
        -include "$header" -x c++ /dev/null
done

if command -v pkg-config >/dev/null; then
    step "pkg-config"
    export PKG_CONFIG_PATH=$library/pkgconfig
    # shellcheck disable=SC2046
    cc "$examples/attention.c" -o "$work/pkg" $(pkg-config --cflags --libs headlong)
    "$work/pkg"
    # shellcheck disable=SC2046
    if pkg-config --libs headlong | grep -E 'tbb|fmt|pcre|stdc'; then exit 1; fi  # those are the archive's
    step "pkg-config, the archive inside of a host's own shared library, which shows nothing of it"
    # shellcheck disable=SC2046
    cc -shared -fPIC -Wl,--no-undefined -Wl,--exclude-libs,ALL "$examples/attention.c" -o "$work/libhost.so" \
        -Dmain=host_main $(pkg-config --cflags headlong) "$library/libheadlong.a" \
        $(pkg-config --static --libs headlong | sed 's/-lheadlong\b//')
    if nm -D --defined-only "$work/libhost.so" | grep -E ' (hl_|_ZN8headlong)'; then exit 1; fi
    nm -D --defined-only "$work/libhost.so" | grep -q ' host_main$'
    step "folders that are given whole"
    cmake -S "$source" -B "$work/whole" -DHEADLONG_TESTS=OFF -DHEADLONG_TOOLS=OFF -DHEADLONG_BENCH=OFF \
        -DCMAKE_INSTALL_LIBDIR=/whole/lib -DCMAKE_INSTALL_INCLUDEDIR=/other/include >/dev/null
    folders=$(PKG_CONFIG_PATH=$work/whole/packaging pkg-config --cflags --libs-only-L headlong)
    [[ $folders == *-I/other/include*-L/whole/lib* ]] || { printf '%s\n' "$folders"; exit 1; }
else
    step "no pkg-config here: not tried"
fi

step "a host with a malloc of its own"
cc "$source/tests/hosts_malloc.c" -o "$work/hosts_malloc" -I"$prefix/include" -L"$library" -lheadlong
"$work/hosts_malloc"

if built_with HEADLONG_TOOLS; then
    step "the command line"
    "$prefix/bin/headlong" --version
    test -f "$prefix/share/man/man1/headlong.1"
fi
