//! What a user learns about a missing or rejected API key and about a budget that is used up, with
//! real Claude Code.

use harvest_e2e::{Host, eventually};
use harvest_proto::{
    EventBody, SessionId, StateReason, TurnReason,
    api::{Budget, Page, Session, SessionState, Spending},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use crate::{SAMPLE, completed, secrets::set_secret, turn_ended};

const SET_KEY: &str = "harvest secret set ANTHROPIC_API_KEY";

#[tokio::test]
async fn run_without_key_starts_nothing() {
    let host = Host::start().await;
    let folder = host.home().join("app");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("a"), "a").unwrap();
    let refused = host.harvest(["run", "-r", folder.to_str().unwrap(), "Fix it."]);
    assert!(refused.code == 1 && refused.stderr.contains(SET_KEY), "{refused:?}");
    for list in [&["ls", "--json"][..], &["repo", "ls", "--json"]] {
        assert_eq!(host.harvest(list).stdout.trim(), "[]", "{list:?}");
    }
    let response = host.request(reqwest::Method::POST, "/v1/sessions").json(&json!({}));
    let response = response.send().await.unwrap();
    assert_eq!(response.status(), 409);
    assert!(response.text().await.unwrap().contains("\"no_key\""));
    let doctor = host.harvest(["doctor"]);
    assert!(doctor.stdout.contains("model_key") && doctor.stdout.contains(SET_KEY), "{doctor:?}");
}

#[tokio::test]
async fn session_or_repository_key_is_enough_to_run() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let run = ["run", "-r", "calc", "--net", "none", "-d", "Fix it."];
    assert_eq!(host.harvest(run).code, 1, "there is no key");
    let key = [("ANTHROPIC_API_KEY", "sk-planted-of-session")];
    let secret = ["--secret", "ANTHROPIC_API_KEY"];
    let given = host.harvest_with(&key, run.iter().chain(&secret));
    assert_eq!(given.code, 0, "{given:?}");
    let listed = host.harvest(["secret", "ls"]).stdout;
    assert!(listed.contains("ANTHROPIC_API_KEY") && listed.contains("session"), "{listed}");
    let id = given.stdout.trim();
    assert_eq!(host.harvest(["rm", "-y", id]).code, 0);
    let listed = host.harvest(["secret", "ls"]).stdout;
    assert!(!listed.contains("ANTHROPIC"), "it is deleted with the session: {listed}");
    let missing = host.harvest(run.iter().chain(&["--secret", "OTHER_KEY"]));
    assert!(missing.code == 1 && missing.stderr.contains("OTHER_KEY"), "{missing:?}");
    set_secret(&host, &["ANTHROPIC_API_KEY", "-r", "calc"], "sk-planted-of-repository");
    let of_repository = host.harvest(run);
    assert_eq!(of_repository.code, 0, "{of_repository:?}");
}

#[tokio::test]
async fn rejected_key_fails_turn_and_names_command() {
    let model = rejecting_model().await;
    let env = [("ANTHROPIC_API_KEY", "sk-wrong"), ("HARVEST_UPSTREAMS_ANTHROPIC_URL", &model)];
    let host = Host::start_with(&env).await;
    let doctor = host.harvest(["doctor"]);
    assert!(doctor.stdout.contains("ANTHROPIC_API_KEY is in the environment"), "{doctor:?}");
    let body = json!({ "network": "none", "prompt": "Ask the model." });
    let session: Session = serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
    host.follow(session.id.clone()).until("the turn to fail", turn_ended).await;
    let events = host.events(&session.id).await;
    let retried = |body: &EventBody| matches!(body, EventBody::Retry { .. });
    assert!(!events.iter().any(retried), "{events:?}");
    let named = |body: &EventBody| matches!(body, EventBody::TurnEnded { error: Some(error), .. } if error.contains(SET_KEY));
    assert!(events.iter().any(named), "{events:?}");
}

