#!/usr/bin/env bash
# check_exports.sh <nm> <readelf> <shared library>: it shows the C functions and the public headers' C++, and nothing
# else; it replaces no allocation function, and needs no library that does.
set -euo pipefail
nm=$1
readelf=$2
library=$3
# of the version script an absolute symbol may be there
shown=$("$nm" -D --defined-only -C "$library" | sed -E 's/^[0-9a-f]+ [A-Za-z] //')
bad=$(grep -Ev '^(hl_[a-z0-9_]+$|headlong::|(typeinfo|typeinfo name|vtable) for headlong::)' <<<"$shown" || true)
if [[ -n $bad ]]; then
    printf 'Shown, and neither hl_* nor headlong::\n%s\n' "$bad"
    exit 1
fi
inner=$(grep -E 'headlong::(kernels|generic|avx|neon|reference|tools|c_api|\(anonymous)|::(Impl|State)::' <<<"$shown" || true)
# a unique symbol would be one for all copies of the library in a process, and keep it from being unloaded
inner+=$("$nm" -D --defined-only -C "$library" | grep -E '^[0-9a-f]+ u ' || true)
if [[ -n $inner ]]; then
    printf 'Shown, and not public\n%s\n' "$inner"
    exit 1
fi
for function in hl_version hl_attend hl_cache_create hl_generate; do
    grep -qx "$function" <<<"$shown" || { printf '%s is not shown\n' "$function"; exit 1; }
done
grep -q '^headlong::attend(' <<<"$shown" || { echo 'headlong::attend is not shown'; exit 1; }
grep -q '^typeinfo for headlong::Error$' <<<"$shown" || { echo 'the type of errors is not shown'; exit 1; }
if "$readelf" -d "$library" | grep -E 'NEEDED.*(mimalloc|jemalloc|tcmalloc)'; then
    echo 'it needs a library that replaces malloc'
    exit 1
fi
printf '%s names are shown\n' "$(wc -l <<<"$shown")"
