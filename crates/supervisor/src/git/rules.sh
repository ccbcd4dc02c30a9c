#!/bin/sh
# Harvest writes this hook into the checkouts of a session at each boot. It refuses `git pull` and
# `git stash`; /app/AGENTS.md has the rules. A hook of the repository runs as the file `.own` beside.
[ "$1" = prepared ] || [ -x "$0.own" ] || exit 0
updates=$(cat)
refuse() {
    printf 'harvest: %s\n' "$1" >&2
    exit 1
}
if [ "$1" = prepared ]; then
    case "$GIT_REFLOG_ACTION" in
    pull | 'pull '*) refuse '@PULL@' ;;
    esac
    # A stash that exists may be dropped.
    while read -r _ new ref; do
        case "$ref:$new" in
        refs/stash:*[!0]*) refuse '@STASH@' ;;
        esac
    done <<UPDATES
$updates
UPDATES
fi
[ ! -x "$0.own" ] || printf '%s\n' "$updates" | "$0.own" "$@"
