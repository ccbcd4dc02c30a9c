//! Requested syncs of a session's checkouts, with real git: commit, fetch, rebase.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command as Process};

use harvest_proto::{
    AgentName, EventBody,
    bridge::*,
    event::{BootPhase, CheckoutSync, PhaseStatus, SyncOutcome, TurnOutcome},
};

use crate::{git_requests::shop, harness::*};

/// The branch, its commits, and all files and refs that a sync could harm.
const LOOK: &str = "git symbolic-ref HEAD; git log --format='%an <%ae> %cn %s'; git status \
                    --porcelain -uall; head -c 99 README mine 2>/dev/null; git for-each-ref \
                    --format='%(refname:short)' refs/heads refs/stash";

/// A session's checkout of `main`, on its own branch with one commit.
fn working() -> (Sandbox, Client) {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    boot(&sandbox, &mut owner, BootStart::Fresh);
    shop(&sandbox, &mut owner, "echo one > mine && git add mine && git commit -q -m Mine");
    (sandbox, owner)
}

fn boot(sandbox: &Sandbox, owner: &mut Client, start: BootStart) {
    let boot = Boot { agent: None, ..sandbox.boot(start, &[(".gitignore", "*.log\n")]) };
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
}

fn target(sandbox: &Sandbox) -> SyncTarget {
    let mut checkout = sandbox.boot(BootStart::Fresh, &[]).repositories.remove(0);
    checkout.base = Some("main".parse().unwrap());
    SyncTarget { checkout, began: None }
}

fn request_of(checkouts: Vec<SyncTarget>) -> Box<SyncRequest> {
    let author = Author { name: "Grace".into(), email: "grace@example.org".into() };
    Box::new(SyncRequest { author, checkouts })
}

/// The event comes before the reply.
fn sync_all(client: &mut Client, targets: Vec<SyncTarget>) -> Vec<CheckoutSync> {
    let sync = request_of(targets);
    assert_eq!(client.request(|id| ToSupervisor::Sync { id, sync }), Ok(Reply::Done));
    ended(client)
}

fn ended(client: &mut Client) -> Vec<CheckoutSync> {
    let ended = client.event(|body| matches!(body, EventBody::SyncEnded { .. }));
    let EventBody::SyncEnded { checkouts, .. } = ended else { unreachable!() };
    checkouts
}

fn sync(sandbox: &Sandbox, client: &mut Client) -> CheckoutSync {
    sync_all(client, vec![target(sandbox)]).remove(0)
}

/// Makes merges of README wait as long as the file `hold` is in the home of the agent.
fn hold_merges(sandbox: &Sandbox, client: &mut Client) {
    shop(sandbox, client, "touch ~/hold");
    let driver = "touch ~/merging; while [ -e ~/hold ]; do sleep 0.02; done; exit 1";
    let config = format!("git config merge.slow.driver '{driver}'");
    let attributes = "mkdir -p .git/info && echo 'README merge=slow' > .git/info/attributes";
    shop(sandbox, client, &format!("{config} && {attributes}"));
}

/// Work that conflicts with a newer commit of the base, some of it not committed.
fn conflicting() -> (Sandbox, Client, String) {
    let (sandbox, mut client) = working();
    sandbox.commit("README", "theirs\n");
    shop(&sandbox, &mut client, "echo ours > README && echo new > more && rm mine");
    let tree = shop(&sandbox, &mut client, "cat README more && ls");
    (sandbox, client, tree)
}

fn assert_as_before(sandbox: &Sandbox, client: &mut Client, tree: &str) {
    assert_eq!(shop(sandbox, client, "cat README more && ls"), tree);
    let state = "git symbolic-ref --short HEAD && git status --porcelain && ls -d .git/rebase* \
                 .git/harvest/rebase 2>/dev/null; git log -1 --format=%s";
    assert_eq!(shop(sandbox, client, state), "harvest/work\nwip: snapshot");
}

#[test]
fn current_branch_without_changes_stays() {
    let (sandbox, mut client) = working();
    let before = shop(&sandbox, &mut client, LOOK);
    for _ in 0..2 {
        let synced = sync(&sandbox, &mut client);
        assert_eq!(synced.outcome, SyncOutcome::UpToDate);
        assert_eq!((synced.checkpoint, synced.work.snapshot), (None, None));
        assert_eq!(shop(&sandbox, &mut client, LOOK), before);
    }
}

