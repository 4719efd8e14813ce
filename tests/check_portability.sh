#!/usr/bin/env bash
# check_portability.sh <source folder>: what only gcc and clang understand stands in kernels/compiler.hpp alone. Public
# headers mark what is exported, with a branch for each kind of compiler; a file inside of the command line is put there
# by the assembler.
set -euo pipefail

if grep -rnE '__builtin_|__attribute__|__asm|\basm (volatile )?\(|\basm\(|\[\[gnu::|_Pragma|#pragma (GCC|clang)|__extension__|__int128|typeof' \
    "$1/engine" "$1/kernels" "$1/include" "$1/tools" --include='*.hpp' --include='*.h' --include='*.cpp' --include='*.c' |
    grep -vE "^$1/(kernels/compiler\.hpp|include/headlong/(export\.hpp|headlong\.h)|tools/embedded_model\.cpp):"; then
    echo "The lines above hold constructs that only some compilers have: they belong in kernels/compiler.hpp." >&2
    exit 1
fi
