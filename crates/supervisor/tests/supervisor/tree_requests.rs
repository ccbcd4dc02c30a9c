//! Git requests that diff, save, compare and copy trees, on real repositories.

use std::fs;

use harvest_proto::bridge::*;

use crate::{
    git_requests::{ask, booted, shop},
    harness::{Client, Sandbox, is_alive, wait_until},
};

const EMPTY_TREE: &str = "4b825dc642cb6eb9a060e54bf8d69288fbee4904";
const STORE: &str = "home/.local/state/harvest/turns/shop";

// Settings and attributes that would run programs of the agent, each of which leaves a mark.
const HOSTILE: &str = r#"
    printf '#!/bin/sh\ntouch "$HOME/mark"\ncat "$1" 2>/dev/null\n' > ~/evil && chmod +x ~/evil
    mkdir -p ~/hooks && for hook in post-index-change pre-auto-gc; do cp ~/evil ~/hooks/$hook; done
    git config core.hooksPath ~/hooks && git config core.fsmonitor ~/evil
    git config diff.external ~/evil && git config diff.noprefix true && git config color.ui always
    git config diff.x.textconv ~/evil && git config diff.x.command ~/evil
    git config core.untrackedCache true && git config core.splitIndex true
    echo '* diff=x' > .git/info/attributes
"#;

fn query(
    client: &mut Client,
    checkout: &str,
    query: GitQuery,
    limit: u64,
) -> Result<(String, Option<Truncation>), Fault> {
    let (checkout, stream) = (checkout.parse().unwrap(), u32::try_from(client.next).unwrap() + 500);
    let reply = ask(client, GitRequest::Query { checkout, query, limit, stream })?;
    assert!(client.ended.contains(&stream), "the stream ends before the reply");
    let Reply::Queried { truncated } = reply else { panic!("{reply:?}") };
    let output = client.data.remove(&stream).unwrap_or_default();
    Ok((String::from_utf8(output).unwrap(), truncated))
}

fn diff(client: &mut Client, checkout: &str, base: &str, prefixed: bool) -> String {
    let diff = GitQuery::Diff { base: base.to_owned(), prefixed };
    let (output, truncated) = query(client, checkout, diff, 1 << 20).unwrap();
    assert_eq!(truncated, None);
    output
}

fn save(client: &mut Client, against: Option<&str>) -> Result<(String, DiffStat), Fault> {
    let (checkout, against) = ("shop".parse().unwrap(), against.map(str::to_owned));
    match ask(client, GitRequest::SaveTree { checkout, against })? {
        Reply::SavedTree { tree, stat } => Ok((tree, stat)),
        other => panic!("{other:?}"),
    }
}

fn compare(client: &mut Client, from: &str, to: &str) -> Result<String, Fault> {
    let (from, to) = (from.to_owned(), to.to_owned());
    let compare = GitQuery::Compare { from, to, format: DiffFormat::Numstat, prefixed: false };
    query(client, "shop", compare, 1 << 20).map(|(output, _)| output)
}

fn head(sandbox: &Sandbox, client: &mut Client) -> String {
    shop(sandbox, client, "git rev-parse HEAD")
}

const fn stat(files: u64, insertions: u64, deletions: u64) -> DiffStat {
    DiffStat { files, insertions, deletions }
}

#[test]
fn diff_includes_untracked_files_without_touching_index() {
    let (sandbox, mut client) = booted();
    let base = head(&sandbox, &mut client);
    shop(
        &sandbox,
        &mut client,
        "echo two > second && git add second && git commit -q -m two && echo x >> README && echo new > third",
    );
    let state = "git status --porcelain; find .git | sort";
    let before = shop(&sandbox, &mut client, state);
    let text = diff(&mut client, "shop", &base, false);
    for shown in ["+two", "+x", "+new", "--- a/README\n+++ b/README\n"] {
        assert!(text.contains(shown), "{shown} is missing in {text}");
    }
    let prefixed = diff(&mut client, "shop", &base, true);
    assert!(prefixed.contains("--- a/shop/README\n+++ b/shop/README\n"), "{prefixed}");
    assert_eq!(shop(&sandbox, &mut client, state), before);
}

#[test]
fn checkout_without_commits_or_repository_has_a_diff() {
    let (sandbox, mut client) = booted();
    shop(&sandbox, &mut client, "rm -rf .git && git init -q -b main && echo new > file");
    assert!(diff(&mut client, "shop", EMPTY_TREE, false).contains("+new"));
    shop(&sandbox, &mut client, "rm -rf .git");
    assert_eq!(diff(&mut client, "shop", EMPTY_TREE, false), "");
    assert_eq!(diff(&mut client, "gone", EMPTY_TREE, false), "");
    assert!(save(&mut client, None).is_err());
}

