//! Durability with the store on PostgreSQL.

use harvest_e2e::{Host, Postgres};
use harvest_proto::{EventBody, api::SessionState};
use serde_json::json;

use crate::{completed, durable::runs_once_although_the_server_dies};

#[tokio::test]
async fn postgres_session_continues_after_server_kill() {
    let database = Postgres::shared().database();
    let mut host = Host::start_with(&[("HARVEST_DATABASE", &database.url())]).await;
    let session = runs_once_although_the_server_dies(&mut host).await;
    assert!(!host.home().join("harvest.db").exists());

    let mut follower = host.follow(session.clone());
    follower.until("the first turn", completed).await;
    // All database connections are cut, as in a restart of PostgreSQL, without visible effect.
    database.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()",
    );
    let third = host.prompt(&session, "Once more.", &json!([{ "text": "done" }])).await;
    let ended = |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == third.id);
    follower.until("the third turn", ended).await;
    assert_eq!(host.wait_for(&session, SessionState::Idle).await.turns, 3);
}

#[tokio::test]
async fn home_refuses_to_start_with_another_database() {
    let database = Postgres::shared().database();
    let mut host = Host::start_with(&[("HARVEST_DATABASE", &database.url())]).await;
    host.kill();
    for other in ["sqlite:/nowhere/at.all", "postgres://ada:s3cret@127.0.0.1:1/harvest"] {
        let up =
            host.harvest_with(&[("HARVEST_DATABASE", other)], ["up", "--listen", "127.0.0.1:0"]);
        assert_ne!(up.code, 0);
        assert!(!up.stderr.contains("s3cret"), "{}", up.stderr);
    }
    let up = host.harvest_with(&[("HARVEST_DATABASE", "")], ["up", "--listen", "127.0.0.1:0"]);
    assert_ne!(up.code, 0);
    assert!(up.stderr.contains("the sessions of this home are in postgres://"), "{}", up.stderr);
    assert!(up.stderr.contains("hint: "), "{}", up.stderr);
}
