#!/bin/sh
tab=$(printf '\t'); echo '#hungry'
while IFS= read -r line && [ -n "$line" ]; do case $line in '#idle') continue ;; esac
    printf '%s\t%s\tok\n#hungry\n' "${line%%"$tab"*}" "$(printf %b "${line##*"$tab"}" | wc -c)"
done
