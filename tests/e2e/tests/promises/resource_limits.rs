//! Promise 9: resource exhaustion stays inside its sandbox.

use std::time::Duration;

use harvest_e2e::Host;
use harvest_proto::bridge::Exit;
use serde_json::json;

use crate::{SAMPLE, completed};

#[tokio::test]
async fn fork_bomb_and_memory_hog_spare_pid_1() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let session = host.session("calc", "Begin.", &json!([{ "text": "ready" }])).await.id;
    let mut follower = host.follow(session.clone());
    follower.until("the first turn", completed).await;
    let sandbox = host.show(&session).await.sandbox;

    let hog = "python3 -c 'x = []\nwhile True: x.append(bytearray(16 << 20))'";
    assert_eq!(host.exec(&session, "harvest", hog).await.0, Exit::Oom);
    // Every process has left its parent; the timeout still kills the whole tree. The shell itself
    // forks once, before the bomb can use up the process limit.
    let bomb = "f() { f | f & }; (f) & exec sleep 600";
    let exit = host.exec_within(&session, "harvest", bomb, Duration::from_secs(3)).await.0;
    assert_eq!(exit, Exit::Timeout);

    host.prompt(&session, "Go on.", &json!([{ "bash": "echo alive" }, { "text": "alive" }])).await;
    let last = follower.seen.last().map_or(0, |event| event.seq);
    follower.after(last, "the next turn", completed).await;
    assert_eq!(host.show(&session).await.sandbox, sandbox, "it is the same sandbox");
}
