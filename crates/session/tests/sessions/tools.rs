//! The tools that change more than the session of their agent.

use futures_util::FutureExt;
use harvest_gateway::ledger::{ForgeCall, ToolResult};
use serde_json::json;

use super::*;

/// A session whose door is open.
async fn parent(harness: &Harness, sessions: &Sessions) -> SessionId {
    let id = harness.session(sessions, None).await.id;
    until_state(sessions, &id, SessionState::Idle).await;
    removal::eventually("tools", || harness.doors.1.lock().unwrap().contains_key(&id)).await;
    id
}

fn tools(harness: &Harness, id: &SessionId) -> Arc<dyn Tools> {
    Arc::clone(&harness.doors.1.lock().unwrap()[id])
}

async fn spawn(tools: &dyn Tools, key: &str) -> ToolResult {
    let arguments = json!({ "prompt": "Do a part.", "key": key });
    tools.call("spawn_session", arguments).await.unwrap()
}

fn child(result: ToolResult) -> SessionId {
    assert!(!result.failed, "{}", result.text);
    result.structured.unwrap()["session"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn spawned_session_runs_after_the_client_disconnects() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let parent = parent(&harness, &sessions).await;
    let tools = tools(&harness, &parent);
    assert!(spawn(&*tools, "part").now_or_never().is_none(), "still in progress");
    let all = async || sessions.list(None, 10).await.unwrap().items;
    let created = async {
        while all().await.len() < 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), created).await.expect("a child is created");
    let created = all().await.into_iter().map(|one| one.id).find(|id| *id != parent).unwrap();
    until_state(&sessions, &created, SessionState::Idle).await;
    assert_eq!(child(spawn(&*tools, "part").await), created);
    assert_eq!(all().await.len(), 2);
}

#[tokio::test]
async fn pull_request_is_recorded_after_the_client_disconnects() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let session = harness.session(&sessions, Some("hold")).await;
    let id = session.id;
    until(&sessions, &id, started).await;
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    let commit = "c0ffee".to_owned();
    ledger.log(&id, EventBody::Pushed { repository: demo(), branch: session.branch, commit }).await;
    removal::eventually("tools", || harness.doors.1.lock().unwrap().contains_key(&id)).await;
    let tools = tools(&harness, &id);
    let asked = async {
        while harness.pulls.opened.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    // The client disconnects once the forge has opened it.
    tokio::select! {
        biased;
        () = asked => {}
        _ = tools.call("create_pull_request", json!({ "title": "Mine" })) => {}
    }
    until(&sessions, &id, |event| matches!(event.body, EventBody::PrOpened { .. })).await;
    let pull = sessions.get(&id).await.unwrap().repositories.remove(0).pr.unwrap();
    assert_eq!((pull.number, pull.title.as_str()), (7, "Mine"));
}

fn graphql(query: &str, variables: serde_json::Value) -> ForgeCall {
    let body = json!({ "query": query, "variables": variables }).to_string().into_bytes();
    ForgeCall::Graphql { body }
}

fn read(path: &str) -> ForgeCall {
    let path = path.split('/').map(str::to_owned).collect();
    ForgeCall::Read { path, query: Vec::new(), accept: "*/*".to_owned() }
}

#[tokio::test]
async fn forges_are_read_for_own_repositories_only() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let parent = parent(&harness, &sessions).await;
    let tools = tools(&harness, &parent);
    let own = format!("repos/{}/pulls", demo());
    let answer = tools.forge(read(&own)).await;
    assert_eq!((answer.status, &answer.body[..]), (200, &b"[]"[..]));
    for (path, status) in [
        ("repos/acme/other/pulls".to_owned(), 404),
        ("user".to_owned(), 404),
        ("repos".to_owned(), 404),
        (format!("repos/{}/hooks", demo()), 403),
        (format!("repos/{}/../other/pulls", demo()), 403),
    ] {
        assert_eq!(tools.forge(read(&path)).await.status, status, "{path}");
    }
    assert_eq!(harness.pulls.reads.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn session_does_not_use_up_the_forge() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let parent = parent(&harness, &sessions).await;
    let tools = tools(&harness, &parent);
    let own = format!("repos/{}/pulls", demo());
    let refused = async {
        loop {
            let answer = tools.forge(read(&own)).await;
            if answer.status != 200 {
                return answer;
            }
        }
    };
    let refused = tokio::time::timeout(Duration::from_secs(120), refused).await.expect("a limit");
    let text = String::from_utf8(refused.body).unwrap();
    assert!(refused.status == 429 && text.contains("try again in"), "{text}");
    assert!(harness.pulls.reads.lock().unwrap().len() >= 600);
}