#[test]
fn repository_around_checkout_is_not_used() {
    let (sandbox, mut client) = booted();
    let around = "rm -rf ../.git && cp -a .git ../.git && mkdir -p ~/other && cp -a .git ~/other";
    shop(&sandbox, &mut client, around);
    let base = head(&sandbox, &mut client);
    for lost in [
        "rm -rf .git",
        "rm -rf .git && mkdir .git",
        // The checkout itself looks like a bare repository.
        "rm -rf .git && cp -a ../.git/. .",
        "rm -rf .git && cp -a ../.git .git && git config core.worktree ~/other",
        // The checkout is a folder of another repository.
        "mkdir ~/other/sub && cd .. && rm -rf shop && ln -s ~/other/sub shop && mkdir shop/.git",
    ] {
        shop(&sandbox, &mut client, lost);
        assert!(save(&mut client, None).is_err(), "{lost}");
        let unpack = GitRequest::UnpackTree { checkout: "shop".parse().unwrap(), stream: 400 };
        assert!(ask(&mut client, unpack).is_err(), "{lost}");
        let diff = GitQuery::Diff { base: base.clone(), prefixed: false };
        let diff = query(&mut client, "shop", diff, 1000);
        assert!(diff.as_ref().is_ok_and(|(text, _)| text.is_empty()) || diff.is_err(), "{diff:?}");
        if !lost.contains("worktree") {
            let head = ask(&mut client, GitRequest::Head { checkout: "shop".parse().unwrap() });
            let Ok(Reply::Head { commit: None, .. }) = head else { panic!("{lost}: {head:?}") };
            let branch = "harvest/new".parse().unwrap();
            let checkout = "shop".parse().unwrap();
            let _refused = ask(&mut client, GitRequest::SetBranch { checkout, branch });
        }
    }
    for around in ["workspace/.git/HEAD", "home/other/.git/HEAD"] {
        let head = fs::read_to_string(sandbox.at(around)).unwrap();
        assert_eq!(head, "ref: refs/heads/main\n", "{around}");
    }
}

#[test]
fn index_that_is_no_file_is_refused() {
    let (sandbox, mut client) = booted();
    for index in ["mkfifo .git/index", "ln -s /dev/zero .git/index"] {
        shop(&sandbox, &mut client, &format!("rm -f .git/index && {index}"));
        let fault = save(&mut client, None).unwrap_err();
        assert!(fault.message.contains("not a regular file"), "{}", fault.message);
    }
}

#[test]
fn query_output_is_limited() {
    let (sandbox, mut client) = booted();
    let base = head(&sandbox, &mut client);
    shop(&sandbox, &mut client, "seq 2000000 > numbers");
    let whole = || GitQuery::Diff { base: base.clone(), prefixed: false };
    let (output, truncated) = query(&mut client, "shop", whole(), 500_000).unwrap();
    assert_eq!((output.len(), truncated), (500_000, Some(Truncation::Limit)));
    let (output, truncated) = query(&mut client, "shop", whole(), 1 << 30).unwrap();
    assert!(output.ends_with("+2000000\n") && truncated.is_none());
}

#[test]
fn saved_tree_has_all_changes_and_leaves_index() {
    let (sandbox, mut client) = booted();
    let base = head(&sandbox, &mut client);
    let work = r#"
        echo x >> README; echo new > -odd; printf 'a\nb\n' > "$(printf 'caf\303\251 \n\t')"
        mkdir sub; ln -s nowhere sub/link; git add -N sub; truncate -s 9M large
        echo ignored > .git/info/exclude; echo i > ignored; echo s > secret; chmod 0 secret
    "#;
    shop(&sandbox, &mut client, work);
    let state = "git status --porcelain; find .git | sort";
    let before = shop(&sandbox, &mut client, state);
    let (first, changes) = save(&mut client, Some(&base)).unwrap();
    assert_eq!(changes, stat(4, 5, 0));
    assert_eq!(shop(&sandbox, &mut client, state), before);
    assert_eq!(save(&mut client, Some(&first)), Ok((first.clone(), DiffStat::default())));
    assert_eq!(save(&mut client, None), Ok((first.clone(), DiffStat::default())));
    // The agent rewrites its whole history.
    let rewrite = "rm -rf sub ./-odd; git commit -qam two; git checkout -q --orphan other; \
         git commit -qm new; git branch -qD main; git remote remove origin; \
         git reflog expire --expire=now --all; git gc -q --prune=now";
    shop(&sandbox, &mut client, rewrite);
    let (second, changes) = save(&mut client, Some(&first)).unwrap();
    assert_eq!(changes, stat(2, 0, 2));
    let numbers = compare(&mut client, &first, &second);
    assert_eq!(numbers.unwrap(), "0\t1\t-odd\x000\t1\tsub/link\x00");
    assert_eq!(save(&mut client, Some(&base)).unwrap().1, DiffStat::default(), "it is gone");
    for entry in fs::read_dir(sandbox.at(STORE)).unwrap() {
        let name = entry.unwrap().file_name();
        assert_eq!(name.len(), 2, "{name:?} is no folder of objects");
    }
}

