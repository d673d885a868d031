#!/bin/sh
# Look for what a goal of the Makefile needs, and install what is missing: setup.sh build | test | python | format | ci ...
# As root, or where sudo asks no password, Debian's packages are installed. Otherwise this says what to install and exits 1.
set -u

missing=""
need() { # need PACKAGE CHECK...: the check is a command that succeeds when the package is not needed
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}
program() { command -v "$1"; }
either() { command -v "$1" || command -v "$2"; }
header() { echo "#include <$1>" | "${CC:-cc}" -E -include stdarg.h -include stddef.h -include setjmp.h -include stdint.h -; }
libc_header() { echo '#include <pthread.h>' | "${CC:-cc}" -E -; }
file() { [ -e "$1" ]; }

for goal in "$@"; do
    case $goal in
    build)
        need gcc program "${CC:-cc}"
        need libc6-dev libc_header
        need cmake program cmake
        need ninja-build either ninja make
        ;;
    test)
        need libcmocka-dev header cmocka.h
        need g++ program "${CXX:-c++}"
        need python3 program python3
        ;;
    python) need python3-venv python3 -c 'import ensurepip, venv' ;;
    format) need clang-format program clang-format ;;
    ci)
        need git program git
        need pkg-config program pkg-config
        need clang program clang
        need ccache program ccache
        need valgrind program valgrind
        need binutils program strip
        need qemu-user either qemu-aarch64 qemu-aarch64-static
        need gcc-aarch64-linux-gnu program aarch64-linux-gnu-gcc
        need g++-aarch64-linux-gnu program aarch64-linux-gnu-g++
        need libc6-dev-arm64-cross file /usr/aarch64-linux-gnu/include/stdio.h
        need libcmocka-dev:arm64 file /usr/lib/aarch64-linux-gnu/libcmocka.so
        ;;
    *)
        echo "setup.sh: no goal '$goal'; there are build, test, python, format, ci" >&2
        exit 2
        ;;
    esac
done
[ -z "$missing" ] && exit 0

packages=$(echo "$missing" | tr ' ' '\n' | sort -u | tr '\n' ' ')
packages=${packages# }
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    as_root="no"
fi
if [ "$as_root" = no ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "setup: this goal ($*) needs packages that are not installed. On Debian, as root:" >&2
    case $packages in *:arm64*) echo "    dpkg --add-architecture arm64" >&2 ;; esac
    echo "    apt-get update && apt-get install -y $packages" >&2
    echo "On another system install what these Debian packages hold." >&2
    exit 1
fi
echo "setup: installing $packages"
case $packages in *:arm64*) $as_root dpkg --add-architecture arm64 ;; esac
log=$(mktemp)
if ! { $as_root apt-get update -q && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
    --no-install-recommends $packages; } >"$log" 2>&1 </dev/null; then
    tail -20 "$log" >&2
    echo "setup: apt-get could not install: $packages" >&2
    rm -f "$log"
    exit 1
fi
rm -f "$log"
