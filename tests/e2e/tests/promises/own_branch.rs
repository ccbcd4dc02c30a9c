//! A session's own branch: what the session pushed may be replaced, as after a restore, and stays
//! at the remote; what people pushed may not.

use std::{path::PathBuf, process::Command};

use harvest_e2e::{Host, eventually};
use harvest_proto::{
    EventBody, SessionId,
    api::{CheckOutcome, PullRequest, SessionState},
};
use serde_json::{Value, json};

use crate::{SAMPLE, completed, github::github_and_app};

/// Commits a line to a file, and pushes.
fn push(line: &str) -> Value {
    let change = format!("sed -i 's/a - b/a + b/' calc.py; echo '# {line}' >> calc.py");
    json!([{ "bash": format!("{change}; git commit -qam '{line}' && git push -q") }])
}

/// Runs git in the forge's copy of the repository.
fn forge_git(host: &Host, arguments: &[&str]) -> String {
    let bare: PathBuf = host.home().join("forge/calc/repository.git");
    let ran = Command::new("git")
        .args(["-c", "user.name=Person", "-c", "user.email=person@example.org"])
        .arg("--git-dir")
        .arg(bare)
        .args(arguments)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{arguments:?}: {ran:?}");
    String::from_utf8(ran.stdout).unwrap().trim().to_owned()
}

/// Waits until a turn of this prompt is over and its push is checked.
async fn turn(host: &Host, session: &SessionId, prompt: &str, script: &Value) -> PullRequest {
    let before = host.show(session).await.seq;
    host.prompt(session, prompt, script).await;
    let mut follower = host.follow(session.clone());
    follower.after(before, "the turn", completed).await;
    let checked = |body: &EventBody| matches!(body, EventBody::Evidence(_));
    follower.after(before, "the evidence", checked).await;
    host.wait_for(session, SessionState::Idle).await;
    host.show(session).await.repositories.remove(0).pr.expect("a pull request is open")
}

/// Pushes in two turns, goes back to the first one, and pushes something else.
async fn push_after_restore(host: &Host, forge: &Host, repository: &str) -> SessionId {
    let session = host.scripted(repository, "Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(session.clone()).until("the first turn", completed).await;
    let one = turn(host, &session, "One.", &push("one")).await;
    let two = turn(host, &session, "Two.", &push("two")).await;
    assert_eq!((one.number, two.number), (1, 1));
    let back = host.harvest(["restore", &format!("{session}@2")]);
    assert_eq!(back.code, 0, "{back:?}");
    host.wait_for(&session, SessionState::Idle).await;
    let three = turn(host, &session, "Three.", &push("three")).await;
    assert_eq!(three.number, 1);
    let evidence = three.evidence.expect("the new head is checked");
    assert_eq!(
        (evidence.commit.as_str(), evidence.outcome),
        (&*three.commit, CheckOutcome::Passed)
    );
    let branch = format!("refs/heads/{}", three.branch);
    assert_eq!(forge_git(forge, &["rev-parse", &branch]), three.commit);
    assert_eq!(forge_git(forge, &["log", "--format=%s", "main..", &branch]), "three\none");
    let kept = forge_git(forge, &["for-each-ref", "--format=%(refname)", "refs/harvest/kept/"]);
    assert_eq!(kept, format!("refs/harvest/kept/{}", two.commit));
    session
}

#[tokio::test]
async fn restored_session_pushes_and_keeps_peoples_commits() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let session = push_after_restore(&host, &host, "calc").await;
    let pull = host.show(&session).await.repositories.remove(0).pr.unwrap();
    // A person commits to the branch.
    let tree = forge_git(&host, &["rev-parse", &format!("{}^{{tree}}", pull.commit)]);
    let theirs = forge_git(&host, &["commit-tree", &tree, "-p", &pull.commit, "-m", "theirs"]);
    let reference = format!("refs/heads/{}", pull.branch);
    forge_git(&host, &["update-ref", &reference, &theirs]);
    let rewrite = "git commit -q --amend -m rewritten && git push -q; true";
    host.prompt(&session, "Rewrite.", &json!([{ "bash": rewrite }])).await;
    let named = format!("the branch is at {}, which this session did not push", &theirs[..7]);
    let refused = eventually("the refusal", || async {
        host.events(&session).await.into_iter().find_map(|body| match body {
            EventBody::PushRefused { reason, .. } => Some(reason),
            _ => None,
        })
    })
    .await;
    assert!(refused.contains(&named), "{refused}");
    assert_eq!(forge_git(&host, &["rev-parse", &reference]), theirs);
    host.wait_for(&session, SessionState::Idle).await;
    let rebase = format!(
        "git fetch -q origin && git rebase -q origin/{branch} 2>/dev/null; git rebase --abort \
         2>/dev/null; git reset -q --hard origin/{branch} && echo '# more' >> calc.py && git \
         commit -qam more && git push -q",
        branch = pull.branch
    );
    let after = turn(&host, &session, "Rebase.", &json!([{ "bash": rebase }])).await;
    let parent = forge_git(&host, &["rev-parse", &format!("{}^", after.commit)]);
    assert_eq!((after.number, parent), (1, theirs));
}

#[tokio::test]
async fn rebased_branch_is_pushed_again() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let session = host.scripted("calc", "Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(session.clone()).until("the first turn", completed).await;
    let one = turn(&host, &session, "One.", &push("one")).await;
    let main = forge_git(&host, &["rev-parse", "refs/heads/main"]);
    let tree = forge_git(&host, &["rev-parse", "refs/heads/main^{tree}"]);
    let newer = forge_git(&host, &["commit-tree", &tree, "-p", &main, "-m", "newer"]);
    forge_git(&host, &["update-ref", "refs/heads/main", &newer]);
    let synced = host.harvest(["sync", &session.to_string()]);
    assert_eq!(synced.code, 0, "{synced:?}");
    let pushed = json!([{ "bash": "git push -q" }]);
    let after = turn(&host, &session, "Push.", &pushed).await;
    assert_eq!(after.number, one.number);
    assert_eq!(forge_git(&host, &["rev-parse", &format!("{}^", after.commit)]), newer);
    let kept = format!("refs/harvest/kept/{}", one.commit);
    assert_eq!(forge_git(&host, &["rev-parse", &kept]), one.commit);
}

#[tokio::test]
async fn restored_session_pushes_to_github() {
    let (github, host, _key) = github_and_app().await;
    push_after_restore(&host, &github, "acme/calc").await;
}
