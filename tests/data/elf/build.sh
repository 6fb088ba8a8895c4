#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make the sample files of this directory from tiny.c again (gcc 12, x86-64, binutils 2.40).
set -eu
cd "$(dirname "$0")"
plain='-nostdlib -Os -s -fno-asynchronous-unwind-tables -Wl,-z,noseparate-code,--build-id=none'
dep=$(mktemp -d)
trap 'rm -r "$dep"' EXIT
for abi in x86-64:-m64 i386:-m32 x32:-mx32; do
	# shellcheck disable=SC2086
	gcc "${abi#*:}" -shared $plain -Wl,-soname,libdep.so.2 -x c /dev/null -o "$dep/libdep.so"
	# shellcheck disable=SC2086
	gcc "${abi#*:}" -shared $plain -Wl,-soname,libtiny.so.1,--no-as-needed \
		tiny.c "$dep/libdep.so" -o "libtiny-${abi%%:*}.so"
done
# shellcheck disable=SC2086
gcc -shared $plain tiny.c -o libnameless.so
# shellcheck disable=SC2086
gcc -static $plain -e gpuruntime_tiny tiny.c -o tiny-static
