#!/bin/sh
# A hungry agent written from its page: agent.sh NAME LEDGER.
tab=$(printf '\t')
echo '#hungry'
while IFS= read -r line && [ -n "$line" ]; do
    case $line in '#'*) continue ;; esac
    text=${line##*"$tab"}
    sleep 0.1
    printf '%s\t%s\t%s\n' "$(date +%s.%3N)" "$1" "$text" >> "$2"
    printf '%s\t%s\tok\n#hungry\n' "${line%%"$tab"*}" "$text"
done
