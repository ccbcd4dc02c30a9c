#!/bin/sh
# Speaks as much of Claude Code's line protocol as the tests need. What it does is in the prompt.
while [ $# -gt 0 ]; do
    case "$1" in
        --session-id) mode=new id=$2 ;;
        --resume) mode=resume id=$2 ;;
    esac
    shift
done
echo "$mode" >>"$HOME/starts"
while [ -e "$HOME/hold" ]; do sleep 0.02; done
if [ "$mode" = resume ] && [ ! -e "$HOME/talk-$id" ]; then
    echo "No conversation found with session ID: $id" >&2
    exit 1
fi
state() { echo '{"type":"system","subtype":"session_state_changed","state":"'"$1"'"}'; }
say() {
    echo '{"type":"stream_event","event":{"type":"content_block_delta","delta":{"type":"text_delta","text":"'"$1"'"}},"parent_tool_use_id":null}'
}
done_with() {
    echo '{"type":"result","subtype":"success","is_error":false,"result":"'"$1"'"}'
    state idle
}
while read -r line; do
    case "$line" in
        *'"subtype":"initialize"'*)
            case "$line" in *PreToolUse*) asks=yes ;; esac
            echo '{"type":"control_response","response":{"subtype":"success","request_id":"initialize","response":{}}}'
            ;;
        *'"subtype":"interrupt"'*)
            echo '{"type":"result","subtype":"error_during_execution","is_error":true}'
            state idle
            ;;
        *'"behavior":"deny"'*) echo refused >>"$HOME/answers" ;;
        *'"control_response"'*)
            say "answered"
            done_with ok
            ;;
        *history*)
            state running
            say "I remember $(wc -l <"$HOME/talk-$id") earlier prompts."
            done_with ok
            ;;
        *tool*)
            state running
            echo '{"type":"assistant","message":{"content":[{"type":"tool_use","id":"t7","name":"Bash","input":{"command":"echo made"}}]}}'
            if [ "$asks" ]; then
                echo '{"type":"control_request","request_id":"h1","request":{"subtype":"hook_callback","callback_id":"tool","input":{"tool_name":"Bash","tool_use_id":"t7"},"tool_use_id":"t7"}}'
                read -r answer
                case "$answer" in
                    *'"subtype":"interrupt"'*)
                        echo '{"type":"control_cancel_request","request_id":"h1"}'
                        echo '{"type":"result","subtype":"error_during_execution","is_error":true}'
                        state idle
                        continue
                        ;;
                esac
            fi
            echo '{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"t7","content":"made"}]}}'
            done_with ok
            ;;
        *long*)
            state running
            text=$(head -c 199990 /dev/zero | tr '\0' x)
            echo '{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"t8","content":"begin\\n'"$text"'\\nend"}]}}'
            done_with ok
            ;;
        *loop*)
            echo >>"$HOME/talk-$id"
            state running
            setsid sh -c 'while :; do sleep 1; done' &
            echo $! >"$HOME/left"
            say "looping"
            ;;
        *garbage*)
            state running
            printf 'not json\n\377\376\377\n'
            head -c 1000000 /dev/zero | tr '\0' z
            printf '\n'
            say "after"
            done_with ok
            ;;
        *hang*)
            echo >>"$HOME/talk-$id"
            state running
            # Leaves a process that no longer has anything to do with us.
            (setsid sleep 98765 & echo $! >"$HOME/left")
            say "hanging"
            ;;
        *mute*)
            state running
            echo '{"type":"system","subtype":"init","model":"m","mcp_servers":[]}'
            echo '{"type":"result","subtype":"success","is_error":false,"result":""}'
            state idle
            ;;
        *unresponsive*)
            state running
            say "unresponsive"
            while :; do sleep 1; done
            ;;
        *endless*)
            state running
            say "endless"
            # Not a line and not text, on both outputs.
            cat /dev/zero >&2 &
            exec cat /dev/zero
            ;;
        *crash*)
            state running
            echo "last words" >&2
            exit 3
            ;;
        *ask*)
            state running
            case "$line" in *afterwards*) say "done" && done_with ok ;; esac
            echo '{"type":"control_request","request_id":"c1","request":{"subtype":"can_use_tool","tool_name":"AskUserQuestion","input":{"questions":[{"question":"Colour?","options":[{"label":"red"}]}]},"tool_use_id":"t1"}}'
            ;;
        *many*)
            state running
            n=0
            while [ $n -lt 200 ]; do
                echo '{"type":"assistant","message":{"content":[{"type":"tool_use","id":"n'$n'","name":"Bash","input":{}}]}}'
                n=$((n + 1))
            done
            done_with ok
            ;;
        *flood*)
            state running
            text=$(head -c 30000 /dev/zero | tr '\0' x)
            n=0
            while [ $n -lt 1000 ]; do
                echo '{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"n'$n'","content":"'"$text"'"}]}}'
                n=$((n + 1))
            done
            done_with ok
            ;;
        *'"type":"user"'*)
            echo >>"$HOME/talk-$id"
            echo $$ >"$HOME/pid"
            state running
            say "Hel"
            say "lo"
            git config --global user.name >"$HOME/author"
            pwd >"$HOME/where"
            done_with ok
            ;;
    esac
done
