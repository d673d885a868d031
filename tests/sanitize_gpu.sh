#!/bin/sh
# sanitize_gpu.sh FOLDER: the GPU tests of a build's tests folder under compute-sanitizer: accesses out of bounds in
# test_cuda, the case list's quick run and the ladder, then reads of memory that nobody wrote and misused barriers in the
# case list and the ladder. The checks run side by side, for most of their time goes by on the host. 77, for ctest:
# skipped, with the reason.
folder=$1
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
[ -n "$tool" ] || { echo "skipped: compute-sanitizer, of CUDA's toolkit, was not found"; exit 77; }
probe="$folder/test_cuda --only a_device_that_is_not_there_is_said"
reason=$($probe 2>&1 | grep '^skipped')
[ -z "$reason" ] || { echo "$reason"; exit 77; }
reason=$("$tool" --tool memcheck --report-api-errors no $probe 2>&1) ||
    { echo "skipped: compute-sanitizer does not run here:"; echo "$reason" | head -5; exit 77; }
logs=$(mktemp -d) || exit 1
trap 'rm -rf "$logs"' EXIT
checks=0
running=
check() {
    checked=$1; shift
    checks=$((checks + 1))
    echo "== $checked: $*" >"$logs/$checks.title"
    "$tool" --tool "$checked" --error-exitcode 9 --print-limit 5 "$@" >"$logs/$checks.log" 2>&1 &
    running="$running $!"
}
# What an application asks for and is refused is reported too: tests of refusals and of graphs' capture do that on purpose.
check memcheck --report-api-errors no "$folder/test_cuda"
check memcheck --report-api-errors no "$folder/test_cuda_cases" --quick
check memcheck --report-api-errors no "$folder/test_cuda_ladder"
# initcheck does not see what bulk copies write, and the float dQ is written by these alone.
check initcheck --kernel-name-exclude kernel_substring=backward_convert_sm90 "$folder/test_cuda_cases" --quick
check initcheck "$folder/test_cuda_ladder"
check synccheck "$folder/test_cuda_cases" --quick
check synccheck "$folder/test_cuda_ladder"
status=0
number=0
for process in $running; do
    wait "$process" || status=1
    number=$((number + 1))
    cat "$logs/$number.title"
    tail -12 "$logs/$number.log"
done
exit $status