#[test]
fn uncommitted_work_is_committed_and_rebased() {
    let (sandbox, mut client) = working();
    let base = sandbox.commit("theirs", "theirs\n");
    let work = "echo changed >> README && echo new > 'n ew' && rm mine && echo x > build.log && \
                truncate -s 9M huge && mkdir own && git init -q own && echo y > staged && \
                git add staged && chmod +x 'n ew' && git config commit.gpgSign true && git config \
                rebase.autoStash true && git config rebase.updateRefs true";
    shop(&sandbox, &mut client, work);
    let synced = sync(&sandbox, &mut client);
    assert_eq!(synced.outcome, SyncOutcome::Rebased, "{synced:?}");
    assert_eq!(synced.base.as_deref(), Some(&*base));
    assert_eq!(synced.upstream.as_deref(), Some("origin/main"));
    assert_eq!(synced.work.files, 4);
    assert_eq!(synced.work.left_out, ["huge", "own/"]);
    assert_eq!(synced.work.ignored, ["build.log"]);
    let log = "git log --format='%an <%ae> %cn: %s' -3";
    assert_eq!(
        shop(&sandbox, &mut client, log),
        "Grace (Harvest) <grace@example.org> Grace (Harvest): wip: snapshot\n\
         Ada (Harvest) <ada@example.org> Grace (Harvest): Mine\nT <t@localhost> T: theirs"
    );
    let files = "git status --porcelain --ignored && ls && test -x 'n ew' && cat README";
    assert_eq!(
        shop(&sandbox, &mut client, files),
        "?? huge\n?? own/\n!! build.log\nREADME\nbuild.log\nhuge\nn ew\nown\nstaged\ntheirs\n\
         hello\nchanged"
    );
    let checkpoint = synced.checkpoint.unwrap();
    assert!(checkpoint.starts_with("checkpoint-harvest-work-"), "{checkpoint}");
    let kept = shop(&sandbox, &mut client, &format!("git rev-parse {checkpoint}"));
    assert_eq!(Some(kept), synced.before, "no setting of the checkout moves it");
    assert_eq!(sync(&sandbox, &mut client).outcome, SyncOutcome::UpToDate);
}

#[test]
fn conflict_leaves_branch_and_files_as_before() {
    let (sandbox, mut client, tree) = conflicting();
    for _ in 0..3 {
        let synced = sync(&sandbox, &mut client);
        assert_eq!(synced.outcome, SyncOutcome::Conflict);
        assert_eq!(synced.conflicts, ["README"]);
        assert!(synced.commit.unwrap().ends_with(" wip: snapshot"));
        assert!(synced.next.unwrap().contains("git rebase origin/main"));
        assert_eq!(synced.after, synced.before);
        let kept = format!("git rev-parse {}", synced.checkpoint.unwrap());
        assert_eq!(Some(shop(&sandbox, &mut client, &kept)), synced.before);
        assert_as_before(&sandbox, &mut client, &tree);
    }
}

#[test]
fn one_conflict_does_not_keep_other_checkouts_back() {
    let sandbox = Sandbox::start();
    let mut boot = Boot { agent: None, ..sandbox.boot(BootStart::Fresh, &[]) };
    let tools = sandbox.at("tools.git");
    let copied = Process::new("cp").arg("-r").args([&sandbox.at("origin.git"), &tools]).status();
    assert!(copied.unwrap().success());
    let mut second = boot.repositories[0].clone();
    (second.name, second.folder) = ("acme/tools".parse().unwrap(), "tools".parse().unwrap());
    second.remote = format!("file://{}", tools.display());
    boot.repositories.push(second.clone());
    let mut client = sandbox.owner(1, 0);
    client.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    client.phase(BootPhase::Ready, PhaseStatus::Done);
    shop(&sandbox, &mut client, "echo ours > README && echo x > ../tools/mine");
    sandbox.commit("README", "theirs\n");
    git(&sandbox.at("origin-work"), &["push", "-q", tools.to_str().unwrap(), "HEAD:main"]);
    let mut first = target(&sandbox);
    first.checkout.base = None;
    let targets = vec![first, SyncTarget { checkout: second, began: None }];
    let synced = sync_all(&mut client, targets);
    let outcomes: Vec<_> = synced.iter().map(|one| one.outcome).collect();
    assert_eq!(outcomes, [SyncOutcome::Conflict, SyncOutcome::Rebased]);
    assert_eq!(shop(&sandbox, &mut client, "cat README ../tools/README"), "ours\ntheirs");
}