#[tokio::test]
async fn gh_writes_own_branch_only() {
    const CREATE: &str = "mutation PullRequestCreate($input: CreatePullRequestInput!) {
        createPullRequest(input: $input) { pullRequest { id url } } }";
    const COMMENT: &str = "mutation CommentCreate($input: AddCommentInput!) {
        addComment(input: $input) { commentEdge { node { url } } } }";
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let session = harness.session(&sessions, Some("hold")).await;
    let (id, branch) = (session.id, session.branch);
    until(&sessions, &id, started).await;
    removal::eventually("tools", || harness.doors.1.lock().unwrap().contains_key(&id)).await;
    let tools = tools(&harness, &id);
    let ask = async |query: &str, input: serde_json::Value| {
        let answer = tools.forge(graphql(query, json!({ "input": input }))).await;
        serde_json::from_slice::<serde_json::Value>(&answer.body).unwrap()
    };
    let create = |head: &str, base: &str, repository: &str| {
        json!({
            "repositoryId": format!("harvest:repository:{repository}"), "title": "Mine",
            "body": "Text <!-- harvest:begin -->", "headRefName": head, "baseRefName": base,
            "draft": true, "maintainerCanModify": true,
        })
    };
    let (name, other) = (demo().to_string(), "acme/other");
    let refusal = async |query: &str, input| {
        let answer = ask(query, input).await;
        answer["errors"][0]["message"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    };
    let early = refusal(CREATE, create(&branch, "main", &name)).await;
    assert!(early.contains("run `git push` first"), "{early}");
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    let pushed = EventBody::Pushed {
        repository: demo(),
        branch: branch.clone(),
        commit: "c0ffee".to_owned(),
    };
    ledger.log(&id, pushed).await;
    for (input, why) in [
        (create("main", "main", &name), "of its branch"),
        (create(&branch, "a..b", &name), "not a valid branch"),
        (create(&branch, "main", other), "only its own repositories"),
    ] {
        let refused = refusal(CREATE, input).await;
        assert!(refused.contains(why), "{refused}");
    }
    assert!(harness.pulls.opened.lock().unwrap().is_empty());
    let created = ask(CREATE, create(&branch, "main", &name)).await;
    let pull = &created["data"]["createPullRequest"]["pullRequest"];
    assert_eq!(pull["url"], "http://forge/7", "{created}");
    let opened = harness.pulls.opened.lock().unwrap()[0].1.clone();
    assert!(opened.draft && opened.title == "Mine" && *opened.base == *"main", "{opened:?}");
    assert_eq!(opened.body.matches("<!-- harvest:begin -->").count(), 1, "{}", opened.body);
    assert!(opened.body.starts_with("Text <!-- harvest :begin -->"), "{}", opened.body);
    let own = json!({ "subjectId": pull["id"], "body": "Done" });
    assert!(ask(COMMENT, own).await["data"]["addComment"].is_object());
    // Of a fork, from a branch with the same name.
    let of_fork = pull["id"].as_str().unwrap().strip_suffix('7').unwrap().to_owned() + "8";
    let of_fork = refusal(COMMENT, json!({ "subjectId": of_fork, "body": "Mine" })).await;
    assert!(of_fork.contains("that is 7"), "{of_fork}");
    harness.pulls.open.lock().unwrap().values_mut().for_each(|pull| {
        pull.branch = "people/work".parse().unwrap();
    });
    let of_people = json!({ "subjectId": pull["id"], "body": "Mine" });
    let refused = refusal(COMMENT, of_people).await;
    assert!(refused.contains("of its branch"), "{refused}");
    assert_eq!(*harness.pulls.comments.lock().unwrap(), [(7, "Done".to_owned())]);
}