#[test]
fn tree_is_copied_as_a_pack() {
    let (sandbox, mut client) = booted();
    let base = head(&sandbox, &mut client);
    shop(&sandbox, &mut client, "seq 100 > a");
    let first = save(&mut client, None).unwrap().0;
    let pack = GitQuery::Pack { tree: first.clone(), base: Some(base.clone()) };
    let (checkout, stream) = ("shop".parse().unwrap(), 700);
    ask(&mut client, GitRequest::Query { checkout, query: pack, limit: 1 << 20, stream }).unwrap();
    let pack = client.data.remove(&stream).unwrap();
    // The number of objects: the tree and the new file, but none of the commit.
    assert_eq!(pack[..12], *b"PACK\0\0\0\x02\0\0\0\x02");
    // As in a sandbox that never saved the tree.
    fs::remove_dir_all(sandbox.at(STORE)).unwrap();
    assert_eq!(compare(&mut client, &base, &first).unwrap_err().code, FaultCode::NotFound);
    client.next += 1;
    let (id, checkout, stream) = (client.next, "shop".parse().unwrap(), 701);
    client.send(ToSupervisor::Git { id, request: GitRequest::UnpackTree { checkout, stream } });
    client.data(stream, &pack);
    client.send(ToSupervisor::End { stream });
    assert_eq!(client.until(|client| client.replies.remove(&id)), Ok(Reply::Done));
    assert_eq!(compare(&mut client, &base, &first).unwrap(), "100\t0\ta\0");
    client.next += 1;
    let (id, checkout, stream) = (client.next, "shop".parse().unwrap(), 702);
    client.send(ToSupervisor::Git { id, request: GitRequest::UnpackTree { checkout, stream } });
    client.data(stream, b"no pack");
    client.send(ToSupervisor::End { stream });
    assert!(client.until(|client| client.replies.remove(&id)).is_err());
}

#[test]
fn settings_of_the_checkout_run_no_programs() {
    let (sandbox, mut client) = booted();
    let base = head(&sandbox, &mut client);
    shop(&sandbox, &mut client, &format!("{HOSTILE} echo x >> README; echo new > file"));
    let mark = sandbox.at("home/mark");
    shop(&sandbox, &mut client, "git diff > /dev/null");
    fs::remove_file(&mark).expect("the settings run programs for others");
    let text = diff(&mut client, "shop", &base, false);
    assert!(text.contains("+++ b/README\n@@") && text.contains("+new"), "{text}");
    let (tree, changes) = save(&mut client, Some(&base)).unwrap();
    assert_eq!(changes, stat(2, 2, 0));
    assert_eq!(compare(&mut client, &base, &tree).unwrap(), "1\t0\tREADME\x001\t0\tfile\x00");
    assert!(!mark.exists(), "a program of the checkout was run");
}

#[test]
fn names_and_options_are_not_object_ids() {
    let (_sandbox, mut client) = booted();
    for id in ["HEAD", "main", "", "--output=/workspace/shop/README", "0123456789abcdef"] {
        let ids = (id.to_owned(), Some(id.to_owned()));
        let queries = [
            GitQuery::Diff { base: ids.0.clone(), prefixed: false },
            GitQuery::Pack { tree: EMPTY_TREE.to_owned(), base: ids.1 },
        ];
        for one in queries {
            let fault = query(&mut client, "shop", one, 1000).unwrap_err();
            assert_eq!(fault.code, FaultCode::Invalid, "{id}");
        }
        assert_eq!(compare(&mut client, EMPTY_TREE, id).unwrap_err().code, FaultCode::Invalid);
        assert_eq!(save(&mut client, Some(id)).unwrap_err().code, FaultCode::Invalid);
    }
}

#[test]
fn cancelled_request_kills_git_and_its_filters() {
    let (sandbox, mut client) = booted();
    let filter = "git config filter.slow.clean 'echo $$ > ~/filter; sleep 98765' && \
         echo '* filter=slow' > .git/info/attributes && echo new > file";
    shop(&sandbox, &mut client, filter);
    client.next += 1;
    let (exec, checkout) = (client.next, "shop".parse().unwrap());
    let request = GitRequest::SaveTree { checkout, against: None };
    client.send(ToSupervisor::Git { id: exec, request });
    let pid = sandbox.at("home/filter");
    wait_until("the filter runs", || fs::read_to_string(&pid).is_ok_and(|pid| is_alive(&pid)));
    assert_eq!(client.request(|id| ToSupervisor::Kill { id, exec }), Ok(Reply::Done));
    assert!(client.until(|client| client.replies.remove(&exec)).is_err());
    let pid = fs::read_to_string(pid).unwrap();
    wait_until("the filter is dead", || !is_alive(&pid));
}
