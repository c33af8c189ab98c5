#!/usr/bin/env bash
# A ping-pong worker without ZeroMQ: bash alone reads and writes the bytes of ZMTP 3.0.
# It turns each job into capitals.
#
#     bash ping_pong_worker.bash 127.0.0.1 6002
#
# The protocol is docs/dialects/ping-pong.md. Bytes are kept as escapes, `\x41` for A, because a
# variable of bash can't hold a zero byte. Bash has no CURVE: on another machine than the broker,
# connect to a relay on loopback.
set -u
export LC_ALL=C # a character is a byte
trap '' PIPE    # a write to a closed connection fails, and does not end this program

host=${1:?usage: ping_pong_worker.bash HOST PORT}
port=${2:?usage: ping_pong_worker.bash HOST PORT}
part_limit=3 # seconds for the next byte of a handshake or of a message that has begun

# Convert text without control characters to escapes, into the variable `escaped`.
escape() {
    local text=$1 at code
    escaped=''
    for ((at = 0; at < ${#text}; at++)); do
        printf -v code '\\x%02x' "'${text:at:1}"
        escaped+=$code
    done
}

# Add a frame with these flags to the variable `frames`. The flags: 0, the last of its message; 1,
# more follow; 4, a command of ZMTP itself. The size is one byte or, with the flag 2, eight.
add_frame() {
    local flags=$1 size=$((${#2} / 4)) head
    if ((size < 256)); then
        printf -v head '\\x%02x\\x%02x' "$flags" "$size"
    else
        printf -v head '%016x' "$size"
        printf -v head '\\x%02x%s' $((flags + 2)) "$(sed 's/../\\x&/g' <<< "$head")"
    fi
    frames+=$head$2
}

# Send a message of the dialect: an empty frame, and the content as escapes. It is one write: TCP
# would delay a second one by 40 ms.
send_message() {
    local frames=''
    add_frame 1 ''
    add_frame 0 "$1"
    printf '%b' "$frames" 2> /dev/null >&3
}

# Read one byte into the variable `byte`, as a number. It must arrive within `limit` seconds. A zero
# byte ends the `read` with success. A status above 128 means that time is up, but `read` may have
# taken a byte nevertheless, which counts. It is not seen if it is zero, but no message begins so.
read_byte() {
    local limit=$1 character='' status
    IFS= read -r -d '' -n 1 -u 3 -t "$limit" character 2> /dev/null
    status=$?
    [[ $status -eq 0 || -n $character ]] || return "$status"
    printf -v byte '%d' "'$character"
    ((byte &= 255, 1))
}

# Read some bytes into the variable `data`, as escapes.
read_bytes() {
    local left=$1 code byte
    data=''
    while ((left-- > 0)); do
        read_byte "$part_limit" || return 1
        printf -v code '\\x%02x' "$byte"
        data+=$code
    done
}

# Read a frame into `flags` and `data`. The time limit in seconds applies to its first byte. A frame
# that stops after it can't be resumed: the status is 1, as at the end of the connection.
read_frame() {
    local byte size=0 count
    read_byte "$1" || return
    flags=$byte
    ((count = flags & 2 ? 8 : 1))
    while ((count-- > 0)); do
        read_byte "$part_limit" || return 1
        ((size = size << 8 | byte))
    done
    read_bytes "$size"
}

# Read a message into `data`: the content of its last frame. The time limit in seconds applies to its
# first byte.
read_message() {
    read_frame "$1" || return
    while ((flags & 1)); do read_frame "$part_limit" || return 1; done
}

# Connect, and do the handshake of ZMTP with the mechanism NULL.
open_connection() {
    local property='\x0bSocket-Type\x00\x00\x00\x06DEALER' zeros
    { exec 3<> "/dev/tcp/$host/$port"; } 2> /dev/null || return
    printf -v zeros '\\x00%.0s' {1..48}
    printf '%b' '\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL'"$zeros" >&3
    printf '%b' '\x04\x1c\x05READY'"$property" >&3
    read_bytes 64 && read_frame "$part_limit" # the same from the broker: its greeting, and its READY
}

# Return in `data` the result of the job there: small letters become capitals.
work() {
    local at code result=''
    for ((at = 0; at < ${#data}; at += 4)); do
        code=${data:at:4}
        ((16#${code:2} >= 97 && 16#${code:2} <= 122)) &&
            printf -v code '\\x%02x' $((16#${code:2} - 32))
        result+=$code
    done
    data=$result
}

escape READY && ready=$escaped
escape PING && ping=$escaped
escape PONG && pong=$escaped
escape EXIT && exit_word=$escaped

# One connection after the other. A job of an earlier connection is never reported.
while true; do
    timeouts=0
    open_connection && send_message "$ready" || { sleep 0.2; continue; }
    while ((timeouts < 3)); do
        read_message 1
        status=$?
        if ((status > 128)); then # nothing for a second
            ((timeouts += 1))
            send_message "$ping" || break
            continue
        fi
        ((status == 0)) || break # the connection has ended
        timeouts=0
        case $data in
            "$pong") ;;
            "$exit_word") exit 0 ;;
            *) work && send_message "$data" || break ;;
        esac
    done
    exec 3>&-
done
