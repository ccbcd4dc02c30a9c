//! An agent of the configuration: the real Gemini CLI, with the recipe and the configuration of
//! `docs/adding-an-agent.md`, the scripted model and no network.

use std::fs;

use harvest_e2e::{Host, eventually};
use harvest_proto::{
    Event, EventBody,
    event::{ToolKind, Usage},
};
use serde_json::json;

use crate::{SAMPLE, agents::last, completed};

/// The code blocks of the page: the recipe and the configuration.
fn documented() -> (String, String) {
    let page = include_str!("../../../../docs/adding-an-agent.md");
    let mut blocks = page.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    (blocks.next().unwrap().to_owned(), blocks.next().unwrap().to_owned())
}

async fn host() -> Host {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, config) = documented();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("gemini.toml"), recipe).unwrap();
    fs::write(path("harvest.toml"), config).unwrap();
    let mut host = Host::start_with(&[("HARVEST_CONFIG", &path("harvest.toml"))]).await;
    let built = host.harvest(["image", "build", &path("gemini.toml")]);
    assert_eq!(built.code, 0, "{built:?}");
    // The file is gone after this; the server has read it.
    host.set("HARVEST_CONFIG", "/dev/null");
    host
}

#[tokio::test]
async fn gemini_makes_a_change_in_several_steps() {
    let host = host().await;
    host.repository("calc", SAMPLE).await;
    // Its commands do not see the configuration of the user's home, which has the author.
    let author = "-c user.name=G -c user.email=g@example.org";
    let script = json!([
        [{ "text": "Let me see." }, { "bash": "id -u; git status --short" }],
        { "write": { "path": "/workspace/calc/made.txt", "content": "one\n" } },
        { "edit": { "path": "/workspace/calc/made.txt", "old": "one", "new": "two" } },
        { "bash": format!("git add made.txt && git {author} commit -qm 'Add made.txt' && git push -q") },
        { "text": "All done." },
    ]);
    let session = host.session_of("gemini", "calc", "Change it.", &script).await.id;
    let mut follower = host.follow(session.clone());
    let ready = follower
        .until("ready", |body| matches!(body, EventBody::AgentReady { version: Some(_), .. }))
        .await;
    assert!(
        matches!(&ready.body, EventBody::AgentReady { version: Some(v), .. } if v == "0.61.0"),
        "{ready:?}"
    );
    follower.until("turn 1", completed).await;
    let kinds = follower.seen.iter().filter_map(|event| match &event.body {
        EventBody::ToolStarted { kind, .. } => Some(*kind),
        _ => None,
    });
    let expected = [ToolKind::Execute, ToolKind::Edit, ToolKind::Edit, ToolKind::Execute];
    assert_eq!(kinds.collect::<Vec<_>>(), expected);
    let failed = |event: &Event| matches!(event.body, EventBody::ToolEnded { ok: false, .. });
    assert!(!follower.seen.iter().any(failed), "{:?}", follower.seen);
    let pushed = |event: &Event| matches!(event.body, EventBody::Pushed { .. });
    assert!(follower.seen.iter().any(pushed), "{:?}", follower.seen);
    // Gemini CLI reports no output of commands.
    let (id, object) = (session.to_string(), "HEAD:made.txt");
    let committed =
        host.harvest(["exec", &id, "--", "git", "-C", "/workspace/calc", "show", object]);
    assert_eq!(committed.stdout, "two\n", "{committed:?}");
    assert!(follower.text().contains("Let me see.") && follower.text().contains("All done."));
    // The last call is recorded when its connection has ended.
    let calls = eventually("five calls of the model", || async {
        let events = host.events(&session).await;
        let calls: Vec<(u16, Usage)> = events.iter().filter_map(model_call).collect();
        (calls.len() >= 5).then_some(calls)
    })
    .await;
    for (status, usage) in calls {
        assert_eq!((status, usage.input_tokens, usage.output_tokens), (200, 100, 20));
    }

    // The next prompt, and nothing was refused on the way.
    let before = last(&follower);
    host.prompt(&session, "Again.", &json!([{ "history": true }])).await;
    follower.after(before, "turn 2", completed).await;
    assert_eq!(crate::agents::remembered(&follower, before), 1);
    let refused = |event: &Event| matches!(event.body, EventBody::EgressRefused { .. });
    assert!(!follower.seen.iter().any(refused), "{:?}", follower.seen);
}

fn model_call(body: &EventBody) -> Option<(u16, Usage)> {
    match body {
        EventBody::ModelCall { status, usage, .. } => Some((*status, *usage)),
        _ => None,
    }
}