#[test]
fn unreachable_remote_loses_nothing() {
    let (sandbox, mut client) = working();
    shop(&sandbox, &mut client, "echo new > more");
    let target = target(&sandbox);
    fs::rename(sandbox.at("origin.git"), sandbox.at("away.git")).unwrap();
    let synced = sync_all(&mut client, vec![target]).remove(0);
    assert_eq!(synced.outcome, SyncOutcome::Failed);
    assert!(synced.error.unwrap().contains("cannot clone or fetch acme/shop"));
    assert_eq!(synced.work.files, 1, "the work is committed first");
    fs::rename(sandbox.at("away.git"), sandbox.at("origin.git")).unwrap();
    sandbox.commit("theirs", "theirs\n");
    let again = sync(&sandbox, &mut client);
    assert_eq!((again.outcome, again.work.snapshot), (SyncOutcome::Rebased, None));
    assert_eq!(shop(&sandbox, &mut client, "cat more theirs"), "new\ntheirs");
}

#[test]
fn deleted_base_is_named() {
    let (sandbox, mut client) = working();
    let before = shop(&sandbox, &mut client, LOOK);
    git(&sandbox.at("origin.git"), &["update-ref", "-d", "refs/heads/main"]);
    let synced = sync(&sandbox, &mut client);
    assert_eq!(synced.outcome, SyncOutcome::Failed);
    assert!(synced.error.unwrap().contains("branch main does not exist in acme/shop"));
    assert_eq!(shop(&sandbox, &mut client, LOOK), before);
}

#[test]
fn rewritten_base_moves_only_own_commits() {
    let sandbox = Sandbox::start();
    sandbox.boot(BootStart::Fresh, &[]);
    let dropped = sandbox.commit("dropped", "dropped\n");
    let mut client = sandbox.owner(1, 0);
    boot(&sandbox, &mut client, BootStart::Fresh);
    shop(&sandbox, &mut client, "echo one > mine && git add mine && git commit -q -m Mine");
    let work = sandbox.at("origin-work");
    git(&work, &["reset", "-q", "--hard", "HEAD~1"]);
    git(&work, &["push", "-q", "--force", "origin", "HEAD:main"]);
    let target = SyncTarget { began: Some(dropped), ..target(&sandbox) };
    let synced = sync_all(&mut client, vec![target]).remove(0);
    assert_eq!(synced.outcome, SyncOutcome::Rebased, "{synced:?}");
    assert_eq!(
        shop(&sandbox, &mut client, "git log --format=%s && ls"),
        "Mine\nfirst\nREADME\nmine"
    );
    // Without knowing where the work began, its own history says what both have in common.
    sandbox.commit("newer", "newer\n");
    git(&work, &["commit", "-q", "--amend", "-m", "amended"]);
    git(&work, &["push", "-q", "--force", "origin", "HEAD:main"]);
    assert_eq!(sync(&sandbox, &mut client).outcome, SyncOutcome::Rebased);
    let log = shop(&sandbox, &mut client, "git log --format=%s");
    assert_eq!(log, "Mine\namended\nfirst");
}

#[test]
fn unfinished_operation_is_left_alone() {
    for (begin, error) in [
        ("git checkout -q --detach", "detached HEAD"),
        ("git fetch -q && ! git rebase -q origin/main 2>/dev/null", "a rebase is in progress"),
        ("git fetch -q && ! git merge -q origin/main >/dev/null", "a merge is in progress"),
        ("git bisect start >/dev/null", "a bisect is in progress"),
    ] {
        let (sandbox, mut client) = working();
        sandbox.commit("README", "theirs\n");
        shop(&sandbox, &mut client, &format!("echo o > README && git commit -qam o && {begin}"));
        shop(&sandbox, &mut client, "echo more > more");
        let look = "git rev-parse HEAD && git status --porcelain && git branch && cat README more";
        let before = shop(&sandbox, &mut client, look);
        let synced = sync(&sandbox, &mut client);
        assert_eq!(synced.outcome, SyncOutcome::Failed);
        assert!(synced.error.as_deref().unwrap().contains(error), "{synced:?}");
        assert!(synced.next.is_some());
        assert_eq!(shop(&sandbox, &mut client, look), before, "{begin}");
    }
}

