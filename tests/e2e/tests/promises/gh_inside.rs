//! `gh` as an agent uses it inside a sandbox: without a token, for its session's repositories, and
//! writing to its own branch alone. The image `full` has the program.

use harvest_e2e::Host;
use harvest_proto::{EventBody, SessionId, api::PullRequestState, bridge::Exit};
use serde_json::{Value, json};

use crate::SAMPLE;

const IMAGE: &[(&str, &str)] = &[("HARVEST_IMAGE", "full")];

const FIX: &str = "sed -i 's/a - b/a + b/' calc.py && git commit -qam Fix && git push -q";

const CREATE: &str =
    "gh pr create --draft --title 'Add, not subtract' --body 'The sign was wrong.'";

/// A session whose agent has run these commands, without a pull request of the platform's own.
async fn session(host: &Host, commands: &[&str]) -> SessionId {
    let mut script: Vec<Value> = commands.iter().map(|one| json!({ "bash": one })).collect();
    script.push(json!({ "text": "done" }));
    let body = json!({
        "repository": "calc", "agent": "scripted", "model": "scripted", "network": "none",
        "pr_mode": "none", "prompt": format!("Fix it.\nscript: {}", json!(script)),
    });
    let session = host.post("/v1/sessions", body).await;
    let session: SessionId = session["id"].as_str().unwrap().parse().unwrap();
    let mut follower = host.follow(session.clone());
    follower.until("the evidence", |body| matches!(body, EventBody::Evidence(_))).await;
    session
}

struct Inside<'a> {
    host: &'a Host,
    session: SessionId,
}

impl Inside<'_> {
    async fn run(&self, command: &str) -> (bool, String) {
        let command = format!("cd /workspace/calc && {command}");
        let (exit, output) = self.host.exec(&self.session, "harvest", &command).await;
        (exit == Exit::Code(0), output)
    }

    async fn ok(&self, command: &str) -> String {
        let (worked, output) = self.run(command).await;
        assert!(worked, "{command}: {output}");
        output
    }

    async fn refused(&self, command: &str, why: &str) {
        let (worked, output) = self.run(command).await;
        assert!(!worked && output.contains(why), "{command}: {output}");
    }
}

#[tokio::test]
async fn agent_opens_its_pull_request_with_gh() {
    let host = Host::start_with(IMAGE).await;
    host.repository("calc", SAMPLE).await;
    let session = session(&host, &[FIX, CREATE]).await;
    let repository = host.show(&session).await.repositories.remove(0);
    let pull = repository.pr.unwrap();
    assert_eq!((pull.number, pull.state, pull.draft), (1, PullRequestState::Open, true));
    assert_eq!(pull.title, "Add, not subtract");
    assert!(pull.body.starts_with("The sign was wrong.\n\n<!-- harvest:begin -->"), "{pull:?}");
    assert!(pull.body.contains("`.harvest/check.sh` passed on"), "{}", pull.body);
    let inside = Inside { host: &host, session: session.clone() };
    let branch = inside.ok("git branch --show-current").await.trim().to_owned();

    let list = inside.ok("gh pr list").await;
    assert!(list.starts_with(&format!("1\tAdd, not subtract\t{branch}\tDRAFT")), "{list}");
    let view = inside.ok("gh pr view").await;
    assert!(view.contains("title:\tAdd, not subtract") && view.contains("additions:\t1"), "{view}");
    let fields = "number,state,isDraft,url,files,commits,statusCheckRollup,headRefName,mergeable";
    let view: Value =
        serde_json::from_str(&inside.ok(&format!("gh pr view 1 --json {fields}")).await).unwrap();
    assert_eq!(view["files"][0]["path"], "calc.py", "{view}");
    assert_eq!(view["statusCheckRollup"][0]["context"], "harvest/check", "{view}");
    assert_eq!((&view["state"], &view["isDraft"]), (&json!("OPEN"), &json!(true)));
    let comment = inside.ok("gh pr comment --body 'Ready when the check is green.'").await;
    assert!(comment.contains("#issuecomment-"), "{comment}");
    let comments = inside.ok("gh pr view 1 --comments").await;
    assert!(comments.contains("Ready when the check is green."), "{comments}");
    assert!(inside.ok("gh pr diff 1").await.contains("+    return a + b"));

    // The same one again, also when people type it.
    let (again, output) = inside.run(CREATE).await;
    assert!(!again && output.contains("already exists"), "{output}");
    assert_eq!(inside.ok("gh pr list --json number --jq length").await, "1\n");
    assert_eq!(inside.ok("gh run list").await, "");
    let name = inside.ok("gh api repos/{owner}/{repo} --jq .full_name").await;
    assert_eq!(name, "local/calc\n");
    let pages =
        inside.ok("gh api --paginate 'repos/local/calc/branches?per_page=1' --jq '.[].name'");
    assert_eq!(pages.await, format!("{branch}\nmain\n"));
    // Nothing left the sandbox by another way, and no token is inside.
    let refused = |body: &EventBody| matches!(body, EventBody::EgressRefused { .. });
    assert!(!host.events(&session).await.iter().any(refused));
    assert!(inside.ok("gh auth status").await.contains("Logged in to git.harvest.internal"));
    assert_eq!(
        inside.ok("gh auth token --hostname git.harvest.internal").await,
        "held-by-the-gateway\n"
    );
}

#[tokio::test]
async fn gh_reaches_nothing_beyond_its_session() {
    let host = Host::start_with(IMAGE).await;
    host.repository("calc", SAMPLE).await;
    host.repository("other", SAMPLE).await;
    let session = session(&host, &[FIX]).await;
    let inside = Inside { host: &host, session };
    for (command, why) in [
        ("gh api repos/local/other", "only its own repositories"),
        ("gh api repos/local/calc/../other", "is not valid"),
        ("gh api repos/local/calc/hooks", "is not read here"),
        ("gh api user", "only its own repositories"),
        ("gh api -X POST repos/local/calc/issues/1/comments -f body=x", "read-only"),
        ("gh api -X DELETE repos/local/calc/git/refs/heads/main", "read-only"),
        ("gh api graphql -f query='{viewer{login}}'", "only `gh pr create`"),
        ("gh pr list -R local/other", "only its own repositories"),
        ("gh pr list --search x", "only `gh pr create`"),
        ("gh pr merge 1 --merge", "only `gh pr create`"),
        ("gh pr create -t T -b B --head release", "of its branch"),
        ("gh pr create -t T -b B --base release", "leave out `--base`"),
        ("gh pr create -t T -b B --reviewer bob", "only `gh pr create`"),
        ("gh repo delete local/calc --yes", "read-only"),
    ] {
        inside.refused(command, why).await;
    }
    assert!(host.show(&inside.session).await.repositories[0].pr.is_none());
}