#[tokio::test]
async fn exhausted_budget_names_its_setting() {
    let host = Host::start_with(&[("HARVEST_BUDGET_TOKENS", "100")]).await;
    host.repository("calc", SAMPLE).await;
    let session = host.session("calc", "Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(session.clone()).until("the first turn", completed).await;
    host.wait_for(&session, SessionState::Idle).await;
    host.prompt(&session, "Go on.", &json!([{ "text": "no" }])).await;
    let failed = |body: &EventBody| matches!(body, EventBody::TurnEnded { error: Some(_), .. });
    let ended = host.follow(session.clone()).until("the second turn", failed).await;
    let EventBody::TurnEnded { error: Some(error), .. } = ended.body else { panic!("{ended:?}") };
    assert!(error.contains("token budget reached") && error.contains("budget_tokens"), "{error}");
    assert!(!error.contains("authenticate"), "{error}");
}

/// A server on which a call of the scripted model costs at most two dollars, and usually 12 cents.
async fn priced_host() -> (tempfile::TempDir, Host) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prices.toml");
    let prices = "[[price]]\nupstream = \"scripted\"\nmodels = [\"*\"]\ninput = 1000\n\
        output = 1000\ncontext = 1000\nmax_output = 1000\n";
    std::fs::write(&path, prices).unwrap();
    let host = Host::start_with(&[("HARVEST_PRICES", path.to_str().unwrap())]).await;
    (folder, host)
}

/// A session that may spend ten dollars.
async fn limited(host: &Host, agent: &str, prompt: &str, script: Value) -> SessionId {
    let body = json!({
        "repository": "calc", "agent": agent, "model": "scripted", "network": "none",
        "budget_micros": 10_000_000, "prompt": format!("{prompt}\nscript: {script}"),
    });
    let session: Session = serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
    session.id
}

#[tokio::test]
async fn raised_budget_continues_conversation_of_every_agent() {
    let (_folder, host) = priced_host().await;
    host.repository("calc", SAMPLE).await;
    for agent in ["claude", "opencode", "codex"] {
        let dear =
            json!([[{ "usage": { "output": 10_000 } }, { "bash": "true" }], { "text": "no" }]);
        let id = limited(&host, agent, "Begin.", dear).await;
        let mut follower = host.follow(id.clone());
        let ended = follower.until("the refusal", turn_ended).await;
        let EventBody::TurnEnded { reason, error: Some(error), .. } = ended.body else {
            panic!("{agent}: {ended:?}")
        };
        assert_eq!(reason, Some(TurnReason::Budget), "{agent}: {error}");
        let command = format!("harvest budget {id} AMOUNT");
        assert!(error.contains("budget reached: $10.00") && error.contains(&command), "{error}");
        let waiting = host.wait_for(&id, SessionState::NeedsInput).await;
        assert_eq!(waiting.reason, StateReason::Budget, "{agent}");
        let events = host.events(&id).await;
        let retried = |body: &EventBody| matches!(body, EventBody::Retry { .. });
        assert!(!events.iter().any(retried), "{agent}: {events:?}");
        let shown = host.harvest(["show", &id.to_string()]);
        assert!(shown.stdout.contains(" of $10.00"), "{agent}: {shown:?}");
        let raised = host.harvest(["budget", &id.to_string(), "1000"]);
        assert!(raised.code == 0 && raised.stdout.contains("of $1000.00"), "{agent}: {raised:?}");
        follower.until("the next turn", completed).await;
        host.wait_for(&id, SessionState::Idle).await;
        host.prompt(&id, "Remember.", &json!([{ "history": true }])).await;
        let said = |body: &EventBody| matches!(body, EventBody::TextDelta { text } if text.contains("2 earlier prompts"));
        follower.until("the history", said).await;
        let stats = host.harvest(["stats", "--by", "session", "--since", "1h"]);
        assert!(stats.stdout.contains(&id.to_string()), "{agent}: {stats:?}");
    }
}

#[tokio::test]
async fn raised_day_budget_continues_stopped_session() {
    let (_folder, host) = priced_host().await;
    host.repository("calc", SAMPLE).await;
    let day = |amount: &str| host.harvest(["budget", "--day", amount]);
    assert_eq!(day("2").code, 0);
    let prompt = "Begin.\nscript: [[{\"usage\": {\"output\": 10000}}, {\"bash\": \"true\"}]]";
    let run = ["run", "-r", "calc", "-m", "scripted", "--net", "none", "--key", "dear", prompt];
    let stopped = host.harvest(run);
    assert_eq!(stopped.code, 3, "{stopped:?}");
    assert!(stopped.stderr.contains("`harvest budget --day AMOUNT` raises"), "{stopped:?}");
    assert!(!stopped.stderr.contains("answer with"), "{stopped:?}");
    let page: Page<Session> =
        host.get("/v1/sessions?key=dear").send().await.unwrap().json().await.unwrap();
    let id = page.items[0].id.clone();
    assert_eq!(day("1000").code, 0);
    host.follow(id.clone()).until("the next turn", completed).await;
    assert_eq!(host.wait_for(&id, SessionState::Idle).await.turns, 2);
}