#[test]
fn hooks_do_not_run_and_filters_only_inside() {
    let (sandbox, mut client) = working();
    let hooks = "mkdir hooks && for hook in pre-commit prepare-commit-msg commit-msg post-commit \
                 pre-rebase post-checkout post-rewrite reference-transaction post-index-change; do \
                 printf '#!/bin/sh\\necho $0 >> ~/ran\\nexit 1\\n' > hooks/$hook; done && chmod +x \
                 hooks/* && git config core.hooksPath \"$PWD/hooks\" && echo hooks/ >> \
                 .git/info/exclude && git config core.editor false && git config sequence.editor \
                 false && git config core.fsmonitor 'touch ~/ran; false'";
    shop(&sandbox, &mut client, hooks);
    let filter = "git config filter.id.clean 'id -u >> ~/filtered; cat' && echo '*.txt filter=id' > \
                  .git/info/attributes && echo x > a.txt && echo noise";
    shop(&sandbox, &mut client, filter);
    sandbox.commit("theirs", "theirs\n");
    shop(&sandbox, &mut client, "rm -f ~/ran");
    let synced = sync(&sandbox, &mut client);
    assert_eq!(synced.outcome, SyncOutcome::Rebased, "{synced:?}");
    let ran = shop(&sandbox, &mut client, "cat ~/ran 2>/dev/null; sort -u ~/filtered");
    assert_eq!(ran, shop(&sandbox, &mut client, "id -u"), "as the agent's user");
}

#[test]
fn rebase_that_pid_1_dies_in_is_undone() {
    let (mut dying, mut client, tree) = conflicting();
    dying.commit("theirs", "theirs\n");
    hold_merges(&dying, &mut client);
    client.send(ToSupervisor::Sync { id: 900, sync: request_of(vec![target(&dying)]) });
    wait_until("git merges", || dying.at("home/merging").exists());
    assert!(dying.at("workspace/shop/.git/rebase-merge").exists());
    dying.process.kill().unwrap();
    dying.process.wait().unwrap();
    // Git was about to write these.
    let shop_folder = dying.at("workspace/shop");
    for (name, text) in [("theirs", "theirs\n"), (".merge_file_a1B2c3", "x")] {
        fs::write(shop_folder.join(name), text).unwrap();
    }
    let next = Sandbox::start();
    fs::remove_dir(next.at("workspace")).unwrap();
    fs::rename(dying.at("workspace"), next.at("workspace")).unwrap();
    let mut restored = Boot { agent: None, ..dying.boot(BootStart::Restore, &[]) };
    restored.session = dying.boot(BootStart::Fresh, &[]).session;
    let mut client = next.owner(1, 0);
    client.request(|id| ToSupervisor::Boot { id, boot: Box::new(restored) }).unwrap();
    let warning = client.event(|body| matches!(body, EventBody::Warning { .. }));
    let EventBody::Warning { message } = warning else { unreachable!() };
    assert!(message.contains("a sync of acme/shop was interrupted"), "{message}");
    client.phase(BootPhase::Ready, PhaseStatus::Done);
    assert_as_before(&next, &mut client, &tree);
    shop(&next, &mut client, "rm .git/info/attributes");
    let again = sync_all(&mut client, vec![target(&dying)]).remove(0);
    assert_eq!(again.outcome, SyncOutcome::Conflict, "{again:?}");
}

#[test]
fn killed_rebase_is_undone_at_once() {
    let (sandbox, mut client, tree) = conflicting();
    hold_merges(&sandbox, &mut client);
    client.send(ToSupervisor::Sync { id: 900, sync: request_of(vec![target(&sandbox)]) });
    wait_until("git merges", || sandbox.at("home/merging").exists());
    // As its time limit would.
    let kill = "for job in /proc/[0-9]*; do tr '\\0' ' ' < $job/cmdline 2>/dev/null | grep -q \
                '^/proc/self/exe git shop' && kill -9 ${job#/proc/}; done; true";
    let inside = format!("HOME={}", sandbox.at("home").display());
    let kill = kill.replace("&& kill", &format!("&& grep -qz '^{inside}$' $job/environ && kill"));
    let killed = Process::new("sh").args(["-c", &kill]).status().unwrap();
    assert!(killed.success());
    fs::remove_file(sandbox.at("home/hold")).unwrap();
    let synced = ended(&mut client).remove(0);
    assert_eq!(synced.outcome, SyncOutcome::Failed, "{synced:?}");
    assert_as_before(&sandbox, &mut client, &tree);
}

#[test]
fn sync_goes_on_without_its_connection() {
    let (sandbox, mut client, tree) = conflicting();
    hold_merges(&sandbox, &mut client);
    client.send(ToSupervisor::Sync { id: 900, sync: request_of(vec![target(&sandbox)]) });
    wait_until("git merges", || sandbox.at("home/merging").exists());
    drop(client);
    let mut next = sandbox.owner(2, 0);
    fs::remove_file(sandbox.at("home/hold")).unwrap();
    assert_eq!(ended(&mut next)[0].outcome, SyncOutcome::Conflict);
    assert_as_before(&sandbox, &mut next, &tree);
}

