# An agent that adds up the numbers of its task: `1 2 3` gives 6. Where awk is mawk, start it with
# `awk -W interactive -f sums.awk`, or it waits for more lines than there are.
BEGIN { FS = "\t"; hungry() }
$0 == "" { exit }
/^#/ { next }
$3 !~ /^[-+.0-9eE ]+$/ { report("error", "these are no numbers"); next }
{
    count = split($3, numbers, " "); sum = 0
    for (i = 1; i <= count; i++) sum += numbers[i]
    report("ok", "", sum)
}
function report(status, text, detail) { printf "%s\t%s\t%s %s\n", $1, detail, status, text; hungry() }
function hungry() { print "#hungry"; fflush() }
