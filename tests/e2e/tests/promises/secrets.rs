//! Promise 7: secrets are found in the vault only.

use std::{
    fs,
    io::Write as _,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use harvest_e2e::{Host, binary};
use harvest_proto::{EventBody, api::Session};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use crate::{SAMPLE, completed, turn_ended};

const KEY: &str = "sk-planted-5f1d0c2ab77e4e0f";
const TOKEN: &str = "git-planted-90bd1174c6aa83e2";
const OF_REPOSITORY: &str = "repository-planted-3a1f7be0c2";
const OF_USER: &str = "user-planted-77d0e1b94f";
const OF_SESSION: &str = "session-planted-0c4b2d9e61";

/// The digest that the local forge keeps of a token.
fn sha256(text: &str) -> String {
    let script = format!("printf %s {text} | sha256sum | cut -d' ' -f1 | tr -d '\\n'");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn planted_secrets_are_found_nowhere() {
    // The most verbose log level, where leaks would show.
    let (model, calls) = unkind_model().await;
    let env = [
        ("ANTHROPIC_API_KEY", KEY),
        ("HARVEST_UPSTREAMS_ANTHROPIC_URL", &model),
        ("HARVEST_LOG", "trace"),
    ];
    let host = Host::start_with(&env).await;
    host.repository("calc", SAMPLE).await;
    set_secret(&host, &["GIT_TOKEN"], TOKEN);
    set_secret(&host, &["OF_REPOSITORY", "-r", "calc"], OF_REPOSITORY);
    set_secret(&host, &["OF_USER", "--user"], OF_USER);
    // A remote that refuses the token, at once and later: errors tend to leak secrets.
    let url = format!("{}/forge/local/calc.git", host.url().unwrap());
    let add = || host.harvest(["repo", "add", &url, "--name", "shut", "--secret", "GIT_TOKEN"]);
    assert_ne!(add().code, 0, "a repository that cannot be read is not registered");
    let hash = host.home().join("forge/calc/token");
    let before = fs::read(&hash).unwrap();
    fs::write(&hash, sha256(TOKEN)).unwrap();
    assert_eq!(add().code, 0);
    fs::write(&hash, before).unwrap();
    let refused = host.harvest(["repo", "build", "shut"]);
    assert_ne!(refused.code, 0, "{refused:?}");

    let look =
        "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; cat ~/.gitconfig";
    // A user may paste a secret into a prompt.
    let pasted = format!("Look around with {OF_REPOSITORY}.");
    let session =
        host.session("calc", &pasted, &json!([{ "bash": look }, { "text": "looked" }])).await.id;
    host.follow(session.clone()).until("the turn to end", completed).await;
    let echo = json!([{ "text": "done" }]);
    let prompt = host.prompt(&session, &format!("Use {KEY}, {TOKEN}, {OF_USER}."), &echo).await.id;
    let ended =
        |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == prompt);
    host.follow(session.clone()).until("the second turn", ended).await;
    let asked = json!({
        "repository": "calc", "network": "none", "prompt": format!("Ask {OF_SESSION} the model."),
        "secrets": { "OF_SESSION": OF_SESSION },
    });
    let asked: Session = serde_json::from_value(host.post("/v1/sessions", asked).await).unwrap();
    host.follow(asked.id.clone()).until("the turn to fail", turn_ended).await;
    assert!(
        calls.load(Ordering::SeqCst) > 0,
        "the gateway used the key: the test has looked at something"
    );

    let paused = host.post(&format!("/v1/sessions/{session}/pause"), json!({})).await;
    let warned: Vec<_> = host
        .events(&session)
        .await
        .into_iter()
        .filter_map(|body| match body {
            EventBody::Warning { message } if message.contains("masked") => Some(message),
            _ => None,
        })
        .collect();
    assert!(warned[0].contains("the secret OF_REPOSITORY"), "{warned:?}");
    assert!(warned[1].contains("ANTHROPIC_API_KEY, GIT_TOKEN, OF_USER"), "{warned:?}");
    let titles = host.harvest(["ls"]);
    assert!(titles.stdout.contains("Look around with ****"), "{titles:?}");
    let events = format!("{:?}{:?}", host.events(&session).await, host.events(&asked.id).await);
    for secret in [KEY, TOKEN, OF_REPOSITORY, OF_USER, OF_SESSION] {
        for (place, text) in [
            ("CLI", format!("{refused:?}")),
            ("events", events.clone()),
            ("API", paused.to_string()),
            ("list", titles.stdout.clone()),
        ] {
            assert!(!text.contains(secret), "{secret} is in the {place}: {text}");
        }
        let (_, inside) = host
            .exec(&asked.id, "root", &format!("grep -rlI --exclude-dir=proc {secret} / 2>/dev/null; cat /proc/*/environ 2>/dev/null | grep -c {secret}"))
            .await;
        assert_eq!(inside.trim(), "0", "{secret} is inside the sandbox");
        // Logs, database, layers and snapshots on the host.
        let found = Command::new("grep").args(["-rl", secret]).arg(host.home()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&found.stdout), "", "{secret} is on the host's disk");
    }
}

/// A stand-in for the model service that echoes the key in its responses.
async fn unkind_model() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = vec![0; 1 << 20];
            let length = stream.read(&mut request).await.unwrap_or(0);
            if String::from_utf8_lossy(&request[..length]).contains(KEY) {
                counted.fetch_add(1, Ordering::SeqCst);
            }
            let body = json!({ "type": "error", "error": { "type": "authentication_error", "message": format!("bad key {KEY}") } });
            let body = body.to_string();
            let answer = format!(
                "HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            let _ = stream.write_all(answer.as_bytes()).await;
            // Reads until the client closes: a reset could overtake the response.
            while stream.read(&mut request).await.is_ok_and(|read| read > 0) {}
        }
    });
    (url, calls)
}

#[tokio::test]
async fn cli_warns_of_masked_and_misnamed_secrets() {
    let host = Host::start().await;
    let said = set_secret(&host, &["CLAUDE_API_KEY"], KEY);
    assert!(said.contains("ANTHROPIC_API_KEY is meant"), "{said}");
    let session = host.bare("Begin.", &json!([{ "text": "ready" }])).await.id;
    let sent = host.harvest(["send", &session.to_string(), &format!("Use {KEY}.")]);
    assert!(sent.code == 0 && sent.stderr.contains("value of a secret"), "{sent:?}");
    let plain = host.harvest(["send", &session.to_string(), "Go on."]);
    assert!(plain.code == 0 && !plain.stderr.contains("secret"), "{plain:?}");
}

/// Runs `harvest secret set` with these arguments. Returns what it says.
pub(crate) fn set_secret(host: &Host, arguments: &[&str], value: &str) -> String {
    let mut child = Command::new(binary("harvest"))
        .args(["secret", "set"])
        .args(arguments)
        .env("HARVEST_HOME", host.home())
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(value.as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stderr).unwrap()
}
