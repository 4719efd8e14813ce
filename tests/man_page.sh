#!/bin/sh
# man_page.sh <page> <command...>: every long option that the command line's help shows is in the manual page, and the
# other way round.
set -eu
page=$1
shift
options() { grep -o -e '--[a-z0-9][a-z0-9-]*' | sort -u; }
shown=$(for command in "" info verify generate perplexity profile memory make-model bench "bench attention" \
    "bench linear" "bench model"; do
    # shellcheck disable=SC2086
    "$@" $command --help
done | options)
written=$(sed 's/\\-/-/g' "$page" | options)
printf '%s\n' "$shown" >shown.txt.$$
printf '%s\n' "$written" >written.txt.$$
trap 'rm -f shown.txt.$$ written.txt.$$' EXIT
if ! diff shown.txt.$$ written.txt.$$; then
    echo "The left side is what --help shows, the right side what $page has"
    exit 1
fi
