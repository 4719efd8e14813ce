# Sourced by tools/quickstart, tools/test and tools/fuzz: which packages of Debian the project needs, and how missing ones
# get installed. Nothing is installed that is there already.

build_packages=(g++ cmake ninja-build git ca-certificates
    libxsimd-dev libtbb-dev libmimalloc-dev libfmt-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev libcli11-dev libgtest-dev
    libbenchmark-dev libxxhash-dev pkgconf python3-numpy)
docs_packages=(doxygen)
emulator_packages=(qemu-user-static)
fuzz_packages=(clang libclang-rt-14-dev)
arm64_packages=(g++-aarch64-linux-gnu libtbb-dev:arm64 libfmt-dev:arm64 libpcre2-dev:arm64
    libutf8proc-dev:arm64 libgtest-dev:arm64)

say() { printf '==> %s\n' "$*"; }

fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Runs a command as root, or says what is missing.
as_root() {
    if [[ $(id -u) -eq 0 ]]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        fail "needs root to run: $*
Run it as root, or install sudo, and start again."
    fi
}

# is_installed <package>[:<architecture>]; without one, the machine's own or all.
is_installed() {
    local wanted=${1#*:}
    [[ $1 == *:* ]] || wanted="$(dpkg --print-architecture) all"
    local architecture status
    while read -r architecture status; do
        [[ $status == installed && " $wanted " == *" $architecture "* ]] && return 0
    done < <(dpkg-query -W -f='${Architecture} ${db:Status-Status}\n' "${1%%:*}" 2>/dev/null)
    return 1
}

# Prints those of the given packages that are not installed.
missing_packages() {
    local package
    for package in "$@"; do is_installed "$package" || printf '%s\n' "$package"; done
}

# install_packages <package>...: installs what is missing.
install_packages() {
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        say "This is not a Debian system: install the counterparts of $* yourself"
        return
    fi
    local missing
    mapfile -t missing < <(missing_packages "$@")
    if [[ ${#missing[@]} -eq 0 ]]; then
        say "All packages are installed"
        return
    fi
    say "Installing with apt-get: ${missing[*]}"
    if [[ " ${missing[*]} " == *":arm64 "* ]] && ! dpkg --print-foreign-architectures | grep -qx arm64; then
        say "Adding the foreign architecture arm64"
        as_root dpkg --add-architecture arm64
    fi
    as_root apt-get update -q -o Dpkg::Use-Pty=0
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}"
}
