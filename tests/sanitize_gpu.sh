#!/bin/sh
# sanitize_gpu.sh FOLDER: the GPU tests of a build's tests folder under compute-sanitizer: accesses out of bounds in
# test_cuda, the case list's quick run and the ladder, then reads of memory that nobody wrote and misused barriers in the
# case list and the ladder. 77, for ctest: skipped, with the reason.
folder=$1
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
[ -n "$tool" ] || { echo "skipped: compute-sanitizer, of CUDA's toolkit, was not found"; exit 77; }
probe="$folder/test_cuda --only a_device_that_is_not_there_is_said"
reason=$($probe 2>&1 | grep '^skipped')
[ -z "$reason" ] || { echo "$reason"; exit 77; }
reason=$("$tool" --tool memcheck --report-api-errors no $probe 2>&1) ||
    { echo "skipped: compute-sanitizer does not run here:"; echo "$reason" | head -5; exit 77; }
status=0
check() {
    checked=$1; shift
    echo "== $checked: $*"
    "$tool" --tool "$checked" --error-exitcode 9 --print-limit 5 "$@" >sanitize.log 2>&1 || status=1
    tail -12 sanitize.log
}
# What an application asks for and is refused is reported too: tests of refusals and of graphs' capture do that on purpose.
check memcheck --report-api-errors no "$folder/test_cuda"
check memcheck --report-api-errors no "$folder/test_cuda_cases" --quick
check memcheck --report-api-errors no "$folder/test_cuda_ladder"
for name in initcheck synccheck; do
    check $name "$folder/test_cuda_cases" --quick
    check $name "$folder/test_cuda_ladder"
done
rm -f sanitize.log
exit $status
