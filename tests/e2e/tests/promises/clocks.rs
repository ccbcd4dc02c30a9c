//! Promise 6 when the host's wall clock jumps: nothing times out and no order changes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use harvest_e2e::{Host, eventually};
use harvest_proto::{EventBody, SessionId, Timestamp, api::SessionState};
use serde_json::{Value, json};

use crate::{completed, turn_ended};

/// A fake wall clock for servers started from here on.
pub(crate) struct Wall(PathBuf);

impl Wall {
    pub(crate) fn of(host: &mut Host) -> Self {
        let wall = Self(host.home().join("wall"));
        wall.set("+0");
        let library = library()
            .expect("Debian's package `libfaketime` is not installed; `make test` installs it");
        for (name, value) in [
            ("LD_PRELOAD", library.to_str().unwrap()),
            ("FAKETIME_TIMESTAMP_FILE", wall.0.to_str().unwrap()),
            ("FAKETIME_NO_CACHE", "1"),
            // The monotonic clock stays real.
            ("DONT_FAKE_MONOTONIC", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            // No shared memory that would outlive a kill.
            ("FAKETIME_DISABLE_SHM", "1"),
        ] {
            host.set(name, value);
        }
        wall
    }

    pub(crate) fn set(&self, how: &str) {
        // Atomic: a partly written number would be another time.
        let new = self.0.with_extension("new");
        fs::write(&new, how).and_then(|()| fs::rename(&new, &self.0)).unwrap();
    }
}

fn library() -> Option<PathBuf> {
    let folders = fs::read_dir("/usr/lib").ok()?.flatten().map(|entry| entry.path());
    let library = |folder: PathBuf| folder.join("faketime/libfaketimeMT.so.1");
    folders.map(library).find(|path| Path::exists(path))
}

fn hours(from: Timestamp, to: Timestamp) -> i64 {
    let hours = (to.as_millis() - from.as_millis()) as f64 / 3_600_000.0;
    hours.round() as i64
}

#[tokio::test]
async fn wall_clock_jumps_neither_end_nor_reorder_turns() {
    let mut host =
        Host::start_with(&[("HARVEST_CLOCKS_TURN", "1h"), ("HARVEST_CLOCKS_STOP", "1s")]).await;
    // The zygote starts before the clock is changed.
    let idle = host.bare("Rest.", &json!([{ "text": "ready" }])).await;
    host.follow(idle.id.clone()).until("the first turn", completed).await;
    let began = idle.created_at;
    let wall = Wall::of(&mut host);
    host.kill();
    host.up().await;
    let script = json!([{ "bash": "until [ -e ~/go ]; do sleep 0.05; done" }, { "text": "done" }]);
    let session = host.bare("Work.", &script).await.id;
    let works = |body: &EventBody| matches!(body, EventBody::ToolStarted { .. });
    host.follow(session.clone()).until("it to work", works).await;
    let mut asked = Vec::new();
    for (how, restart) in
        [("-1h", false), ("+3h", false), ("+3h", true), ("-26h", true), ("+30h", true)]
    {
        wall.set(how);
        if restart {
            host.kill();
            host.up().await;
        }
        // A queued prompt carries the server's idea of the time.
        let prompt = host.prompt(&session, how, &json!([{ "text": "ok" }])).await;
        let off: i64 = how.trim_end_matches('h').parse().unwrap();
        assert_eq!(hours(began, prompt.created_at), off, "the clock was put to {how}");
        asked.push(prompt.id);
        lives_on(&host, &session, &idle.id).await;
    }
    host.exec(&session, "harvest", "touch ~/go").await;
    let mut follower = host.follow(session.clone());
    let last = asked.last().unwrap().clone();
    let of_last =
        |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt, .. } if *prompt == last);
    follower.until("the last turn", of_last).await;
    let ends: Vec<_> = follower.seen.iter().filter(|event| turn_ended(&event.body)).collect();
    assert!(ends.iter().all(|event| completed(&event.body)), "{ends:?}");
    let in_order = ends.iter().skip(1).map(|event| match &event.body {
        EventBody::TurnEnded { prompt, .. } => prompt.clone(),
        _ => unreachable!("only ends are here"),
    });
    assert_eq!(in_order.collect::<Vec<_>>(), asked, "in the order they were asked for");
    assert_eq!(host.show(&session).await.epoch, 1, "in one sandbox");
    let page: Value = host.get("/v1/sessions").send().await.unwrap().json().await.unwrap();
    assert_eq!(page["items"].as_array().unwrap().len(), 2);
}

/// The turn keeps running and the idle session is not frozen.
async fn lives_on(host: &Host, session: &SessionId, idle: &SessionId) {
    // Using an idle session restarts its idle timeout, which makes the server read its clocks.
    assert_eq!(host.exec(idle, "harvest", "echo on").await.1, "on\n");
    let running = eventually("the session to be adopted", || async {
        Some(host.show(session).await).filter(|now| now.state == SessionState::Running)
    })
    .await;
    assert_eq!((running.turns, running.epoch), (1, 1));
    let rests = host.show(idle).await;
    assert_eq!((rests.state, rests.epoch), (SessionState::Idle, 1), "{rests:?}");
}
