#!/bin/sh
# Speaks as much of the protocol of `codex app-server` as the tests need. What it does is in the
# prompt.
thread=
turn=0
notify() {
    echo '{"method":"'"$1"'","params":{"threadId":"'"$thread"'","turnId":"turn'$turn'",'"$2"'}}'
}
say() { notify item/agentMessage/delta '"itemId":"m1","delta":"'"$1"'"'; }
command() {
    echo '"item":{"type":"commandExecution","id":"'"$1"'","command":"sh -c x","cwd":"/","status":"'"$2"'","commandActions":[{"type":"unknown","command":"echo made"}],"aggregatedOutput":"'"$3"'","exitCode":0}'
}
reply() { echo '{"id":'"$1"',"result":'"$2"'}'; }
end() { notify turn/completed '"turn":{"id":"turn'$turn'","status":"'"${1:-completed}"'","error":null}'; }
while read -r line; do
    id=${line#*'"id":'}
    id=${id%%,*}
    case "$line" in
        *'"method":"initialize"'*)
            reply "$id" '{"userAgent":"harvest/0.166.0 (Debian 12.0.0; x86_64)"}'
            ;;
        *'"method":"thread/start"'*)
            echo new >>"$HOME/starts"
            thread=thread-$$
            reply "$id" '{"thread":{"id":"'"$thread"'"},"model":"m"}'
            ;;
        *'"method":"thread/resume"'*)
            echo resume >>"$HOME/starts"
            thread=${line#*'"threadId":"'}
            thread=${thread%%'"'*}
            if [ ! -e "$HOME/talk-$thread" ]; then
                echo '{"id":'"$id"',"error":{"code":-32600,"message":"no rollout found"}}'
                continue
            fi
            reply "$id" '{"thread":{"id":"'"$thread"'"},"model":"m"}'
            ;;
        *'"method":"turn/interrupt"'*)
            reply "$id" '{}'
            end interrupted
            ;;
        *'"error"'*) echo refused >>"$HOME/answers" ;;
        *'"answers"'*)
            say "answered"
            end
            ;;
        *'"method":"turn/start"'*)
            turn=$((turn + 1))
            reply "$id" '{"turn":{"id":"turn'$turn'","status":"inProgress"}}'
            case "$line" in
                *history*)
                    say "I remember $(wc -l <"$HOME/talk-$thread") earlier prompts."
                    end
                    ;;
                *tool*)
                    notify item/started "$(command t7 inProgress)"
                    notify item/commandExecution/outputDelta '"itemId":"t7","delta":"ma"'
                    notify item/completed "$(command t7 completed made)"
                    end
                    ;;
                *long*)
                    text=$(head -c 199990 /dev/zero | tr '\0' x)
                    notify item/completed "$(command t8 completed 'begin\\\\n'"$text"'\\\\nend')"
                    end
                    ;;
                *loop*)
                    echo >>"$HOME/talk-$thread"
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
                    echo >>"$HOME/talk-$thread"
                    # Leaves a process that no longer has anything to do with us.
                    (setsid sleep 98765 & echo $! >"$HOME/left")
                    say "hanging"
                    ;;
                *crash*)
                    echo "last words" >&2
                    exit 3
                    ;;
                *ask*)
                    case "$line" in *afterwards*) say "done" && end ;; esac
                    echo '{"id":"q7","method":"item/tool/requestUserInput","params":{"threadId":"'"$thread"'","itemId":"i1","questions":[{"id":"c","header":"","question":"Colour?","options":[{"label":"red","description":""}]}]}}'
                    ;;
                *mute*)
                    notify thread/name/updated '"threadName":"Quiet"'
                    end
                    ;;
                *wonder*)
                    echo '{"id":"q1","method":"attestation/generate","params":{}}'
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
                        notify item/completed "$(command n$n completed "$text")"
                        n=$((n + 1))
                    done
                    end
                    ;;
                *)
                    echo >>"$HOME/talk-$thread"
                    echo $$ >"$HOME/pid"
                    say "Hel"
                    say "lo"
                    end
                    ;;
            esac
            ;;
    esac
done
