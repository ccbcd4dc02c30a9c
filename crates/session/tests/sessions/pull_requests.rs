//! Pull requests of sessions, and webhooks, with a recording forge.

use std::sync::MutexGuard;

use harvest_forge::{ForgeFailure, PullRequestSpec, WebhookHeaders, sign_webhook};
use harvest_proto::api::{
    CreatePullRequest, MergePullRequest, PullRequestMode, UpdatePullRequest, UseRepository,
};
use harvest_session::{Repositories, WebhookRefusal};

use super::*;

const URL: &str = "https://example.org/demo.git";

/// A session with a turn in progress that has pushed a commit.
struct Pushed {
    harness: Harness,
    parts: ServerParts,
    ledger: StoreLedger,
    session: Session,
}

impl Pushed {
    async fn new(create: CreateSession) -> Self {
        let mut harness = Harness::new().await;
        harness.config.schedule = true;
        let lease = harness.lease().await;
        let parts = harness.serve_parts(lease).await;
        let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
        let prompt = Some("hold".parse().unwrap());
        let session = parts.sessions.create(CreateSession { prompt, ..create }, ada()).await;
        let session = session.unwrap();
        until(&parts.sessions, &session.id, started).await;
        let pushed = Self { harness, parts, ledger, session };
        pushed.push("c0ffee").await;
        pushed
    }

    async fn on_demo(pr_mode: Option<PullRequestMode>) -> Self {
        let repository = Some("demo".to_owned());
        Self::new(CreateSession { repository, pr_mode, ..CreateSession::default() }).await
    }

    async fn push(&self, commit: &str) {
        let repository = self.session.repository.clone().unwrap();
        let (branch, commit) = (self.session.branch.clone(), commit.to_owned());
        let pushed = EventBody::Pushed { repository, branch, commit };
        self.ledger.log(&self.session.id, pushed).await;
    }

    /// Ends the turn, and waits until its commit is checked.
    async fn reviewed(&self) -> Vec<Event> {
        let sandbox = sandbox(&self.parts.sessions, &self.session.id).await;
        self.harness.fake.finish_turn(&sandbox);
        let checked = |event: &Event| matches!(event.body, EventBody::Evidence(_));
        until(&self.parts.sessions, &self.session.id, checked).await;
        all(&self.parts.sessions, &self.session.id).await
    }

    fn repositories(&self) -> &Repositories {
        &self.parts.repositories
    }

    fn opened(&self) -> Vec<PullRequestSpec> {
        let opened = self.harness.pulls.opened.lock().unwrap();
        opened.iter().map(|(_, spec)| spec.clone()).collect()
    }

    fn at_forge(&self) -> MutexGuard<'_, HashMap<String, PullRequest>> {
        self.harness.pulls.open.lock().unwrap()
    }

    async fn known(&self) -> Option<PullRequest> {
        self.parts.sessions.get(&self.session.id).await.unwrap().repositories.remove(0).pr
    }

    async fn webhook(&self, event: &str, id: &str, body: &str) -> Result<bool, WebhookRefusal> {
        let secret = Secret::new(WEBHOOK_SECRET.to_owned());
        let signature = sign_webhook(&secret, body.as_bytes());
        let headers =
            WebhookHeaders { signature: Some(&signature), event: Some(event), delivery: Some(id) };
        self.repositories().receive_webhook(headers, body.as_bytes()).await
    }
}

fn skipped(events: &[Event]) -> Vec<(String, Option<String>)> {
    let skipped = events.iter().filter_map(|event| match &event.body {
        EventBody::PrSkipped { reason, hint, .. } => Some((reason.clone(), hint.clone())),
        _ => None,
    });
    skipped.collect()
}

