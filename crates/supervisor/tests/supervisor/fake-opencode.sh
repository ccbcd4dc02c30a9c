#!/bin/sh
# Speaks as much of the Agent Client Protocol as the tests need. What it does is in the prompt.
session=
update() {
    echo '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"'"$session"'","update":'"$1"'}}'
}
say() {
    update '{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"'"$1"'"}}'
}
content() { echo '[{"type":"content","content":{"type":"text","text":"'"$1"'"}}]'; }
reply() { echo '{"jsonrpc":"2.0","id":'"$1"',"result":'"$2"'}'; }
end() { reply "$prompt" '{"stopReason":"end_turn"}'; }
while read -r line; do
    id=${line#*'"id":'}
    id=${id%%,*}
    case "$line" in
        *'"method":"initialize"'*)
            reply "$id" '{"protocolVersion":1,"agentCapabilities":{"loadSession":true},"agentInfo":{"name":"OpenCode","version":"1.18.33"}}'
            ;;
        *'"method":"session/new"'*)
            echo new >>"$HOME/starts"
            session=ses_$$
            reply "$id" '{"sessionId":"'"$session"'"}'
            ;;
        *'"method":"session/load"'*)
            echo load >>"$HOME/starts"
            session=${line#*'"sessionId":"'}
            session=${session%%'"'*}
            if [ ! -e "$HOME/talk-$session" ]; then
                echo '{"jsonrpc":"2.0","id":'"$id"',"error":{"code":-32603,"message":"no such session"}}'
                continue
            fi
            say "replayed"
            update '{"sessionUpdate":"tool_call","toolCallId":"old","title":"bash","kind":"execute","status":"pending"}'
            reply "$id" '{}'
            ;;
        *'"method":"session/cancel"'*)
            reply "$prompt" '{"stopReason":"cancelled"}'
            ;;
        *'"method":"session/prompt"'*)
            prompt=$id
            case "$line" in
                *history*)
                    say "I remember $(wc -l <"$HOME/talk-$session") earlier prompts."
                    end
                    ;;
                *tool*)
                    update '{"sessionUpdate":"tool_call","toolCallId":"t7","title":"bash","kind":"execute","status":"pending","rawInput":{}}'
                    update '{"sessionUpdate":"tool_call_update","toolCallId":"t7","status":"in_progress","rawInput":{"command":"echo made"},"content":'"$(content ma)"'}'
                    # The reply may come before the end of a tool call.
                    end
                    update '{"sessionUpdate":"tool_call_update","toolCallId":"t7","status":"completed","content":'"$(content made)"'}'
                    ;;
                *long*)
                    text=$(head -c 199990 /dev/zero | tr '\0' x)
                    update '{"sessionUpdate":"tool_call","toolCallId":"t8","title":"bash","kind":"execute","status":"completed","content":'"$(content 'begin\\\\n'"$text"'\\\\nend')"'}'
                    end
                    ;;
                *loop*)
                    echo >>"$HOME/talk-$session"
                    setsid sh -c 'while :; do sleep 1; done' &
                    echo $! >"$HOME/left"
                    say "looping"
                    ;;
                *garbage*)
                    printf 'not json\n\377\376\377\n'
                    head -c 1000000 /dev/zero | tr '\0' z
                    printf '\n'
                    say "after"
                    end
                    ;;
                *hang*)
                    echo >>"$HOME/talk-$session"
                    # Leaves a process that no longer has anything to do with us.
                    (setsid sleep 98765 & echo $! >"$HOME/left")
                    say "hanging"
                    ;;
                *crash*)
                    echo "last words" >&2
                    exit 3
                    ;;
                *huge*)
                    update '{"sessionUpdate":"tool_call","toolCallId":"t9","title":"bash","kind":"execute","status":"in_progress"}'
                    printf '%s' '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"'"$session"'","update":{"sessionUpdate":"tool_call_update","toolCallId":"t9","status":"completed","rawOutput":"'
                    head -c 9000000 /dev/zero | tr '\0' x
                    echo '"}}}'
                    end
                    ;;
                *mute*)
                    update '{"sessionUpdate":"session_info_update","title":"Quiet"}'
                    end
                    ;;
                *wonder*)
                    echo '{"jsonrpc":"2.0","id":"q1","method":"fs/read_text_file","params":{"path":"/etc/passwd"}}'
                    read -r answer
                    case "$answer" in
                        *'"code":-32601'*'"id":"q1"'*) say "refused" ;;
                    esac
                    end
                    ;;
                *flood*)
                    text=$(head -c 30000 /dev/zero | tr '\0' x)
                    n=0
                    while [ $n -lt 1000 ]; do
                        update '{"sessionUpdate":"tool_call","toolCallId":"n'$n'","title":"bash","status":"completed","content":'"$(content "$text")"'}'
                        n=$((n + 1))
                    done
                    end
                    ;;
                *)
                    echo >>"$HOME/talk-$session"
                    echo $$ >"$HOME/pid"
                    say "Hel"
                    say "lo"
                    end
                    ;;
            esac
            ;;
    esac
done
