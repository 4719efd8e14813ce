#!/usr/bin/env bash
# check_exports.sh <nm> <readelf> <headlong.h> <shared library> [library that must not be needed]...: the library shows
# the C functions and the public headers' C++, under its version's name, and nothing else; it replaces no allocation
# function, and needs no library that does; nothing of its own runs when it is loaded.
set -euo pipefail
nm=$1
readelf=$2
header=$3
library=$4
shift 4

failures=0
report() {
    printf '%s\n%s\n' "$1" "$2"
    failures=$((failures + 1))
}

# "T _ZN8headlong6attendE...@@HEADLONG_0.1"; of the version itself there is an absolute symbol
symbols=$("$nm" -D --defined-only "$library" | sed -E 's/^[0-9a-f]+ //' | grep -Ev '^A HEADLONG_[0-9.]+(@.*)?$')
# not by nm -C: LLVM's does not read names with versions
shown=$(sed -E 's/^[A-Za-z] //; s/@@HEADLONG_[0-9.]+$//' <<<"$symbols" | c++filt)
if found=$(grep -Ev '@@HEADLONG_[0-9.]+$' <<<"$symbols"); then
    report 'Shown without a version:' "$found"
fi
if found=$(grep -Ev '^(hl_[a-z0-9_]+$|headlong::|(typeinfo|typeinfo name|vtable) for headlong::)' <<<"$shown"); then
    report 'Shown, and neither hl_* nor headlong:::' "$found"
fi
if found=$(grep -E 'headlong::(kernels|generic|avx|neon|reference|tools|c_api|\(anonymous)|::(Impl|State)::|^(typeinfo|typeinfo name|vtable) for .*::Impl|nlohmann|fmt::|tbb::' \
    <<<"$shown"); then
    report 'Shown, and not public:' "$found"
fi
if found=$(grep '^u ' <<<"$symbols"); then
    # all copies of the library in a process would share it, and none could be unloaded
    report 'Unique symbols:' "$found"
fi

# The functions that headlong.h declares, and no others.
declared=$(grep -oE '^HL_API [^(]*\bhl_[a-z0-9_]+\(' "$header" | grep -oE 'hl_[a-z0-9_]+\($' | tr -d '(' | sort)
if ! found=$(diff <(printf '%s\n' "$declared") <(grep -x 'hl_[a-z0-9_]*' <<<"$shown" | sort)); then
    report "Left: what $header declares; right: what is shown:" "$found"
fi
for name in 'headlong::attend(' 'headlong::KvCache::append(' 'typeinfo for headlong::Error' 'headlong::version()'; do
    grep -qF "$name" <<<"$shown" || report 'Not shown:' "$name"
done

needed=$("$readelf" -d "$library" | grep NEEDED)
for name in mimalloc jemalloc tcmalloc "$@"; do
    if found=$(grep -F "[lib$name" <<<"$needed"); then report 'Needs what it must not:' "$found"; fi
done
if found=$("$nm" "$library" | grep -E '_GLOBAL__(sub_)?I_'); then
    report 'Static objects that are constructed when the library is loaded:' "$found"
fi

printf '%s names are shown, %s of them in C; %s failures\n' "$(wc -l <<<"$shown")" "$(wc -l <<<"$declared")" "$failures"
[[ $failures -eq 0 ]]
