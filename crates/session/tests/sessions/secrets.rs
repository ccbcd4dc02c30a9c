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

/// The warning about secrets in a prompt.
fn warning(event: &Event) -> Option<&str> {
    match &event.body {
        EventBody::Warning { message } => Some(message),
        _ => None,
    }
}

#[tokio::test]
async fn secrets_in_prompts_are_masked_before_storing() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let create = CreateSession {
        prompt: Some("Use given-planted-1".parse().unwrap()),
        secrets: [("GIVEN".to_owned(), Secret::new("given-planted-1".to_owned()))].into(),
        ..CreateSession::default()
    };
    let given = sessions.create(create, ada()).await.unwrap();
    let later = sessions.create(CreateSession::default(), ada()).await.unwrap().id;
    until_state(&sessions, &later, SessionState::Idle).await;
    // Stored while the driver of the session lives.
    harness.doors.find_secrets(&[Some(&[("STORED", "stored-planted-2"), ("OTHER", "unused-3")])]);
    harness.vault.mark_change();
    let create = CreatePrompt::new("Try stored-planted-2!".parse().unwrap());
    let prompt = sessions.prompt(&later, create, ada()).await.unwrap();
    assert_eq!(prompt.text, format!("Try {}!", "*".repeat(16)).as_str());
    until(&sessions, &later, ended).await;
    let fork = ForkSession {
        turn: Some(0),
        prompt: Some("Again stored-planted-2".parse().unwrap()),
        ..ForkSession::default()
    };
    let fork = sessions.fork(&later, fork, ada()).await.unwrap().remove(0).id;
    for (id, begin, name) in
        [(&given.id, "Use ", "GIVEN"), (&later, "Try ", "STORED"), (&fork, "Again ", "STORED")]
    {
        until(&sessions, id, ended).await;
        let session = sessions.get(id).await.unwrap();
        assert!(session.title.starts_with(&format!("{begin}***")), "{}", session.title);
        let events = all(&sessions, id).await;
        let warnings: Vec<_> = events.iter().filter_map(warning).collect();
        assert!(matches!(warnings[..], [one] if one.contains(name)), "{name}: {warnings:?}");
        let texts = format!("{session:?} {events:?} {:?}", sessions.prompts(id).await.unwrap());
        assert!(!texts.contains("planted"), "{texts}");
    }
    for file in std::fs::read_dir(harness.folder.path()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!bytes.windows(8).any(|window| window == b"-planted"));
    }
}

#[tokio::test]
async fn prompt_is_refused_while_secrets_are_unreadable() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    harness.doors.find_secrets(&[None]);
    let create = CreatePrompt::new("hello".parse().unwrap());
    let id = sessions.create(CreateSession::default(), ada()).await.unwrap().id;
    let refused = sessions.prompt(&id, create, ada()).await.unwrap_err();
    assert_eq!(refused.code(), "store_failed");
    assert_eq!(sessions.prompts(&id).await.unwrap(), []);
    let create =
        CreateSession { prompt: Some("hello".parse().unwrap()), ..CreateSession::default() };
    assert_eq!(sessions.create(create, ada()).await.unwrap_err().code(), "store_failed");
}

#[tokio::test]
async fn events_wait_until_secrets_can_be_read() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    // The secret is stored after the prompt, and the first look for it fails.
    harness.doors.find_secrets(&[Some(&[]), None, Some(&[("KEY", "echo-planted-4")])]);
    let create = CreateSession {
        prompt: Some("echo-planted-4".parse().unwrap()),
        ..CreateSession::default()
    };
    let id = sessions.create(create, ada()).await.unwrap().id;
    until(&sessions, &id, ended).await;
    let events = all(&sessions, &id).await;
    let texts: Vec<_> = events
        .iter()
        .filter_map(|event| match &event.body {
            EventBody::TextDelta { text } => Some(text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(texts, ["*".repeat(14)]);
}
