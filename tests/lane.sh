#!/usr/bin/env bash
# Runs pytest with the arguments given. Of up to 5 failed tests it says which they are and runs them once more: they kill real processes and
# wait for real clusters beside other work. What fails twice, or fails in larger numbers, fails.
set -uo pipefail
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
"$@" -o cache_dir="$cache"
status=$?
[ "$status" = 1 ] || exit "$status"
failed=$(grep -c '": true' "$cache/v/cache/lastfailed")
[ "$failed" -le 5 ] || exit 1
echo "$failed failed; once more. A test that passes now is unsteady, and that is a defect too: say so in an issue, with both outputs."
"$@" -o cache_dir="$cache" --last-failed --last-failed-no-failures=none