#[tokio::test]
async fn pull_request_of_killed_server_is_found() {
    let work = Pushed::on_demo(None).await;
    let opened = PullRequest {
        number: 7,
        url: "http://forge/7".into(),
        title: "A person's title".into(),
        body: "A person's text".into(),
        state: PullRequestState::Open,
        draft: false,
        branch: work.session.branch.clone(),
        base: "main".parse().unwrap(),
        commit: "c0ffee".into(),
        evidence: None,
    };
    work.at_forge().insert(URL.to_owned(), opened);
    work.reviewed().await;
    assert!(work.opened().is_empty(), "it is not opened again");
    assert_eq!(work.known().await.unwrap().number, 7);
    let current = work.at_forge()[URL].clone();
    assert_eq!(current.title, "A person's title");
    assert!(current.body.starts_with("A person's text\n\n<!-- harvest:begin -->"), "{current:?}");
    assert!(current.body.contains("- check: none"), "{current:?}");
}

#[tokio::test]
async fn session_without_pull_request_is_still_checked() {
    let work = Pushed::on_demo(Some(PullRequestMode::None)).await;
    let events = work.reviewed().await;
    assert_eq!((work.opened().len(), skipped(&events).len()), (0, 0));
    let mode = work.parts.sessions.get(&work.session.id).await.unwrap().pr_mode;
    assert_eq!(mode, Some(PullRequestMode::None));
    let (id, title) = (&work.session.id, Some("Asked for".to_owned()));
    let other =
        CreatePullRequest { repository: Some("other".parse().unwrap()), ..Default::default() };
    let other = work.repositories().pull_request_create(id, other).await.unwrap_err();
    assert_eq!(other.code(), "not_found");
    let update = UpdatePullRequest { title: title.clone(), ..Default::default() };
    let missing = work.repositories().pull_request_update(id, update.clone()).await.unwrap_err();
    assert_eq!(missing.code(), "no_pr");
    let create = CreatePullRequest { draft: Some(true), ..Default::default() };
    let created = work.repositories().pull_request_create(id, create).await.unwrap();
    assert_eq!(created[0].pr.as_ref().unwrap().title, "hold");
    assert!(work.opened()[0].draft);
    let updated = work.repositories().pull_request_update(id, update).await.unwrap();
    assert_eq!(updated.pr.unwrap().title, "Asked for");
    let refused = work.repositories().pull_request_merge(id, MergePullRequest::default()).await;
    let refused = refused.unwrap_err();
    assert!(refused.to_string().contains("http://forge/7"), "{refused}");
}

#[tokio::test]
async fn draft_is_opened_when_asked_for() {
    let work = Pushed::on_demo(Some(PullRequestMode::Draft)).await;
    work.reviewed().await;
    assert!(work.opened()[0].draft && work.known().await.unwrap().draft);
}

#[tokio::test]
async fn refusing_forge_is_reported_and_commit_checked() {
    let work = Pushed::on_demo(None).await;
    let suspended = || ForgeFailure::Suspended { repository: "o/demo".into() };
    *work.harness.pulls.refuses.lock().unwrap() = Some(suspended);
    let events = work.reviewed().await;
    let [(reason, hint)] = &skipped(&events)[..] else { panic!("{events:#?}") };
    assert!(reason.contains("is suspended") && hint.is_some(), "{reason}");
    *work.harness.pulls.refuses.lock().unwrap() = None;
    let create = CreatePullRequest::default();
    work.repositories().pull_request_create(&work.session.id, create).await.unwrap();
    assert_eq!(work.known().await.unwrap().number, 7);
}

#[tokio::test]
async fn remote_without_api_is_said_and_checked() {
    let url = Some("https://example.org/plain.git".to_owned());
    let repositories = vec![UseRepository { url, ..UseRepository::default() }];
    let work = Pushed::new(CreateSession { repositories, ..CreateSession::default() }).await;
    let events = work.reviewed().await;
    let [(reason, _)] = &skipped(&events)[..] else { panic!("{events:#?}") };
    assert!(reason.contains("no forge with an API for pull requests"), "{reason}");
    assert!(work.known().await.is_none());
}

