//! `harvest down` loses nothing: the next server continues what the last one left.

use harvest_e2e::{Host, eventually};
use harvest_proto::{EventBody, SessionId, api::SessionState};
use serde_json::json;

use crate::completed;

/// A background server of this host; stopped at the end, whatever the test finds.
struct Background<'a>(&'a Host);

impl<'a> Background<'a> {
    fn up(host: &'a Host) -> Self {
        let up = host.harvest_with(&[("HARVEST_LISTEN", "127.0.0.1:0")], ["up", "-d"]);
        assert_eq!(up.code, 0, "{up:?}");
        Self(host)
    }
}

impl Drop for Background<'_> {
    fn drop(&mut self) {
        self.0.harvest(["down"]);
    }
}

/// The number of lines that a turn has written so far.
async fn lines(host: &Host, session: &SessionId) -> Option<u64> {
    host.show(session).await.sandbox?;
    let (_, out) = host.exec(session, "root", "cat /tmp/lines 2>/dev/null | wc -l").await;
    out.trim().parse().ok().filter(|lines| *lines > 0)
}

#[tokio::test]
async fn down_suspends_turn_and_up_continues_it() {
    let mut host = Host::start().await;
    host.kill();
    let server = Background::up(&host);
    // The turn runs until it is told to end, however busy the machine is.
    let command =
        "echo 1 >> /tmp/lines; until test -e /tmp/go; do sleep 0.1; done; echo 2 >> /tmp/lines";
    let busy = host.bare("Count.", &json!([{ "bash": command }, { "text": "counted" }])).await.id;
    let idle = host.bare("Say hello.", &json!([{ "text": "hello" }])).await.id;
    host.wait_for(&idle, SessionState::Idle).await;
    eventually("the turn to write", || lines(&host, &busy)).await;

    let down = host.harvest(["down"]);
    assert_eq!(down.code, 0, "{down:?}");
    assert!(down.stderr.contains("saving 2 running sandboxes"), "{down:?}");
    assert!(down.stderr.contains("the next `harvest up` continues 1 turn"), "{down:?}");
    drop(server);

    let _server = Background::up(&host);
    host.exec(&busy, "root", "touch /tmp/go").await;
    host.follow(busy.clone()).until("the turn to complete", completed).await;
    let events = host.events(&busy).await;
    let count = |fits: fn(&EventBody) -> bool| events.iter().filter(|body| fits(body)).count();
    assert_eq!(count(|body| matches!(body, EventBody::TurnStarted { .. })), 1);
    assert_eq!(count(|body| matches!(body, EventBody::SandboxStarted { .. })), 1);
    assert_eq!(lines(&host, &busy).await, Some(2), "every command ran once");
    assert_eq!(host.show(&idle).await.state, SessionState::Paused);
}
