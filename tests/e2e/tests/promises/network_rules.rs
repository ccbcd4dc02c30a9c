//! Network rules on a running session: they open a name, close it again and cut what is open.

use harvest_e2e::Host;
use harvest_proto::{EventBody, bridge::Exit};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use crate::turn_ended;

// With the dot, a program inside asks the resolver; without it, `/etc/hosts` answers.
const NAME: &str = "localhost.";

/// A server that greets each connection and then waits for its end.
pub(crate) async fn greeter() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = stream.write_all(b"hello\n").await;
                let _ = stream.read_to_end(&mut Vec::new()).await;
            });
        }
    });
    port
}

#[tokio::test]
async fn rules_open_and_close_a_name_at_once() {
    let mut host = Host::start().await;
    let port = greeter().await;
    let session = host.bare("Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(session.clone()).until("the first turn", turn_ended).await;
    let greeted = format!("exec 3<>/dev/tcp/{NAME}/{port} && head -n 1 <&3");
    let greeted = format!("bash -c '{greeted}'");
    let refused = host.exec(&session, "harvest", &greeted).await;
    assert_ne!(refused.0, Exit::Code(0), "{refused:?}");
    let (target, id) = (format!("localhost:{port}"), session.to_string());
    // A private address needs an admin's rule that says so.
    assert_eq!(host.harvest(["net", "allow", &id, &target]).code, 0);
    let private = host.exec(&session, "harvest", &greeted).await;
    assert_ne!(private.0, Exit::Code(0), "{private:?}");
    assert_eq!(host.harvest(["net", "allow", "--everywhere", "--private", &target]).code, 0);
    assert_eq!(host.exec(&session, "harvest", &greeted).await, (Exit::Code(0), "hello\n".into()));
    // A rule survives a restart of the server.
    host.kill();
    host.up().await;
    assert_eq!(host.exec(&session, "harvest", &greeted).await.0, Exit::Code(0));
    // An open connection ends when a rule denies it.
    let waits = format!("exec 3<>/dev/tcp/{NAME}/{port}; touch /tmp/open; cat <&3 > /dev/null");
    let waits = format!("bash -c '{waits}' & while [ ! -e /tmp/open ]; do sleep 0.1; done; wait");
    let cut = host.exec(&session, "harvest", &waits);
    let deny = async {
        loop {
            let (exit, _) = host.exec(&session, "harvest", "test -e /tmp/open").await;
            if exit == Exit::Code(0) {
                break;
            }
        }
        assert_eq!(host.harvest(["net", "deny", &id, "localhost"]).code, 0);
    };
    let (cut, ()) = tokio::join!(cut, deny);
    assert_eq!(cut.0, Exit::Code(0), "{cut:?}");
    assert_ne!(host.exec(&session, "harvest", &greeted).await.0, Exit::Code(0));
    let events = host.events(&session).await;
    let denied = |body: &EventBody| matches!(body, EventBody::EgressRefused { reason, .. } if reason.contains("denied"));
    assert!(events.iter().any(denied), "{events:?}");
    let listed = host.harvest(["net", "ls", &id]).stdout;
    assert!(listed.contains("deny rule (session)"), "{listed}");
}

#[tokio::test]
async fn wildcard_rules_are_set_and_removed_by_name() {
    let host = Host::start().await;
    let name = "*.example.org";
    let allowed = host.harvest(["net", "allow", "--everywhere", name]);
    assert_eq!(allowed.code, 0, "{allowed:?}");
    assert!(host.harvest(["net", "ls"]).stdout.contains(name));
    assert_eq!(host.harvest(["net", "rm", "--everywhere", name]).code, 0);
    assert!(!host.harvest(["net", "ls"]).stdout.contains(name));
    for wrong in ["*.", "a*.org", "../x"] {
        assert_ne!(host.harvest(["net", "allow", "--everywhere", wrong]).code, 0, "{wrong}");
    }
}