#[test]
fn prompt_waits_and_second_sync_is_refused() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.owner(1, 0);
    sandbox.booted_with(&mut client, AgentName::Scripted);
    shop(&sandbox, &mut client, "echo ours > README");
    sandbox.commit("README", "theirs\n");
    hold_merges(&sandbox, &mut client);
    client.send(ToSupervisor::Sync { id: 900, sync: request_of(vec![target(&sandbox)]) });
    wait_until("git merges", || sandbox.at("home/merging").exists());
    client.prompt(r#"script: [{"bash": "git branch --show-current; touch ~/ran"}]"#);
    let refused = client.request(|id| {
        let sync = request_of(vec![target(&sandbox)]);
        ToSupervisor::Sync { id, sync }
    });
    assert_eq!(refused.unwrap_err().code, FaultCode::Busy);
    assert!(!sandbox.at("home/ran").exists());
    fs::remove_file(sandbox.at("home/hold")).unwrap();
    let output = client.event(|body| matches!(body, EventBody::ToolEnded { .. }));
    let EventBody::ToolEnded { output, .. } = output else { unreachable!() };
    assert_eq!(output, "harvest/work\n", "the rebase was undone before");
    assert_eq!(client.turn_ended(), TurnOutcome::Completed);
}

#[test]
fn checkpoints_go_after_a_week_unless_moved() {
    let (sandbox, mut client) = working();
    sandbox.commit("theirs", "theirs\n");
    let checkpoint = sync(&sandbox, &mut client).checkpoint.unwrap();
    let age = |from: &str, to: &str| {
        format!(
            "git branch -m {from} {to} && mv .git/harvest/checkpoints/{from} \
                 .git/harvest/checkpoints/{to}"
        )
    };
    shop(&sandbox, &mut client, &age(&checkpoint, "checkpoint-old-100"));
    let made = "git branch checkpoint-own-100 && git branch checkpoint-moved-100 && git rev-parse \
                HEAD~1 > .git/harvest/checkpoints/checkpoint-moved-100";
    shop(&sandbox, &mut client, made);
    sandbox.commit("newer", "newer\n");
    let newest = sync(&sandbox, &mut client).checkpoint.unwrap();
    let branches =
        shop(&sandbox, &mut client, "git for-each-ref --format='%(refname:short)' refs/heads");
    for name in ["checkpoint-moved-100", "checkpoint-own-100", &newest] {
        assert!(branches.contains(name), "{branches}");
    }
    assert!(!branches.contains("checkpoint-old-100"), "{branches}");
    let records = shop(&sandbox, &mut client, "ls .git/harvest/checkpoints");
    assert_eq!(records, newest);
}

#[test]
fn missing_checkout_is_named() {
    let (sandbox, mut client) = working();
    shop(&sandbox, &mut client, "mv .git ../git-away");
    let synced = sync(&sandbox, &mut client);
    assert_eq!(synced.outcome, SyncOutcome::Failed);
    assert!(synced.error.unwrap().contains("is no git checkout"));
    let around = "mkdir .git && cd .. && git init -q && git add -A && git commit -q -m Around";
    shop(&sandbox, &mut client, around);
    let synced = sync(&sandbox, &mut client);
    assert!(synced.error.unwrap().contains("not a git repository"));
    assert!(Path::new(&sandbox.at("workspace/shop/mine")).exists());
}

#[test]
fn branch_that_a_fork_replaces_is_kept() {
    let (sandbox, mut client) = working();
    shop(&sandbox, &mut client, "git branch harvest/new && git checkout -q -b other HEAD~1");
    let kept = shop(&sandbox, &mut client, "git rev-parse harvest/new");
    let branch = "harvest/new".parse().unwrap();
    let set = GitRequest::SetBranch { checkout: "shop".parse().unwrap(), branch };
    client.request(|id| ToSupervisor::Git { id, request: set }).unwrap();
    let find =
        format!("git for-each-ref --points-at {kept} --format='%(refname:short)' refs/heads");
    let found = shop(&sandbox, &mut client, &find);
    assert!(found.starts_with("checkpoint-harvest-new-"), "{found}");
}

/// Lets the agent push to the origin, which belongs to the user of the test.
pub(crate) fn open_origin(sandbox: &Sandbox) {
    git(&sandbox.at("origin.git"), &["config", "core.sharedRepository", "0666"]);
    let opened = Process::new("chmod").args(["-R", "a+rwX"]).arg(sandbox.at("origin.git")).status();
    assert!(opened.unwrap().success());
    let everyone = fs::Permissions::from_mode(0o777);
    fs::set_permissions(sandbox.at("origin.git"), everyone).unwrap();
}