#[tokio::test]
async fn stats_count_cpu_and_memory_across_a_kill() {
    let mut host = Host::start().await;
    let work = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done";
    let session = host.bare("Work.", &json!([{ "bash": work }])).await.id;
    host.follow(session.clone()).until("the turn", completed).await;
    let sum = |host: &Host| {
        let stats = host.harvest(["stats", "--by", "session", "--json"]);
        let sums: Vec<Spending> = serde_json::from_str(&stats.stdout).unwrap();
        sums.into_iter().find(|sum| sum.name == session.to_string()).unwrap()
    };
    let first = sum(&host);
    assert!(first.cpu_millis > 20, "{first:?}");
    host.kill();
    host.up().await;
    let paused = host.harvest(["pause", &session.to_string()]);
    assert_eq!(paused.code, 0, "{paused:?}");
    let last = sum(&host);
    // Counted once: the second server reads the same counter.
    assert!((first.cpu_millis..first.cpu_millis * 2 + 1000).contains(&last.cpu_millis), "{last:?}");
    assert!(last.memory_mib_seconds >= first.memory_mib_seconds, "{first:?} {last:?}");
    let table = host.harvest(["stats"]).stdout;
    assert!(table.contains("CPU S") && table.contains("MEMORY GIB S"), "{table}");
}

#[tokio::test]
async fn killed_server_charges_calls_in_progress() {
    let (_folder, mut host) = priced_host().await;
    host.repository("calc", SAMPLE).await;
    let id = limited(&host, "claude", "Wait.", json!([{ "hang": 600 }])).await;
    let today = async || {
        let page: Page<Budget> = host.get("/v1/budgets").send().await.ok()?.json().await.ok()?;
        page.items.into_iter().next()
    };
    eventually("the call", || async {
        today().await.filter(|day| day.held_micros.micros() >= 2_000_000)
    })
    .await;
    assert!(host.show(&id).await.spent_micros.micros() < 2_000_000);
    host.kill();
    host.up().await;
    let spent = host.show(&id).await.spent_micros.micros();
    assert!((2_000_000..10_000_000).contains(&spent), "{spent}");
}

#[tokio::test]
async fn budgets_add_up_after_kills_around_calls() {
    let (_folder, mut host) = priced_host().await;
    host.repository("calc", SAMPLE).await;
    let steps: Vec<_> = (0..40).map(|_| json!({ "bash": "true" })).collect();
    let id = limited(&host, "claude", "Work.", json!(steps)).await;
    // A call is held, made, settled and logged within milliseconds: each kill meets another moment.
    for count in 1..=6 {
        let called = |body: &EventBody| matches!(body, EventBody::ModelCall { .. });
        let mut follower = host.follow(id.clone());
        for _ in 0..count {
            follower.until("a call", |body| called(body) || turn_ended(body)).await;
        }
        drop(follower);
        host.kill();
        host.up().await;
    }
    host.post(&format!("/v1/sessions/{id}/stop"), json!({})).await;
    let day = eventually("all calls to be settled", || async {
        let page: Page<Budget> = host.get("/v1/budgets").send().await.ok()?.json().await.ok()?;
        page.items.into_iter().next().filter(|day| day.held_micros.micros() == 0)
    })
    .await;
    let stats = host.harvest(["stats", "--by", "session", "--json"]);
    let sums: Vec<Spending> = serde_json::from_str(&stats.stdout).unwrap();
    let calls: u64 = sums.iter().map(|sum| sum.spent_micros.micros()).sum();
    let session = host.show(&id).await.spent_micros.micros();
    assert!(session > 0, "nothing was called");
    assert_eq!((calls, session), (day.spent_micros.micros(), day.spent_micros.micros()));
}

/// A stand-in for the model service that accepts no key.
async fn rejecting_model() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = vec![0; 1 << 20];
            let _ = stream.read(&mut request).await;
            let error = json!({ "type": "authentication_error", "message": "invalid x-api-key" });
            let body = json!({ "type": "error", "error": error }).to_string();
            let head =
                "HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\nconnection: close";
            let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            let _ = stream.write_all(answer.as_bytes()).await;
            // Reads until the client closes: a reset could overtake the response.
            while stream.read(&mut request).await.is_ok_and(|read| read > 0) {}
        }
    });
    url
}
