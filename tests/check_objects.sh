#!/usr/bin/env bash
# Looks into compiled objects for what would kill the program on an older processor:
#   - an instruction beyond what the object's instruction set allows; objects of the baseline allow none;
#   - a weak symbol in the unit of an instruction set that another object might define too: the linker keeps one of
#     them for all, and it may be the one with the wide instructions.
# Usage: check_objects.sh OBJDUMP NM [--isa NAME OBJECT...]...     (generic stands for the baseline)
set -euo pipefail

objdump=$1 nm=$2
shift 2

# Disassembly has a tab before the mnemonic. VEX mnemonics begin with v, as else only verr and verw do.
x86_vex='\t(\{vex\} )?v(?!er[rw] )|%[yz]mm'
x86_evex='%zmm|%[xy]mm(1[6-9]|2[0-9]|3[01])|%k[0-7]'
# VNNI: two sets have it, in the coding of theirs. What has both codings is disassembled with {vex} in front of one.
x86_vnni_evex='\tvpdp'
x86_vnni_vex='\{vex\}'
x86_beyond_vnni_vex='\{vex\} (?!vpdp(busd|wssd)s? )'
# BF16, FP16, IFMA, VBMI, BITALG, VP2INTERSECT: not in F, CD, BW, DQ, VL. (vcvtps2ph is F16C's.)
x86_beyond_avx512='\tv(pdp(?!busds? |wssds? )|dpbf16|cvtne|p2intersect|pmadd52|pmultishift|popcnt|perm[it2]*b |pcompress[bw]|pexpand[bw]|psh[lr]d|(?!cvtps2)[a-z0-9]+(ph|sh)\b)'
x86_scalar='\t(andn|bextr|blsi|blsr|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|popcnt|movbe|adcx|adox)[lqw]? '
arm_dot='\t[su]dot\t'
# Armv8.1 (atomics, CRC, rounding multiplies), 8.2 (half precision arithmetic), 8.6 (matrices, BF16), SVE.
arm='\t(cas|swp|(ld|st)(add|clr|set|eor|[su]max|[su]min))(p|a|l|al)?[bh]?\t|\tcrc32|\tsqrdml[as]h\t'
arm+='|\t(?!fcvt)f[a-z0-9]+\t(v[0-9]+\.[48]h|h[0-9])|\t(usdot|sudot|smmla|ummla|usmmla|bfdot|bfmmla|bfmlal[bt]|bfcvtn?2?|fmlal2?|fmlsl2?)\t'
arm+='|[ ,{\t]z[0-9]+\.[bhsd]'

# forbidden ISA DISASSEMBLY: the pattern of what must not occur.
forbidden() {
    case $1 in
        generic)
            if [[ $2 == *"file format elf64-x86-64"* ]]; then echo "$x86_vex|$x86_scalar"; else echo "$arm|$arm_dot"; fi ;;
        avx2) echo "$x86_evex|$x86_scalar|$x86_vnni_evex|$x86_vnni_vex" ;;
        avx2vnni) echo "$x86_evex|$x86_scalar|$x86_vnni_evex|$x86_beyond_vnni_vex" ;;
        avx512) echo "$x86_scalar|$x86_beyond_avx512|$x86_vnni_evex|$x86_vnni_vex" ;;
        avx512vnni) echo "$x86_scalar|$x86_beyond_avx512|$x86_vnni_vex" ;;
        neon) echo "$arm|$arm_dot" ;;
        neondot) echo "$arm" ;;
        *) echo "check_objects.sh: no rule for the instruction set $1" >&2; exit 2 ;;
    esac
}

failures=0 objects=0 isa=generic
report() {
    echo "$1"
    head -n 5 <<<"$2"
    failures=$((failures + 1))
}
while [[ $# -gt 0 ]]; do
    if [[ $1 == --isa ]]; then
        isa=$2
        shift 2
        continue
    fi
    code=$("$objdump" -d --no-show-raw-insn "$1")
    symbols=$("$nm" -C --defined-only "$1")
    pattern=$(forbidden "$isa" "${code:0:400}")
    if found=$(grep -P "$pattern" <<<"$code"); then
        report "$1 holds instructions that $isa does not have:" "$found"
    fi
    if [[ $isa != generic ]] &&
        found=$(grep -E '^[0-9a-f]* [WVu] ' <<<"$symbols" | grep -vE "headlong::$isa::|xsimd_$isa::"); then
        report "$1 holds weak symbols outside headlong::$isa and xsimd_$isa:" "$found"
    fi
    objects=$((objects + 1))
    shift
done
echo "$objects objects, $failures failures"
[[ $objects -gt 0 && $failures -eq 0 ]]
