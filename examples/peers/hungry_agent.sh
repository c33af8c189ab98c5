#!/bin/sh
# A hungry agent in POSIX sh. It turns the payload of each task into capitals.
#
#     taskyard worker --service default --agent 'sh hungry_agent.sh'
#
# The protocol is docs/dialects/hungry.md. The host that starts this program handles connections,
# keys, leases and restarts of the broker. The agent only reads and writes lines.
tab=$(printf '\t')

# Print stdin as a field of a report: tabs, newlines and backslashes are escaped.
escape() {
    sed -e 's/\\/\\\\/g' -e "s/$tab/\\\\t/g" | awk '{ printf "%s%s", (NR > 1 ? "\\n" : ""), $0 }'
}

echo '#hungry'
while IFS= read -r line && [ -n "$line" ]; do
    case $line in
        '#'*) continue ;; # "#idle": no task now, but one may follow
    esac
    # ID, LANE and PAYLOAD. A field has no tab, and LANE may be empty.
    id=${line%%"$tab"*}
    payload=${line##*"$tab"}
    # A program that runs here would need `< /dev/null`: stdin has the next task.
    if result=$(printf %b "$payload" | tr '[:lower:]' '[:upper:]' | escape); then
        printf '%s\t%s\tok\n' "$id" "$result"
    else
        printf '%s\t\tdeferred tr failed\n' "$id"
    fi
    echo '#hungry'
done
