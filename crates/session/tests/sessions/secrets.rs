//! Secrets of sessions: who uses them, and how long they exist.

use harvest_proto::SecretOwner;

use super::*;

fn bob() -> Author {
    Author { name: "Bob".into(), email: "bob@example.org".into() }
}

#[tokio::test]
async fn session_secret_reaches_only_forks_of_its_author() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_parts(lease).await.sessions;
    let create = CreateSession {
        repository: Some("demo".to_owned()),
        prompt: Some("write /f one".parse().unwrap()),
        secrets: [("TOKEN".to_owned(), Secret::new("s3cr3t-of-session".to_owned()))].into(),
        ..CreateSession::default()
    };
    let source = sessions.create(create, ada()).await.unwrap().id;
    until(&sessions, &source, ended).await;
    let pass = harness.doors.0.lock().unwrap().last().unwrap().clone();
    let owners = [
        SecretOwner::Session(source.clone()),
        SecretOwner::Repository(demo()),
        SecretOwner::user(&ada().email),
        SecretOwner::Global,
    ];
    assert_eq!(pass.secrets, owners);
    let again = ForkSession { turn: Some(0), ..ForkSession::default() };
    let own = sessions.fork(&source, again.clone(), ada()).await.unwrap().remove(0).id;
    let others = sessions.fork(&source, again, bob()).await.unwrap().remove(0).id;
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    let token = async |session: &SessionId| {
        let found = ledger.secret(&[SecretOwner::Session(session.clone())], "TOKEN").await;
        found.map(|value| value.expose().clone())
    };
    assert_eq!(token(&source).await.as_deref(), Some("s3cr3t-of-session"));
    assert_eq!(token(&own).await.as_deref(), Some("s3cr3t-of-session"));
    assert_eq!(token(&others).await, None);
    sessions.delete(&source).await.unwrap();
    assert_eq!((token(&source).await, token(&own).await.is_some()), (None, true));
    for file in std::fs::read_dir(harness.folder.path()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!bytes.windows(17).any(|window| window == b"s3cr3t-of-session"));
    }
}

#[tokio::test]
async fn secrets_of_new_session_are_checked() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    for (name, value) in [("token", "x"), ("TOKEN", ""), ("TOKEN", &*"x".repeat(70_000))] {
        let secrets = [(name.to_owned(), Secret::new(value.to_owned()))].into();
        let create = CreateSession { secrets, ..CreateSession::default() };
        let refused = sessions.create(create, ada()).await.unwrap_err();
        assert!(matches!(refused.code(), "invalid_name" | "invalid_secret"), "{refused}");
    }
    assert_eq!(sessions.list(None, 10).await.unwrap().items.len(), 0);
}