#[tokio::test]
async fn closed_pull_request_is_not_opened_again() {
    let work = Pushed::on_demo(None).await;
    work.reviewed().await;
    work.at_forge().get_mut(URL).unwrap().state = PullRequestState::Closed;
    let body = r#"{"action":"closed","pull_request":{"number":7},
                   "repository":{"clone_url":"https://EXAMPLE.org/demo.git"}}"#;
    assert!(work.webhook("pull_request", "d-1", body).await.unwrap());
    let closed = |event: &Event| {
        let EventBody::PrChanged { state, .. } = &event.body else { return false };
        *state == PullRequestState::Closed
    };
    until(&work.parts.sessions, &work.session.id, closed).await;
    assert!(!work.webhook("pull_request", "d-1", body).await.unwrap(), "a repeated delivery");
    send(&work.parts.sessions, &work.session.id, "hold").await;
    let mut turns = 0;
    until(&work.parts.sessions, &work.session.id, |event| {
        turns += usize::from(started(event));
        turns == 2
    })
    .await;
    work.push("beef").await;
    let sandbox = sandbox(&work.parts.sessions, &work.session.id).await;
    work.harness.fake.finish_turn(&sandbox);
    let checked = |event: &Event| matches!(&event.body, EventBody::Evidence(evidence) if evidence.commit == "beef");
    until(&work.parts.sessions, &work.session.id, checked).await;
    assert_eq!(work.opened().len(), 1);
}

#[tokio::test]
async fn merge_is_noticed_without_webhooks() {
    let work = Pushed::on_demo(None).await;
    work.reviewed().await;
    work.at_forge().get_mut(URL).unwrap().state = PullRequestState::Merged;
    for _ in 0..2 {
        work.repositories().refresh_pull_requests().await.unwrap();
    }
    let known = work.known().await.unwrap();
    assert_eq!(known.state, PullRequestState::Merged);
    assert!(known.evidence.is_some());
    let events = all(&work.parts.sessions, &work.session.id).await;
    let changed = |event: &&Event| matches!(event.body, EventBody::PrChanged { .. });
    assert_eq!(events.iter().filter(changed).count(), 1);
    let update = UpdatePullRequest { title: Some("Late".into()), ..Default::default() };
    let late = work.repositories().pull_request_update(&work.session.id, update).await;
    assert_eq!(late.unwrap_err().code(), "not_open");
}

#[tokio::test]
async fn pushed_base_is_built_at_once() {
    let work = Pushed::on_demo(None).await;
    *work.harness.doors.2.lock().unwrap() = "newer".to_owned();
    let push = |branch: &str| {
        format!(
            r#"{{"ref":"refs/heads/{branch}","repository":{{"clone_url":"{URL}",
                "default_branch":"main"}}}}"#
        )
    };
    work.webhook("push", "d-1", &push("other")).await.unwrap();
    assert!(work.repositories().builds(&demo()).await.unwrap().is_empty());
    work.webhook("push", "d-2", &push("main")).await.unwrap();
    let built = async {
        while work.repositories().builds(&demo()).await.unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), built).await.expect("the base is built");
}

#[tokio::test]
async fn forged_webhook_changes_nothing() {
    let work = Pushed::on_demo(None).await;
    let headers = WebhookHeaders {
        signature: Some("sha256=00"),
        event: Some("check_run"),
        delivery: Some("d-1"),
    };
    let refused = work.repositories().receive_webhook(headers, b"{}").await.unwrap_err();
    assert!(matches!(refused, WebhookRefusal::Refused(_)), "{refused}");
    assert!(work.webhook("check_run", "d-1", "{}").await.unwrap(), "its id is not taken");
    assert!(work.webhook("unknown", "d-2", "{}").await.unwrap());
    let kept = work.harness.store.webhook_list().await.unwrap();
    assert_eq!(kept.iter().map(|one| one.event.as_str()).collect::<Vec<_>>(), ["check_run"]);
}

#[tokio::test]
async fn draft_is_made_ready_and_recorded() {
    let work = Pushed::on_demo(Some(PullRequestMode::Draft)).await;
    work.reviewed().await;
    for draft in [false, true] {
        let update = UpdatePullRequest { draft: Some(draft), ..Default::default() };
        let updated = work.repositories().pull_request_update(&work.session.id, update).await;
        assert_eq!(updated.unwrap().pr.unwrap().draft, draft);
        assert_eq!(work.known().await.unwrap().draft, draft);
    }
}
